"""A drafter's config.json, written: DFlashConfig to z-lab's and to speculators' dialect; config.py reads both.

What is written reads back as the same drafter, and vLLM without our plugin must serve it alike. Where a dialect cannot
say something, or vLLM 0.32 or 0.33 would misread it, writing is refused; but for the embedding scale, which vLLM
overlooks (it reads it for DFlash2 only) in the one dialect that has it: such a drafter needs our plugin.

    dialect      causal attention in the block               feature layers  embedding scale  served without flags
    z-lab        all layers, none, or just the sliding ones  0 is the first  any              no
    speculators  sliding layers only, and all or none        1 is the first  1                yes, it names its target
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from vllm_dflash.config import DFlashConfig

Dialect = Literal["z-lab", "speculators"]

#: Release of speculators whose format is written.
SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True)
class TargetName:
    """The target as speculators' format records it."""

    name: str  # Hub name or folder; vLLM loads it when given nothing but the drafter
    architectures: Sequence[str] = ()


def to_z_lab(config: DFlashConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json in z-lab's dialect.

    Args:
        config: the drafter.
        dtype: of its tensors, as torch names it.

    Raises:
        ValueError: the dialect cannot say what the drafter is.
    """
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    raw: dict[str, Any] = {"architectures": ["DFlashDraftModel"]} | _layers(config)
    raw |= {"rope_scaling": None, "dtype": dtype, "dflash_config": nested}
    if config.num_target_layers is not None:
        raw["num_target_layers"] = config.num_target_layers
    if config.draft_block_size is not None:  # readers look in either place
        raw["block_size"] = nested["block_size"] = config.draft_block_size
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.draft_vocab_size != config.vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.acceptance_rates:
        raw["acceptance_rates"] = list(config.acceptance_rates)
    if config.has_attention_sinks:
        nested["attention_sink_bias"] = True
    if config.input_embedding_scale != 1:
        nested["input_embedding_scale"] = config.input_embedding_scale
    if len(set(config.layer_causal)) == 1:
        # z-lab reads the first, vLLM both. Without them the sliding layers are causal and the others are not.
        raw["is_causal"] = nested["causal"] = config.layer_causal[0]
    _require_same(raw, config, "no format that vLLM reads can say it; train with one window and one causality")
    return raw


def to_speculators(config: DFlashConfig, target: TargetName, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json in speculators' dialect.

    Args:
        config: the drafter.
        target: the model it drafts for.
        dtype: of its tensors, as torch names it.

    Raises:
        ValueError: the dialect cannot say what the drafter is, vLLM would misread it, or there is no target.
    """
    if not target.name:
        raise ValueError(
            f"drafter '{config.name}' does not record its target, which speculators' format names; give it with "
            f"--target, or use z-lab's format."
        )
    if config.draft_block_size is None:
        raise ValueError(
            f"drafter '{config.name}' does not record its block size, which speculators' format requires; use z-lab's."
        )
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.max_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    raw: dict[str, Any] = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "block_size": config.draft_block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        # It is about sliding layers, but vLLM 0.32 and 0.33 make every layer causal where it is false.
        "sliding_window_non_causal": not any(config.layer_causal),
        "target_hidden_size": config.target_hidden_size,
        "transformer_layer_config": _layers(config) | {"rope_parameters": rope},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
    }
    if config.num_target_layers is not None:
        raw["num_target_layers"] = config.num_target_layers
    if config.acceptance_rates:
        raw["acceptance_rates"] = list(config.acceptance_rates)
    _require_same(raw, config, "use z-lab's format")
    if len(set(config.layer_causal)) > 1:
        raise ValueError(
            f"drafter '{config.name}' has causal sliding layers beside bidirectional full ones, and vLLM 0.32 and 0.33 "
            f"would serve all of them causal from speculators' format; use z-lab's format."
        )
    return raw


def _layers(config: DFlashConfig) -> dict[str, Any]:
    """The transformer layers, as Qwen3's config.json describes them."""
    windows = [window for window in config.sliding_windows if window is not None]
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.sliding_windows
        ],
        # Qwen3Config of transformers forgets the window where this is false.
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
    }


def _require_same(raw: dict[str, Any], config: DFlashConfig, repair: str) -> None:
    """Refuse a config.json that does not read back as `config`."""
    read = DFlashConfig.from_dict(raw, config.name)
    for field in fields(config):
        wanted, written = getattr(config, field.name), getattr(read, field.name)
        if field.name not in ("name", "dialect") and wanted != written:
            raise ValueError(
                f"drafter '{config.name}' has {field.name} {wanted}, which {read.dialect}'s config.json cannot say (it "
                f"would be read as {written}); {repair}."
            )
