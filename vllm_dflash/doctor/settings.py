"""Checks of a drafter's config.json against its target, before anything is loaded. Pure: no file is read.

Each check is a function of the same `Pair` and returns findings under its own name. Whatever they do not look for is
left to `DFlashConfig`, the reader that serving uses; its refusal becomes a finding named "config".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_dflash.config import DFlashConfig, TargetShape, is_dflash_config
from vllm_dflash.doctor.finding import Finding, error, warning

#: Heads and layouts that no plain DFlash drafter has: key of config.json -> what it announces.
_OTHER_HEADS = {
    "domino_config": "Domino's correction head",
    "lilicorr_config": "LiLiCorr's correction head",
    "markov_head": "a Markov head (DFlash2)",
    "use_markov_head": "a Markov head (DFlash2)",
}


@dataclass(frozen=True)
class TargetFacts:
    """The target as its config.json and tokenizer describe it."""

    shape: TargetShape
    rope_theta: float | None
    num_tokens: int | None = None  # of the tokenizer; rows of the vocabulary beyond it are padding


@dataclass(frozen=True)
class Pair:
    """What is checked."""

    raw: Mapping[str, Any]  # the drafter's config.json
    name: str
    target: TargetFacts
    requested: int | None  # K as the user asks for it

    @property
    def layers(self) -> Mapping[str, Any]:
        """The section with the transformer's sizes: the file itself, or speculators' inner one."""
        inner = self.raw.get("transformer_layer_config")
        return inner if isinstance(inner, Mapping) else self.raw

    @property
    def nested(self) -> Mapping[str, Any]:
        """z-lab's section; empty where there is none."""
        nested = self.raw.get("dflash_config")
        return nested if isinstance(nested, Mapping) else {}


def check_settings(pair: Pair) -> tuple[DFlashConfig | None, list[Finding]]:
    """The drafter's config, where it can be read, and all findings in the order of the checks."""
    findings = [finding for check in _CHECKS for finding in check(pair)]
    has_error = any(finding.level == "error" for finding in findings)
    try:
        config = DFlashConfig.from_dict(pair.raw, pair.name)
        config.check_target(pair.target.shape)
        _, clamped = config.resolve_num_speculative_tokens(pair.requested)
    except ValueError as problem:
        if not has_error:  # otherwise a check has said it by name
            message, _, repair = str(problem).rpartition("; ")
            findings.append(error("config", message or str(problem), repair or str(problem)))
        return None, findings
    if clamped:
        findings.append(
            warning("block-length", clamped, f"set num_speculative_tokens to {config.max_speculative_tokens} or less")
        )
    return config, findings


def _heads(pair: Pair) -> Iterator[Finding]:
    raw = pair.raw
    kind, architectures = raw.get("speculators_model_type"), raw.get("architectures")
    if raw.get("sample_from_anchor") or pair.nested.get("sample_from_anchor"):
        yield error(
            "heads",
            f"drafter '{pair.name}' predicts from its anchor slot (sample_from_anchor is true), but DFlash serving "
            f"predicts from the masks",
            "retrain it with sample_from_anchor false",
        )
    for key, what in _OTHER_HEADS.items():
        if raw.get(key) or pair.nested.get(key):
            yield error(
                "heads",
                f"drafter '{pair.name}' has {what} ({key}), but plain DFlash has none and no runner would run it",
                "serve the checkpoint with the project that trained it, or train a plain DFlash drafter",
            )
    is_other = kind not in (None, "dflash") or (kind is None and pair.nested and not is_dflash_config(raw))
    if is_other:
        yield error(
            "heads",
            f"drafter '{pair.name}' is of type {kind or architectures}, but this plugin serves 'dflash' and "
            f"['DFlashDraftModel']; variants carry heads of their own",
            'serve it with a method of its own, or set "architectures": ["DFlashDraftModel"] if it is a plain drafter',
        )


