"""The two dialects of config.json: every key, that they read back the same, and what they cannot say."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tiny_models import drafter_config

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.dialects import TargetName
from vllm_dflash.training.export import to_speculators, to_z_lab

FULL, SLIDING = "full_attention", "sliding_attention"
TARGET = TargetName("small/target", ("Qwen3ForCausalLM",))
CONFIG = DFlashConfig.from_dict(drafter_config(), "tiny")

LAYERS = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "layer_types": [FULL, FULL, FULL],
    "use_sliding_window": False,
    "sliding_window": None,
}

#: Fields of the three-layer drafter's config that differ, by the name of the case.
SHAPES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "reduced vocabulary": {"draft_vocab_size": 32},
    "sliding, bidirectional": {"sliding_windows": (16, 16, 16)},
    "sliding, causal": {"sliding_windows": (16, 16, 16), "layer_causal": (True, True, True)},
    "mixed, bidirectional": {"sliding_windows": (16, None, 16)},
    "other numbers": {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "target_hidden_size": 96, "mask_token_id": 7},
    "biases, no layer count": {"attention_bias": True, "num_target_layers": None},
}
ONLY_Z_LAB: dict[str, dict[str, Any]] = {
    "causal": {"layer_causal": (True, True, True)},
    "mixed, causal where it slides": {"sliding_windows": (16, None, 16), "layer_causal": (True, False, True)},
    "mixed, causal": {"sliding_windows": (16, None, 16), "layer_causal": (True, True, True)},
    "attention sinks": {"has_attention_sinks": True},
    "embedding scale": {"input_embedding_scale": 8.0},
    "no block size": {"draft_block_size": None},
}
UNSPEAKABLE: dict[str, dict[str, Any]] = {
    "two windows": {"sliding_windows": (16, 32, 16)},
    "one causal full layer": {"layer_causal": (True, False, False)},
    "causal where it does not slide": {"sliding_windows": (16, None, 16), "layer_causal": (False, True, False)},
}


def shaped(changes: dict[str, Any]) -> DFlashConfig:
    return dataclasses.replace(CONFIG, **changes)


def test_every_key_of_the_z_lab_dialect():
    assert to_z_lab(CONFIG) == LAYERS | {
        "architectures": ["DFlashDraftModel"],
        "rope_scaling": None,
        "dtype": "bfloat16",
        "num_target_layers": 4,
        "block_size": 8,
        "is_causal": False,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 2], "block_size": 8, "causal": False},
    }


def test_every_key_of_the_speculators_dialect():
    """Feature layers count from 1, and `sliding_window_non_causal` keeps vLLM 0.32 from serving it causal."""
    assert to_speculators(CONFIG, TARGET) == {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 8,
        "draft_vocab_size": 128,
        "dtype": "bfloat16",
        "mask_token_id": 0,
        "num_target_layers": 4,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "target_hidden_size": 64,
        "transformer_layer_config": LAYERS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 7,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "small/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }


def test_sliding_layers_keep_their_window_in_transformers():
    """Qwen3Config sets the window to None unless use_sliding_window is true; vLLM then refuses the drafter."""
    from transformers import Qwen3Config

    sliding = shaped(SHAPES["sliding, causal"])
    for layers in (to_z_lab(sliding), to_speculators(sliding, TARGET)["transformer_layer_config"]):
        assert (layers["use_sliding_window"], layers["sliding_window"]) == (True, 16)
        assert Qwen3Config(**layers).sliding_window == 16


@pytest.mark.parametrize("changes", [*SHAPES.values(), *ONLY_Z_LAB.values()], ids=[*SHAPES, *ONLY_Z_LAB])
@pytest.mark.case("F29")
def test_z_lab_reads_back_the_same(changes):
    raw = json.loads(json.dumps(to_z_lab(shaped(changes))))
    assert DFlashConfig.from_dict(raw, "tiny") == shaped(changes)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.case("F29")
def test_speculators_reads_back_the_same(changes):
    raw = json.loads(json.dumps(to_speculators(shaped(changes), TARGET)))
    assert DFlashConfig.from_dict(raw, "tiny") == shaped(changes | {"dialect": "speculators"})


@pytest.mark.parametrize("changes", ONLY_Z_LAB.values(), ids=ONLY_Z_LAB)
def test_what_speculators_cannot_say_is_refused(changes):
    with pytest.raises(ValueError, match=r"drafter 'tiny' .*use z-lab's"):
        to_speculators(shaped(changes), TARGET)


@pytest.mark.parametrize("changes", UNSPEAKABLE.values(), ids=UNSPEAKABLE)
def test_what_no_format_can_say_is_refused(changes):
    with pytest.raises(ValueError, match=r"drafter 'tiny' has .* would be read as .* no format that vLLM reads"):
        to_z_lab(shaped(changes))
    with pytest.raises(ValueError, match="use z-lab's"):
        to_speculators(shaped(changes), TARGET)


def test_causal_sliding_layers_only_are_causal_in_speculators_words():
    assert to_speculators(shaped(SHAPES["sliding, causal"]), TARGET)["sliding_window_non_causal"] is False


def test_speculators_without_a_target_is_refused():
    with pytest.raises(ValueError, match="does not record its target.*--target"):
        to_speculators(CONFIG, TargetName(""))
