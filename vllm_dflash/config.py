"""DFlashConfig: the single reader of a drafter's config.json, in both dialects.

z-lab writes `dflash_config.target_layer_ids` (0-based: the output of that layer) and a flat or nested
`block_size`; speculators writes `aux_hidden_state_layer_ids` (1-based, as vLLM counts) around a
`transformer_layer_config`. This file alone converts between the two countings, and it refuses a drafter
that does not fit its target before anything is loaded. It imports neither torch nor vLLM.

z-lab's `output_multiplier` and `final_logit_softcapping` (logits times a factor, then c tanh(logits / c)) are not read:
both keep the order of logits, so the most probable tokens are the same without them. The drafter's probabilities are
not, so drawn drafts and decided draft lengths see other ones than in training; neither changes the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_dflash.config_values import (
    MOST_POSITIONS,
    acceptance_rates,
    factor,
    layer_ids,
    layer_types,
    mapping,
    number,
    positive,
    wrong,
)

#: A target whose vocabulary is at most this much larger than the drafter's has padded embedding rows, not
#: another tokenizer: inference frameworks pad to multiples of at most 512.
MAX_VOCAB_PADDING = 512
#: Drafted tokens per step that vLLM can verify (v1/sample/rejection_sampler.py, MAX_SPEC_LEN).
_MOST_DRAFTED = 128

_SLIDING = "sliding_attention"


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target; counts and sizes, no units."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class DFlashConfig:
    """A drafter as its config.json describes it, independent of the dialect."""

    name: str  # folder or repository, for messages
    dialect: Literal["z-lab", "speculators"]
    target_layer_ids: tuple[int, ...]  # as z-lab counts: 0 is the output of the target's first layer
    mask_token_id: int
    draft_block_size: int | None  # anchor + masks, as trained; None where the checkpoint does not say
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_target_layers: int | None
    layer_causal: tuple[bool, ...]  # may a block token see the block tokens after it? one flag per layer
    sliding_windows: tuple[int | None, ...]
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    attention_bias: bool
    has_attention_sinks: bool
    is_quantised: bool
    input_embedding_scale: float = 1.0  # block tokens are embedded as the table's rows times it
    acceptance_rates: tuple[float, ...] = ()  # share of cycles in which position 1, 2, ... was accepted, as measured

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The same layers as vLLM counts them: id i is the residual stream *before* layer i."""
        return tuple(layer_id + 1 for layer_id in self.target_layer_ids)

    @property
    def max_speculative_tokens(self) -> int | None:
        """K of the trained block: all slots but the anchor."""
        return None if self.draft_block_size is None else min(self.draft_block_size - 1, _MOST_DRAFTED)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], name: str) -> DFlashConfig:
        """Read the content of a drafter's config.json.

        Raises:
            ValueError: the file is not a DFlash drafter's, or a value is missing or contradictory.
        """
        if "speculators_model_type" in raw:
            return _from_speculators(raw, name)
        if "dflash_config" in raw:
            return _from_z_lab(raw, name)
        raise ValueError(
            f"'{name}' is not a DFlash drafter: its config.json has neither 'dflash_config' (z-lab) nor "
            f"'speculators_model_type' (speculators). Its architectures are {raw.get('architectures')}; give a DFlash "
            f"drafter as 'model' of the speculative config."
        )

    def resolve_num_speculative_tokens(self, requested: int | None) -> tuple[int, str | None]:
        """K to draft, and a warning where it is not what was asked for.

        K is at most the trained block less its anchor: slots beyond it were never trained, and a
        bidirectional block lets them spoil all others.

        Raises:
            ValueError: neither the request nor the checkpoint says how long a block is, or K < 1.
        """
        limit = self.max_speculative_tokens
        if requested is None:
            if limit is None:
                raise ValueError(
                    f"drafter '{self.name}' does not record its block size; "
                    f"set 'num_speculative_tokens' in the speculative config."
                )
            return limit, None
        if type(requested) is not int or requested < 1:
            choice = "at least 1" if limit is None else f"1 to {limit}"
            raise ValueError(
                f"num_speculative_tokens is {requested!r}, but drafter '{self.name}' drafts {choice} per step; choose "
                f"such a whole number, or decode without a speculative config."
            )
        if limit is not None and requested > limit:
            return limit, (
                f"num_speculative_tokens {requested} exceeds what drafter '{self.name}' was trained for: a "
                f"block of {self.draft_block_size} is one anchor and {limit} drafted tokens. Using {limit}."
            )
        return requested, None

    def check_target(self, target: TargetShape) -> None:
        """Refuse a target that this drafter was not made for.

        Raises:
            ValueError: names both sides and the repair.
        """
        mine, its = f"drafter '{self.name}'", f"target '{target.name}'"
        if self.num_target_layers not in (None, target.num_layers):
            raise ValueError(
                f"{mine} was trained for a target with {self.num_target_layers} layers, but {its} has "
                f"{target.num_layers}; use a drafter trained for this target."
            )
        beyond = [i for i in self.target_layer_ids if not 0 <= i < target.num_layers]
        if beyond:
            raise ValueError(
                f"{mine} reads target layers {list(self.target_layer_ids)}, but {its} has {target.num_layers} "
                f"layers (0 to {target.num_layers - 1}); use a drafter trained for this target."
            )
        if self.target_layer_ids[-1] == target.num_layers - 1:
            raise ValueError(
                f"{mine} reads the output of layer {target.num_layers - 1}, the last of {its}. Frameworks "
                f"disagree whether that is before or after the final norm, so it cannot be served safely; "
                f"train with feature layers below {target.num_layers - 1}."
            )
        if self.target_hidden_size != target.hidden_size:
            raise ValueError(
                f"{mine} reads features of size {self.target_hidden_size}, but the hidden size of {its} is "
                f"{target.hidden_size}; use a drafter trained for this target."
            )
        # This also keeps the mask token, which is inside the drafter's vocabulary, inside the target's.
        if not 0 <= target.vocab_size - self.vocab_size <= MAX_VOCAB_PADDING:
            raise ValueError(
                f"{mine} has a vocabulary of {self.vocab_size} with mask token {self.mask_token_id}, but {its} has "
                f"{target.vocab_size} tokens; they use different tokenizers. Use a drafter trained for this target (a "
                f"reduced draft vocabulary is written as 'draft_vocab_size' with a 'd2t' tensor)."
            )