def _dialect(pair: Pair) -> Iterator[Finding]:
    if "speculators_model_type" in pair.raw and "dflash_config" in pair.raw:
        yield warning(
            "dialect",
            f"config.json of '{pair.name}' has z-lab's 'dflash_config' and speculators' 'speculators_model_type'; the "
            f"latter is read",
            "remove the section that does not belong there: they count target layers differently",
        )
    elif not _is_drafter(pair):
        yield error(
            "dialect",
            f"'{pair.name}' is not a DFlash drafter: its config.json has neither 'dflash_config' (z-lab) nor "
            f"'speculators_model_type' (speculators), its architectures are {pair.raw.get('architectures')}",
            "give the folder of a DFlash drafter as --draft",
        )


def _target_layers(pair: Pair) -> Iterator[Finding]:
    is_speculators = "speculators_model_type" in pair.raw
    key = "aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"
    ids = pair.raw.get(key) if is_speculators else pair.nested.get(key)
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        return
    first, shape = int(is_speculators), pair.target.shape
    repair = "use a drafter trained for this target, or set the layers that it was trained with"
    if ids != sorted(set(ids)):
        yield error(
            "target-layers",
            f"{key} of '{pair.name}' is {ids}, but vLLM collects each layer once and in increasing order",
            f"set {sorted(set(ids))} if only the list is wrong, or retrain",
        )
    elif ids[0] < first or ids[-1] >= shape.num_layers - 1 + first:
        yield error(
            "target-layers",
            f"{key} of '{pair.name}' is {ids} ({'1 is' if first else '0 is'} the first), but target '{shape.name}' has "
            f"{shape.num_layers} layers, of which the last cannot be read",
            repair,
        )
    elif pair.raw.get("num_target_layers") not in (None, shape.num_layers):
        yield error(
            "target-layers",
            f"drafter '{pair.name}' was trained for a target with {pair.raw['num_target_layers']} layers, but "
            f"'{shape.name}' has {shape.num_layers}",
            "use a drafter trained for this target",
        )


def _mask_token(pair: Pair) -> Iterator[Finding]:
    mask = pair.nested.get("mask_token_id", pair.raw.get("mask_token_id"))
    vocab_size, num_tokens = pair.layers.get("vocab_size"), pair.target.num_tokens
    repair = "set mask_token_id to the token that it was trained with (its trainer's log or model card names it)"
    if mask is None:
        if _is_drafter(pair):
            yield error("mask-token", f"config.json of '{pair.name}' names no mask_token_id for the slots", repair)
    elif type(mask) is not int or not isinstance(vocab_size, int) or not 0 <= mask < vocab_size:
        yield error(
            "mask-token", f"mask_token_id of '{pair.name}' is {mask!r}, but its vocab_size is {vocab_size}", repair
        )
    elif num_tokens is not None and mask >= num_tokens:
        yield error(
            "mask-token",
            f"mask_token_id of '{pair.name}' is {mask}, a padding row: the tokenizer of target "
            f"'{pair.target.shape.name}' has {num_tokens} tokens, and rows behind them were never trained",
            repair,
        )


def _vocabulary(pair: Pair) -> Iterator[Finding]:
    vocab_size, reduced = pair.layers.get("vocab_size"), pair.raw.get("draft_vocab_size")
    if type(vocab_size) is int and type(reduced) is int and reduced > vocab_size:
        yield error(
            "vocabulary",
            f"draft_vocab_size of '{pair.name}' is {reduced}, but its vocab_size is {vocab_size}",
            "set the sizes that it was trained with",
        )


