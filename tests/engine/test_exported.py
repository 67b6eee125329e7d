"""vLLM reads exported folders of both formats as they are meant, and serves them with and without our plugin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reference import load_reference
from tiny_models import drafter_config, drafter_tensors

from vllm_dflash.checkpoint import expected_tensors
from vllm_dflash.config import DFlashConfig
from vllm_dflash.reference import features_and_logits
from vllm_dflash.training.dialects import Dialect, TargetName
from vllm_dflash.training.export import export_drafter

CAUSAL, SLIDING = (True, True, True), (16, 16, 16)
PROMPTS = [[3, 5, 7], list(range(20, 60))]


@pytest.fixture(scope="module")
def exported(tiny_target, tmp_path_factory) -> dict[str, Path]:
    """A drafter of two layers and 32 tokens by dialect. Its K-norms are equal, so that vLLM's own class is right."""
    raw = drafter_config(num_hidden_layers=2, draft_vocab_size=32)
    tensors = drafter_tensors(raw)
    tensors["layers.1.self_attn.k_norm.weight"] = tensors["layers.0.self_attn.k_norm.weight"]
    tensors["lm_head.weight"] = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    tensors["d2t"] = torch.arange(32) * 3  # draft token d is target token 4 d
    parent, folders = tmp_path_factory.mktemp("exported"), {}
    for dialect in ("z-lab", "speculators"):
        folders[dialect] = parent / dialect
        write(DFlashConfig.from_dict(raw, "tiny"), tensors, folders[dialect], dialect, tiny_target)
    return folders


def write(config: DFlashConfig, tensors: dict[str, torch.Tensor], folder: Path, dialect: Any, target: Path) -> None:
    name = TargetName(str(target), ("Qwen3ForCausalLM",))
    export_drafter(config, tensors, folder, dialect=dialect, dtype=torch.float32, target=name)


@pytest.mark.case("F29")
def test_both_formats_draft_the_same_with_and_without_the_plugin(engine, tiny_target, exported):
    """Ours is started with nothing but the speculators folder, which names the target and K."""
    engines = {
        "ours": engine(exported["speculators"]),
        "native, z-lab": engine(tiny_target, drafter=exported["z-lab"], num_drafted=7, native=True),
        "native, speculators": engine(tiny_target, drafter=exported["speculators"], num_drafted=7, native=True),
    }
    modules = {name: type(served.runner.drafter.model).__module__ for name, served in engines.items()}
    assert modules["ours"] == "vllm_dflash.drafter"
    assert modules["native, z-lab"] == modules["native, speculators"] == "vllm.model_executor.models.qwen3_dflash"
    results = {name: served.generate(PROMPTS, max_tokens=32) for name, served in engines.items()}
    drafts = {name: [result.drafts for result in some] for name, some in results.items()}
    assert drafts["ours"] == drafts["native, z-lab"] == drafts["native, speculators"]
    assert all(len(draft.tokens) == 7 and draft.tokens[0] % 4 == 0 for draft in drafts["ours"][0][:3])


def test_they_draft_what_the_reference_drafts(engine, tiny_target, exported):
    results = engine(exported["speculators"]).generate(PROMPTS, max_tokens=32)
    target, reference = load_reference(tiny_target, exported["z-lab"])
    num_cycles = 0
    for result in results:
        tokens = result.prompt_ids + result.token_ids
        context = reference.fuse(features_and_logits(target, tokens, reference.config)[0])
        for draft in result.drafts:
            if draft.tokens and draft.anchor_position < len(tokens):
                anchor = tokens[draft.anchor_position]
                assert reference.draft(context[: draft.anchor_position], anchor, 7) == draft.tokens
                num_cycles += 1
    assert num_cycles > 20


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [
        ("z-lab", {}),
        ("z-lab", {"layer_causal": CAUSAL}),
        ("z-lab", {"sliding_windows": SLIDING, "layer_causal": CAUSAL}),
        ("z-lab", {"sliding_windows": SLIDING, "rope_theta": 5e5, "attention_bias": True}),
        ("z-lab", {"sliding_windows": (16, None, 16), "layer_causal": (True, False, True)}),
        ("speculators", {}),
        ("speculators", {"sliding_windows": SLIDING, "layer_causal": CAUSAL}),
        ("speculators", {"sliding_windows": SLIDING, "rope_theta": 5e5, "attention_bias": True}),
        ("speculators", {"sliding_windows": (16, None, 16)}),
    ],
)
def test_vllms_own_class_reads_what_was_written(tmp_path, tiny_target, dialect: Dialect, changes):
    """As vLLM's qwen3_dflash.py does when it builds the layers; nothing is loaded."""
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal, _resolve_layer_attention
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    config = dataclasses.replace(DFlashConfig.from_dict(drafter_config(), "tiny"), **changes)
    tensors = {name: torch.ones(shape) for name, shape in expected_tensors(config)[0].items()}
    write(config, tensors, tmp_path / "drafter", dialect, tiny_target)
    arguments = EngineArgs(
        model=str(tiny_target),
        speculative_config={"method": "dflash", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 7},
        additional_config={"dflash": {"enabled": False}},
        max_model_len=512,
        skip_tokenizer_init=True,
    )
    speculative = arguments.create_speculative_config(arguments.create_model_config(), ParallelConfig())
    assert speculative is not None
    read: Any = speculative.draft_model_config.hf_config
    assert tuple(_dflash_layer_causal(read, layer) for layer in range(3)) == config.layer_causal
    if None not in config.sliding_windows or config.sliding_windows == (None, None, None):  # else for the V2 runner
        assert _resolve_layer_attention(read, 0)[0] == config.sliding_windows[0]
    assert read.layer_types == ["full_attention" if w is None else "sliding_attention" for w in config.sliding_windows]
    assert get_eagle3_aux_layers_from_config(speculative) == config.aux_layer_ids
    assert read.dflash_config["mask_token_id"] == config.mask_token_id
    assert read.rope_parameters["rope_theta"] == config.rope_theta
    assert read.attention_bias == config.attention_bias