def is_dflash_config(raw: Mapping[str, Any]) -> bool:
    """Is this config.json a plain DFlash drafter's, which this plugin serves?

    DFlash2, LiLiCorr and other variants carry heads of their own and stay with vLLM.
    """
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] == "dflash"
    return "dflash_config" in raw and raw.get("architectures") == ["DFlashDraftModel"]


def _from_z_lab(raw: Mapping[str, Any], name: str) -> DFlashConfig:
    nested = mapping(raw, "dflash_config", name)
    flat_size, nested_size = raw.get("block_size"), nested.get("block_size")
    if None not in (flat_size, nested_size) and flat_size != nested_size:
        raise wrong(name, "block_size", flat_size, f"block_size {nested_size} in its dflash_config")
    kinds = layer_types(raw, name)
    # `use_swa` makes every layer slide unless the list already says which ones do. It says nothing about causality
    # (vLLM, _resolve_layer_attention): MiMo's drafters slide and are bidirectional.
    all_slide = bool(nested.get("use_swa")) and _SLIDING not in kinds
    causal = raw["is_causal"] if raw.get("is_causal") is not None else nested.get("causal")
    return _build(
        name,
        "z-lab",
        raw,
        target_layer_ids=layer_ids(nested, "target_layer_ids", name),
        mask_token_id=nested.get("mask_token_id", raw.get("mask_token_id")),
        draft_block_size=nested_size if flat_size is None else flat_size,
        layer_slides=tuple(all_slide or kind == _SLIDING for kind in kinds),
        layer_causal=tuple(kind == _SLIDING if causal is None else bool(causal) for kind in kinds),
        sliding_window=nested.get("swa_window_size", raw.get("sliding_window")),
        input_embedding_scale=_nested_or_flat_scale(nested, raw, name),
        has_attention_sinks=bool(nested.get("attention_sink_bias", raw.get("add_swa_attention_sink_bias", False))),
        outer=raw,
    )


def _from_speculators(raw: Mapping[str, Any], name: str) -> DFlashConfig:
    kind = raw["speculators_model_type"]
    if kind != "dflash":
        raise ValueError(f"'{name}' is a speculators checkpoint of type '{kind}', not 'dflash'; name its own method.")
    if raw.get("sample_from_anchor"):
        raise ValueError(
            f"drafter '{name}' predicts from its anchor slot (sample_from_anchor is true), a layout that DFlash "
            f"serving does not have; retrain it with sample_from_anchor false."
        )
    inner = mapping(raw, "transformer_layer_config", name)
    kinds = layer_types(inner, name)
    # speculators trains full-attention layers bidirectional whatever this flag says: it is about sliding layers
    # only (speculators 0.9, models/dflash/attention.py), although vLLM 0.32 and 0.33 apply it to all.
    sliding_is_causal = not raw.get("sliding_window_non_causal", True)
    return _build(
        name,
        "speculators",
        inner,
        target_layer_ids=[i - 1 for i in layer_ids(raw, "aux_hidden_state_layer_ids", name)],
        mask_token_id=raw.get("mask_token_id"),
        draft_block_size=raw.get("block_size"),
        layer_slides=tuple(kind == _SLIDING for kind in kinds),
        layer_causal=tuple(kind == _SLIDING and sliding_is_causal for kind in kinds),
        sliding_window=inner.get("sliding_window"),
        # Its plain drafters are trained without and have no such key; where someone wrote it, it is where DFlash2's is.
        input_embedding_scale=factor(raw, "input_embedding_scale", name) or 1.0,
        has_attention_sinks=False,
        outer=raw,
    )