def _rope(pair: Pair) -> Iterator[Finding]:
    layers = pair.layers
    flat = layers.get("rope_theta")
    parameters = layers.get("rope_parameters") if isinstance(layers.get("rope_parameters"), Mapping) else {}
    scaling = layers.get("rope_scaling") if isinstance(layers.get("rope_scaling"), Mapping) else {}
    assert isinstance(parameters, Mapping)
    assert isinstance(scaling, Mapping)
    inner, of_target = parameters.get("rope_theta"), pair.target.rope_theta
    if None not in (flat, inner) and flat != inner:
        yield error(
            "rope",
            f"config.json of '{pair.name}' gives two RoPE bases: rope_theta {flat:g}, and {inner:g} in its "
            f"rope_parameters",
            "keep the one that it was trained with",
        )
    elif flat is None and inner is None:
        yield warning(
            "rope",
            f"config.json of '{pair.name}' names no RoPE base, so vLLM takes 1000000; target "
            f"'{pair.target.shape.name}' has {of_target or 'none'}",
            'write "rope_theta" with the base that it was trained with',
        )
    partial = [s.get("partial_rotary_factor") for s in (layers, parameters, scaling)]
    kinds = [s.get("rope_type", s.get("type")) for s in (parameters, scaling)]
    by_layer = any(isinstance(value, Mapping) for value in parameters.values())
    unusual = [f"partial_rotary_factor {p}" for p in partial if p not in (None, 1, 1.0)]
    unusual += [f"rope_type '{kind}'" for kind in kinds if kind not in (None, "default")] + [
        "bases by layer"
    ] * by_layer
    if unusual:
        yield error(
            "rope",
            f"config.json of '{pair.name}' asks for {', '.join(unusual)}; trainer and doctor rotate whole heads by one "
            f"unscaled base, so they cannot say whether it is served as it was trained",
            "measure it by serving (vllm-dflash eval --engine vllm), or train a drafter with plain RoPE",
        )


def _causality(pair: Pair) -> Iterator[Finding]:
    flat, nested = pair.raw.get("is_causal"), pair.nested.get("causal")
    if None not in (flat, nested) and bool(flat) != bool(nested):
        yield error(
            "causality",
            f"config.json of '{pair.name}' says is_causal {flat}, but causal {nested} in its dflash_config",
            "set both to what it was trained with",
        )
    kinds = pair.layers.get("layer_types")
    if isinstance(kinds, list) and len({str(kind) for kind in kinds}) > 1:
        yield warning(
            "runner",
            f"drafter '{pair.name}' mixes sliding and full attention ({', '.join(map(str, kinds))}), which vLLM's V1 "
            f"runner, the only one on a CPU, refuses",
            "serve it on a GPU with the V2 runner (VLLM_USE_V2_MODEL_RUNNER=1)",
        )


def _block_length(pair: Pair) -> Iterator[Finding]:
    flat, nested = pair.raw.get("block_size"), pair.nested.get("block_size")
    if None not in (flat, nested) and flat != nested:
        yield error(
            "block-length",
            f"config.json of '{pair.name}' has block_size {flat}, but {nested} in its dflash_config",
            "set both to the block that it was trained with",
        )
    elif flat is None and nested is None and pair.requested is None and _is_drafter(pair):
        yield error(
            "block-length",
            f"drafter '{pair.name}' does not record its block size, and no K is given",
            "write block_size into its config.json, or give --num-speculative-tokens",
        )


def _quantisation(pair: Pair) -> Iterator[Finding]:
    given = pair.raw.get("quantization_config") or pair.layers.get("quantization_config")
    if given:
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        yield error(
            "quantisation",
            f"drafter '{pair.name}' is quantised ({method}); that every module has tensors is checked at start-up, but "
            f"its values cannot be replayed here",
            "run doctor on the checkpoint that it was quantised from, and compare by vllm-dflash eval --engine vllm",
        )


def _is_drafter(pair: Pair) -> bool:
    return bool({"speculators_model_type", "dflash_config"} & pair.raw.keys())


_CHECKS: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    _heads,
    _dialect,
    _target_layers,
    _mask_token,
    _vocabulary,
    _rope,
    _causality,
    _block_length,
    _quantisation,
)


def rope_theta_of(text_config: Any) -> float | None:
    """RoPE base of a Hugging Face text config, in either spelling; None where it has none."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    found = parameters.get("rope_theta") or getattr(text_config, "rope_theta", None)
    return float(found) if isinstance(found, int | float) and re.match(r"\d", str(found)) else None
