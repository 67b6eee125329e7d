"""The plugin takes over method dflash, and nothing else."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from test_reference import load_reference
from tiny_models import write_tiny_drafter

from vllm_dflash.reference import features_and_logits

pytestmark = pytest.mark.case("F47")


def test_dflash_runs_our_proposer_and_drafter(engine, tiny_target, tiny_drafter):
    runner = engine(tiny_target, drafter=tiny_drafter, num_drafted=4).runner
    assert type(runner.drafter).__module__ == "vllm_dflash.proposer"
    assert type(runner.drafter.model).__module__ == "vllm_dflash.drafter"
    assert type(runner).__name__ == "CPUModelRunner"  # of the V1 runner's family


def test_switched_off_it_leaves_vllms_own(engine, tiny_target, tiny_drafter):
    runner = engine(tiny_target, drafter=tiny_drafter, num_drafted=7, native=True).runner
    assert type(runner.drafter).__module__ == "vllm.v1.spec_decode.dflash"
    assert type(runner.drafter.model).__module__ == "vllm.model_executor.models.qwen3_dflash"


def test_other_methods_are_vllms(engine, tiny_target):
    settings = {"method": "draft_model", "model": str(tiny_target), "num_speculative_tokens": 3}
    other = engine(tiny_target, speculative=settings)
    assert type(other.runner.drafter).__module__ == "vllm.v1.spec_decode.draft_model"
    prompt = [3, 5, 7, 3, 5, 7, 3, 5]
    assert other.token_ids([prompt], max_tokens=16) == engine(tiny_target).token_ids([prompt], max_tokens=16)


@pytest.mark.case("F27")
def test_k_is_completed_from_the_trained_block(engine, tiny_target, tiny_drafter):
    served = engine(tiny_target, drafter=tiny_drafter)
    assert served.runner.num_spec_tokens == 7
    [result] = served.generate([[3, 5, 7]], max_tokens=8)
    assert len(result.drafts[0].tokens) == 7


@pytest.mark.case("F27")
def test_k_beyond_the_trained_block_is_clamped(engine, tiny_target, tiny_drafter):
    assert engine(tiny_target, drafter=tiny_drafter, num_drafted=12).runner.num_spec_tokens == 7


@pytest.mark.case("F28")
def test_method_is_read_from_the_drafter(engine, tiny_target, tiny_drafter):
    """`{"model": ...}` alone is enough; the folder's name says nothing."""
    served = engine(tiny_target, speculative={"model": str(tiny_drafter), "num_speculative_tokens": 2})
    assert type(served.runner.drafter).__module__ == "vllm_dflash.proposer"


def test_wrong_pair_is_refused_before_loading(engine, tiny_target, tmp_path):
    wide = write_tiny_drafter(tmp_path / "wide", num_target_layers=36)
    with pytest.raises(ValueError, match="36 layers, but target .* has 4; use a drafter trained for this target"):
        engine(tiny_target, drafter=wide)


def test_nan_weights_are_refused(engine, tiny_target, tmp_path):
    broken = write_tiny_drafter(tmp_path / "nan", {"norm.weight": torch.full((64,), float("nan"))})
    with pytest.raises(ValueError, match="values that are NaN or infinite in norm.weight"):
        engine(tiny_target, drafter=broken)


def test_speculators_drafter_is_served_bidirectional(engine, tiny_target, tiny_drafter, tmp_path):
    """vLLM serves this dialect causal; drafts must equal those of the same weights in z-lab's dialect."""
    folder = tmp_path / "speculators"
    folder.mkdir()
    shutil.copy(tiny_drafter / "model.safetensors", folder)
    z_lab = json.loads((tiny_drafter / "config.json").read_text())
    inner = {
        k: v for k, v in z_lab.items() if k not in ("architectures", "block_size", "num_target_layers", "dflash_config")
    }
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "block_size": 8,
        "draft_vocab_size": 128,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 0,
        "sliding_window_non_causal": False,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": str(tiny_target), "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    prompts = [[3, 5, 7], list(range(20, 60))]
    served = engine(tiny_target, drafter=folder, num_drafted=7)
    assert served.runner.drafter.dflash_causal is False
    expected = engine(tiny_target, drafter=tiny_drafter, num_drafted=7).generate(prompts, max_tokens=24)
    assert [r.drafts for r in served.generate(prompts, max_tokens=24)] == [r.drafts for r in expected]


@pytest.mark.case("F9")
def test_reduced_draft_vocabulary_maps_to_target_ids(engine, tiny_target, tmp_path):
    """A head of 32 rows with offsets: row d stands for target token d + d2t[d]."""
    d2t = torch.arange(32) * 3  # draft token d is target token 4 d
    tensors = {"lm_head.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(5)), "d2t": d2t}
    reduced = write_tiny_drafter(tmp_path / "reduced", tensors, draft_vocab_size=32)
    [result] = engine(tiny_target, drafter=reduced, num_drafted=7).generate([[3, 5, 7]], max_tokens=24)
    drafted = {token for draft in result.drafts for token in draft.tokens}
    assert len(drafted) > 4
    assert all(token % 4 == 0 for token in drafted)
    target, reference = load_reference(tiny_target, reduced)
    tokens = result.prompt_ids + result.token_ids
    features = reference.fuse(features_and_logits(target, tokens, reference.config)[0])
    for draft in result.drafts[:10]:
        context, anchor = features[: draft.anchor_position], tokens[draft.anchor_position]
        assert reference.draft(context, anchor, 7) == draft.tokens
