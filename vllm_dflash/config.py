"""DFlashConfig: the single reader of a drafter's config.json, in both dialects.

z-lab writes `dflash_config.target_layer_ids` (0-based: the output of that layer) and a flat or nested
`block_size`; speculators writes `aux_hidden_state_layer_ids` (1-based, as vLLM counts) around a
`transformer_layer_config`. This file alone converts between the two countings, and it refuses a drafter
that does not fit its target before anything is loaded. It imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: A target whose vocabulary is at most this much larger than the drafter's has padded embedding rows, not
#: another tokenizer: inference frameworks pad to multiples of at most 512.
MAX_VOCAB_PADDING = 512

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

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """The same layers as vLLM counts them: id i is the residual stream *before* layer i."""
        return tuple(layer_id + 1 for layer_id in self.target_layer_ids)

    @property
    def max_speculative_tokens(self) -> int | None:
        """K of the trained block: all slots but the anchor."""
        return None if self.draft_block_size is None else self.draft_block_size - 1

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
            f"'speculators_model_type' (speculators). Its architectures are {raw.get('architectures')}."
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
        if requested < 1:
            raise ValueError(f"num_speculative_tokens is {requested}; it must be at least 1.")
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
        if not 0 <= target.vocab_size - self.vocab_size <= MAX_VOCAB_PADDING:
            raise ValueError(
                f"{mine} has a vocabulary of {self.vocab_size}, but {its} has {target.vocab_size} tokens; "
                f"they use different tokenizers. Use a drafter trained for this target (a reduced draft "
                f"vocabulary is written as 'draft_vocab_size' with a 'd2t' tensor)."
            )
        if self.mask_token_id >= target.vocab_size:
            raise ValueError(
                f"{mine} marks empty slots with mask_token_id {self.mask_token_id}, but the vocabulary of {its} "
                f"ends at {target.vocab_size - 1}; set 'mask_token_id' in the drafter's config.json to the id "
                f"that it was trained with."
            )


def is_dflash_config(raw: Mapping[str, Any]) -> bool:
    """Is this config.json a plain DFlash drafter's, which this plugin serves?

    DFlash2, LiLiCorr and other variants carry heads of their own and stay with vLLM.
    """
    if "speculators_model_type" in raw:
        return raw["speculators_model_type"] == "dflash"
    return "dflash_config" in raw and raw.get("architectures") == ["DFlashDraftModel"]


def _from_z_lab(raw: Mapping[str, Any], name: str) -> DFlashConfig:
    nested = raw["dflash_config"] or {}
    sizes = {size for size in (raw.get("block_size"), nested.get("block_size")) if size is not None}
    if len(sizes) > 1:
        raise ValueError(
            f"drafter '{name}' has block_size {raw['block_size']} at the top of its config.json and "
            f"{nested['block_size']} in 'dflash_config'; keep the one that it was trained with."
        )
    layer_types = _layer_types(raw, use_swa=bool(nested.get("use_swa", False)))
    causal = raw["is_causal"] if raw.get("is_causal") is not None else nested.get("causal")
    return _build(
        name,
        "z-lab",
        raw,
        target_layer_ids=_require(nested, "target_layer_ids", name, "dflash_config."),
        mask_token_id=nested.get("mask_token_id", raw.get("mask_token_id")),
        draft_block_size=next(iter(sizes), None),
        layer_types=layer_types,
        layer_causal=tuple(kind == _SLIDING if causal is None else bool(causal) for kind in layer_types),
        sliding_window=nested.get("swa_window_size", raw.get("sliding_window")),
        has_attention_sinks=bool(nested.get("attention_sink_bias", raw.get("add_swa_attention_sink_bias", False))),
        outer=raw,
    )


def _from_speculators(raw: Mapping[str, Any], name: str) -> DFlashConfig:
    kind = raw["speculators_model_type"]
    if kind != "dflash":
        raise ValueError(f"'{name}' is a speculators checkpoint of type '{kind}', not a plain DFlash drafter.")
    if raw.get("sample_from_anchor"):
        raise ValueError(
            f"drafter '{name}' predicts from its anchor slot (sample_from_anchor is true), a layout that DFlash "
            f"serving does not have; retrain it with sample_from_anchor false."
        )
    inner = _require(raw, "transformer_layer_config", name)
    layer_types = _layer_types(inner, use_swa=False)
    # speculators trains full-attention layers bidirectional whatever this flag says: it is about sliding layers
    # only (speculators 0.9, models/dflash/attention.py), although vLLM 0.32 and 0.33 apply it to all.
    sliding_is_causal = not raw.get("sliding_window_non_causal", True)
    return _build(
        name,
        "speculators",
        inner,
        target_layer_ids=[i - 1 for i in _require(raw, "aux_hidden_state_layer_ids", name)],
        mask_token_id=raw.get("mask_token_id"),
        draft_block_size=raw.get("block_size"),
        layer_types=layer_types,
        layer_causal=tuple(kind == _SLIDING and sliding_is_causal for kind in layer_types),
        sliding_window=inner.get("sliding_window"),
        has_attention_sinks=False,
        outer=raw,
    )


def _build(
    name: str,
    dialect: Literal["z-lab", "speculators"],
    layers: Mapping[str, Any],
    *,
    target_layer_ids: Any,
    mask_token_id: Any,
    draft_block_size: int | None,
    layer_types: tuple[str, ...],
    layer_causal: tuple[bool, ...],
    sliding_window: int | None,
    has_attention_sinks: bool,
    outer: Mapping[str, Any],
) -> DFlashConfig:
    if _SLIDING in layer_types and sliding_window is None:
        raise ValueError(
            f"drafter '{name}' has sliding-attention layers but no 'sliding_window'; add the window it was trained with."
        )
    hidden_size = _require(layers, "hidden_size", name)
    num_heads = _require(layers, "num_attention_heads", name)
    vocab_size = _require(layers, "vocab_size", name)
    rope = layers.get("rope_parameters") or {}
    config = DFlashConfig(
        name=name,
        dialect=dialect,
        target_layer_ids=tuple(target_layer_ids),
        mask_token_id=_mask_token(mask_token_id, vocab_size, name),
        draft_block_size=draft_block_size,
        hidden_size=hidden_size,
        target_hidden_size=outer.get("target_hidden_size") or hidden_size,
        intermediate_size=_require(layers, "intermediate_size", name),
        num_layers=_require(layers, "num_hidden_layers", name),
        num_heads=num_heads,
        num_kv_heads=layers.get("num_key_value_heads") or num_heads,
        head_dim=layers.get("head_dim") or hidden_size // num_heads,
        vocab_size=vocab_size,
        draft_vocab_size=outer.get("draft_vocab_size") or vocab_size,
        num_target_layers=outer.get("num_target_layers"),
        layer_causal=layer_causal,
        sliding_windows=tuple(sliding_window if kind == _SLIDING else None for kind in layer_types),
        rms_norm_eps=layers.get("rms_norm_eps", 1e-6),
        # vLLM's default where a drafter names no base (qwen3_dflash.py, DFlashQwen3DecoderLayer).
        rope_theta=layers.get("rope_theta") or rope.get("rope_theta") or 1_000_000.0,
        max_position_embeddings=layers.get("max_position_embeddings") or 32768,
        attention_bias=bool(layers.get("attention_bias", False)),
        has_attention_sinks=has_attention_sinks,
        is_quantised=any("quantization_config" in section for section in (outer, layers)),
    )
    _check_own_values(config)
    return config


def _check_own_values(config: DFlashConfig) -> None:
    ids = config.target_layer_ids
    if not ids or any(not isinstance(i, int) for i in ids):
        raise ValueError(f"drafter '{config.name}' lists no usable feature layers: target_layer_ids is {list(ids)}.")
    if list(ids) != sorted(set(ids)):
        raise ValueError(
            f"drafter '{config.name}' lists feature layers {list(ids)}; they must increase without repeats, because "
            f"vLLM collects each layer once and in order. Retrain with {sorted(set(ids))}."
        )
    if config.draft_block_size is not None and config.draft_block_size < 2:
        raise ValueError(
            f"drafter '{config.name}' has block_size {config.draft_block_size}; a block is one anchor and at least "
            f"one drafted token."
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ValueError(
            f"drafter '{config.name}' has draft_vocab_size {config.draft_vocab_size}, more than its vocab_size "
            f"{config.vocab_size}; correct its config.json."
        )
    if len(config.layer_causal) != config.num_layers:
        raise ValueError(
            f"drafter '{config.name}' has {config.num_layers} layers but {len(config.layer_causal)} 'layer_types'; "
            f"correct its config.json."
        )


def _layer_types(layers: Mapping[str, Any], use_swa: bool) -> tuple[str, ...]:
    kinds = tuple(layers.get("layer_types") or ("full_attention",) * layers.get("num_hidden_layers", 0))
    # `use_swa` makes every layer slide unless the list already says which ones do (vLLM, _resolve_layer_attention).
    return (_SLIDING,) * len(kinds) if use_swa and _SLIDING not in kinds else kinds


def _mask_token(value: Any, vocab_size: int, name: str) -> int:
    if value is None:
        raise ValueError(
            f"drafter '{name}' names no mask token; add 'mask_token_id', the id that its empty slots were trained "
            f"with, to its config.json."
        )
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ValueError(
            f"drafter '{name}' has mask_token_id {value!r}, outside its vocabulary of {vocab_size} tokens; set the id "
            f"that it was trained with."
        )
    return value


def _require(section: Mapping[str, Any], key: str, name: str, prefix: str = "") -> Any:
    if section.get(key) is None:
        raise ValueError(f"drafter '{name}' lacks '{prefix}{key}' in its config.json.")
    return section[key]