def _nested_or_flat_scale(nested: Mapping[str, Any], raw: Mapping[str, Any], name: str) -> float:
    """z-lab's code looks in either place."""
    key = "input_embedding_scale"
    inner, flat = factor(nested, key, name), factor(raw, key, name)
    if None not in (inner, flat) and inner != flat:
        raise wrong(name, key, flat, f"{key} {inner} in its dflash_config")
    return inner or flat or 1.0


def _build(
    name: str,
    dialect: Literal["z-lab", "speculators"],
    layers: Mapping[str, Any],
    *,
    target_layer_ids: list[int],
    mask_token_id: Any,
    draft_block_size: Any,
    layer_slides: tuple[bool, ...],
    layer_causal: tuple[bool, ...],
    sliding_window: Any,
    input_embedding_scale: float,
    has_attention_sinks: bool,
    outer: Mapping[str, Any],
) -> DFlashConfig:
    if any(layer_slides) and type(sliding_window) is not int:
        raise wrong(name, "sliding_window", sliding_window, f"{sum(layer_slides)} of its layers slide")
    hidden_size = number(layers, "hidden_size", name)
    num_heads = number(layers, "num_attention_heads", name)
    vocab_size = number(layers, "vocab_size", name)
    rope = mapping(layers, "rope_parameters", name) if layers.get("rope_parameters") else {}
    config = DFlashConfig(
        name=name,
        dialect=dialect,
        target_layer_ids=tuple(target_layer_ids),
        mask_token_id=mask_token_id,
        draft_block_size=draft_block_size,
        hidden_size=hidden_size,
        target_hidden_size=number(outer, "target_hidden_size", name, hidden_size),
        intermediate_size=number(layers, "intermediate_size", name),
        num_layers=len(layer_slides),
        num_heads=num_heads,
        num_kv_heads=number(layers, "num_key_value_heads", name, num_heads),
        head_dim=number(layers, "head_dim", name, hidden_size // num_heads),
        vocab_size=vocab_size,
        draft_vocab_size=number(outer, "draft_vocab_size", name, vocab_size),
        num_target_layers=outer.get("num_target_layers"),
        layer_causal=layer_causal,
        sliding_windows=tuple(sliding_window if slides else None for slides in layer_slides),
        rms_norm_eps=positive(layers, "rms_norm_eps", name) or 1e-6,
        # vLLM's default where a drafter names no base (qwen3_dflash.py, DFlashQwen3DecoderLayer).
        rope_theta=positive(layers, "rope_theta", name) or positive(rope, "rope_theta", name) or 1_000_000.0,
        max_position_embeddings=number(layers, "max_position_embeddings", name, 32768, most=MOST_POSITIONS),
        attention_bias=bool(layers.get("attention_bias", False)),
        has_attention_sinks=has_attention_sinks,
        is_quantised=any(section.get("quantization_config") for section in (outer, layers)),
        input_embedding_scale=input_embedding_scale,
        acceptance_rates=acceptance_rates(outer, name),
    )
    _check_own_values(config)
    return config


def _check_own_values(config: DFlashConfig) -> None:
    ids = list(config.target_layer_ids)
    if ids != sorted(set(ids)):
        raise ValueError(
            f"drafter '{config.name}' lists feature layers {ids}; they must increase without repeats, because vLLM "
            f"collects each layer once and in order. Retrain with {sorted(set(ids))}."
        )
    mask = config.mask_token_id
    if type(mask) is not int or not 0 <= mask < config.vocab_size:
        raise wrong(config.name, "mask_token_id", mask, f"its tokens are 0 to {config.vocab_size - 1}")
    size = config.draft_block_size
    if size is not None and (type(size) is not int or size < 2):
        raise wrong(config.name, "block_size", size, "a block is one anchor and at least one drafted token")
    if config.draft_vocab_size > config.vocab_size:
        raise wrong(config.name, "draft_vocab_size", config.draft_vocab_size, f"vocab_size {config.vocab_size}")
