"""The served drafter and the reference on Hugging Face modules draft the same tokens in every cycle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_drafter
from transformers import AutoModelForCausalLM

from vllm_dflash.config import DFlashConfig
from vllm_dflash.reference import ReferenceDrafter, features_and_logits, generate

#: Two tokens whose reference logits are this close are a tie: the sums behind them run in another order.
TIE = 1e-4


def load_reference(target_folder: Path, drafter_folder: Path) -> tuple[torch.nn.Module, ReferenceDrafter]:
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    config = DFlashConfig.from_dict(json.loads((drafter_folder / "config.json").read_text()), str(drafter_folder))
    embed, head = target.get_input_embeddings().weight.data, target.get_output_embeddings().weight.data
    return target, ReferenceDrafter(drafter_folder, config, embed, head)


@torch.inference_mode()
def compare_drafts(results, target, drafter, num_masks: int | None = None) -> tuple[int, list[str], list[str]]:
    """(cycles compared, ties, differences) of served drafts against the reference's.

    Args:
        num_masks: of every block; None = as many as tokens were drafted.
    """
    num_cycles = 0
    ties: list[str] = []
    differences: list[str] = []
    for request, result in enumerate(results):
        tokens = result.prompt_ids + result.token_ids
        features, _ = features_and_logits(target, tokens, drafter.config)
        context = drafter.fuse(features)
        drafts = [draft for draft in result.drafts if draft.tokens and draft.anchor_position < len(tokens)]
        num_cycles += len(drafts)
        predicted = [
            drafter.predict(
                context[: draft.anchor_position], tokens[draft.anchor_position], num_masks or len(draft.tokens)
            )[: len(draft.tokens)]
            for draft in drafts
        ]
        logits = drafter.logits(torch.cat(predicted))  # one product: the head dominates the reference's time
        served = torch.tensor([token for draft in drafts for token in draft.tokens])
        best, chosen = logits.max(-1), logits.gather(-1, served[:, None])[:, 0]
        for row in (best.indices != served).nonzero().flatten().tolist():
            gap = float(best.values[row] - chosen[row])
            (ties if gap < TIE else differences).append(f"request {request}, predicted row {row}: gap {gap:.2e}")
    return num_cycles, ties, differences


@pytest.mark.parametrize("num_drafted", [4, 7])
def test_tiny_drafts_equal_the_reference(engine, tiny_target, tiny_drafter, num_drafted):
    """Three layers whose K-norm weights differ: a drafter that vLLM's native path serves wrongly on a CPU."""
    served = engine(tiny_target, drafter=tiny_drafter, num_drafted=num_drafted)
    prompts = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]
    num_cycles, ties, differences = compare_drafts(
        served.generate(prompts, max_tokens=48), *load_reference(tiny_target, tiny_drafter)
    )
    assert num_cycles > 100
    assert differences == []
    assert len(ties) <= num_cycles // 100


def test_native_vllm_differs_from_the_reference_where_k_norms_differ(engine, tiny_target, tiny_drafter):
    """The defect that context_kv.py avoids; when this fails, the correction has become unnecessary."""
    native = engine(tiny_target, drafter=tiny_drafter, num_drafted=7, native=True)
    assert type(native.runner.drafter).__module__ == "vllm.v1.spec_decode.dflash"
    results = native.generate([[3, 5, 7], list(range(20, 60))], max_tokens=48)
    num_cycles, _, differences = compare_drafts(results, *load_reference(tiny_target, tiny_drafter))
    assert len(differences) > num_cycles // 4


def test_one_layer_drafts_equal_native(engine, tiny_target, tmp_path_factory):
    """With one layer vLLM's native path is right, and both propose the same."""
    one_layer = write_tiny_drafter(tmp_path_factory.mktemp("one-layer"), num_hidden_layers=1)
    prompts = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60))]
    drafts = [
        [
            result.drafts
            for result in engine(tiny_target, drafter=one_layer, num_drafted=7, native=native).generate(
                prompts, max_tokens=48
            )
        ]
        for native in (False, True)
    ]
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("num_prompts", "max_tokens"),
    [(4, 64), pytest.param(20, 128, marks=pytest.mark.slow)],
    ids=["short", "full"],
)
def test_smollm2_drafts_equal_the_reference(engine, smollm2, drafter, smollm2_prompts, num_prompts, max_tokens):
    results = engine(smollm2, drafter=drafter).generate(smollm2_prompts[:num_prompts], max_tokens=max_tokens)
    num_cycles, ties, differences = compare_drafts(results, *load_reference(smollm2, drafter))
    print(f"{num_cycles} cycles compared, ties within {TIE}: {ties}")
    assert num_cycles > num_prompts * max_tokens / 4
    assert differences == []
    assert len(ties) <= num_cycles // 100


def test_reference_generates_the_targets_text(engine, tiny_target, tiny_drafter):
    """The executable specification is itself lossless, and gains what the served drafter gains."""
    target, reference = load_reference(tiny_target, tiny_drafter)
    prompts = [[3, 5, 7], list(range(20, 60))]
    plain = engine(tiny_target).token_ids(prompts, max_tokens=24)
    served = engine(tiny_target, drafter=tiny_drafter, num_drafted=4).generate(prompts, max_tokens=24)
    for prompt, expected, result in zip(prompts, plain, served):
        text, cycles = generate(target, reference, prompt, 24, 4)
        assert text == expected
        shared = min(len(cycles), len(result.drafts))
        assert [(c.start, c.draft) for c in cycles[:shared]] == [
            (d.anchor_position, d.tokens) for d in result.drafts[:shared]
        ]
