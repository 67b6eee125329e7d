"""Known mistakes, each as the way to run the drafter that repairs it.

Where that way finds the target's text much likelier than the way config.json says, the mistake is the cause.

    name            the mistake
    target-layers   layers counted from another start: one too high or too low
    feature-order   features joined in the reverse order
    anchor          trained to predict from the anchor's slot on (slot k the token behind it), served from the masks
    causality       in-block attention causal where it was bidirectional, or the reverse
    rope            another base than in training, or pairs of neighbours rotated in place of halves
    head            a head that is not the one it was trained with
    d2t             the map of draft tokens to target tokens missing, shifted, or holding ids in place of offsets
    mask-token      another token than in training stands for the slots to predict
    embedding-scale block tokens are embedded times another factor than in training (Gemma, Granite: the target's own)
    block-length    more slots than in training; a bidirectional block then spoils all of them
    quantisation    a scale was dropped: a matrix is out of line with the same one of other layers
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.doctor.checkpoint import magnitude_outliers
from vllm_dflash.doctor.probe import Probe
from vllm_dflash.doctor.replay import DEPTH, Setup
from vllm_dflash.doctor.subject import Subject, inside

Edits = dict[tuple[str, ...], Any]  # path of a key in config.json -> value

#: RoPE bases in use, beside the target's.
_ROPE_BASES = (1e4, 1e5, 5e5, 1e6)
#: Special tokens tried as mask tokens at most.
_MAX_MASKS, _SAME_EMBEDDING = 64, 0.999
#: Factors on embeddings that differ by less are rounded (a target's own to bf16, mostly), not wrong.
_SAME_SCALE = 0.01
#: Draft tokens whose rows are looked up in the target's head, and the likeness from which a row is that token's.
_ROWS_COMPARED, _SAME_ROW = 256, 0.98


@dataclass(frozen=True)
class Hypothesis:
    """A mistake, and how the drafter runs without it."""

    name: str
    cause: str  # a clause: "its target layers are counted one too high"
    repair: str  # imperative
    setup: Setup
    edits: Edits | None = None  # the same repair in config.json, where that is all


def hypotheses(subject: Subject, probe: Probe, setup: Setup, tokenizer: Any) -> Iterator[Hypothesis]:
    """Every known mistake that this drafter could have."""
    yield from _layers(subject, probe, setup)
    yield Hypothesis(
        "anchor",
        "it was trained to predict from its anchor slot on (slot k the token behind its own position)",
        "DFlash serving predicts from the masks: retrain it with sample_from_anchor false, or serve it with a runtime "
        "that has this layout",
        replace(setup, predicts_from_anchor=True),
    )
    yield from _causality(subject, setup)
    yield from _rope(subject, setup)
    yield from _head_and_map(subject, probe, setup)
    yield from _masks(subject, probe, setup, tokenizer)
    yield from _embedding_scales(subject, setup)
    yield from _shorter_blocks(subject, setup)
    yield from _scales(subject, setup)


def _layers(subject: Subject, probe: Probe, setup: Setup) -> Iterator[Hypothesis]:
    ids = subject.config.target_layer_ids
    for step, word in ((-1, "high"), (1, "low")):
        moved = tuple(i + step for i in ids)
        if moved[0] < 0 or moved[-1] >= probe.num_layers:
            continue
        path, written = _layer_key(subject, moved)
        yield Hypothesis(
            "target-layers",
            f"its target layers {list(ids)} are counted one too {word}: it was trained on {list(moved)}",
            f'set "{path[-1]}": {written} in config.json',
            replace(setup, layer_ids=moved),
            {path: written},
        )
    if len(ids) > 1:
        yield Hypothesis(
            "feature-order",
            f"its features are joined in the reverse order: it was trained on layers {list(ids[::-1])} in that order",
            f"reorder the {len(ids)} blocks of columns of fc.weight from last to first; config.json cannot say it",
            replace(setup, layer_ids=ids[::-1]),
        )


def _causality(subject: Subject, setup: Setup) -> Iterator[Hypothesis]:
    config = subject.config
    is_causal = not all(config.layer_causal)  # what is tried
    words = "causal" if is_causal else "bidirectional"
    edits: Edits | None = {("is_causal",): is_causal, ("dflash_config", "causal"): is_causal}
    repair = f'set "is_causal": {str(is_causal).lower()} in config.json (and "causal" in its dflash_config)'
    if config.dialect == "speculators":
        edits, repair = None, f"export it in z-lab's format with in-block attention {words}"
    yield Hypothesis(
        "causality",
        f"in-block attention is served {'bidirectional' if is_causal else 'causal'}, but it was trained {words}",
        repair,
        replace(setup, config=replace(config, layer_causal=(is_causal,) * config.num_layers)),
        edits,
    )


def _rope(subject: Subject, setup: Setup) -> Iterator[Hypothesis]:
    config, tried = subject.config, dict.fromkeys([subject.target_rope_theta or 1e4, *_ROPE_BASES])
    flat: tuple[str, ...] = ("rope_theta",)
    path = flat if config.dialect == "z-lab" else ("transformer_layer_config", "rope_theta")
    for base in tried:
        if base == config.rope_theta:
            continue
        of_target = ", the target's" if base == subject.target_rope_theta else ""
        edits: Edits = {path: base}
        inner = (*path[:-1], "rope_parameters")
        section = subject.raw if len(path) == 1 else subject.raw.get(path[0], {})
        if section.get("rope_parameters"):
            edits[(*inner, "rope_theta")] = base
        yield Hypothesis(
            "rope",
            f"its RoPE base is {config.rope_theta:g}, but it was trained with {base:g}{of_target}",
            f'set "rope_theta": {base} in config.json',
            replace(setup, config=replace(config, rope_theta=base)),
            edits,
        )
    was, now = ("halves of a head", "neighbouring entries")[:: -1 if setup.rotates_pairs else 1]
    yield Hypothesis(
        "rope",
        f"RoPE rotates {was}, but the rows of its queries and keys are in the order for {now}",
        f'set "is_neox_style": {str(setup.rotates_pairs).lower()} in config.json, or reorder the rows of q_proj, '
        f"k_proj, q_norm and k_norm",
        replace(setup, rotates_pairs=not setup.rotates_pairs),
        {(*path[:-1], "is_neox_style"): setup.rotates_pairs},
    )


def _head_and_map(subject: Subject, probe: Probe, setup: Setup) -> Iterator[Hypothesis]:
    head, d2t = subject.tensors.get("lm_head.weight"), subject.tensors.get("d2t")
    of_target = probe.head.to(setup.head.dtype)
    valid = setup.target_ids.clamp(0, len(of_target) - 1)
    if head is not None and not torch.equal(of_target[valid], setup.head):
        yield Hypothesis(
            "head",
            "its lm_head.weight is not the head it was trained with: the target's own head fits it better",
            "write the target's rows for its draft tokens into lm_head.weight (or leave the tensor out where the "
            "vocabulary is whole)",
            replace(setup, head=of_target[valid]),
        )
    if d2t is None:
        return
    offsets = d2t.to(valid.device)
    mapped = offsets + torch.arange(len(offsets), device=valid.device)
    for words, ids in (
        ("holds target ids in place of offsets", offsets),
        ("is one too high", mapped - 1),
        ("is one too low", mapped + 1),
    ):
        yield Hypothesis(
            "d2t",
            f"its map d2t from draft tokens to target tokens {words}",
            "write d2t[i] = (target id of draft token i) - i",
            replace(setup, target_ids=inside(ids, len(of_target))),
        )
    found = _ids_from_rows(setup.head, of_target, setup.target_ids)
    if found is not None:
        words = "is all zeros" if not bool(d2t.any()) else "does not belong to its head"
        yield Hypothesis(
            "d2t",
            f"its map d2t {words}: rows of lm_head are the target's rows of other tokens than d2t says",
            "write d2t[i] = (target id of row i of lm_head) - i, from the checkpoint that it was exported from",
            replace(setup, target_ids=found),
        )


def _ids_from_rows(head: Tensor, of_target: Tensor, target_ids: Tensor) -> Tensor | None:
    """Target ids whose rows a head copies, where they are others than the map says; None where it copies none."""
    mine = torch.nn.functional.normalize(head, dim=1)
    its = torch.nn.functional.normalize(of_target, dim=1)
    some = torch.arange(0, len(mine), max(1, len(mine) // _ROWS_COMPARED), device=head.device)
    as_mapped = (mine[some] * its[target_ids[some].clamp(0, len(its) - 1)]).sum(1)
    if float((as_mapped > _SAME_ROW).float().mean()) > 0.9:
        return None
    likeness, nearest = (mine[some] @ its.T).max(1)
    if float((likeness > _SAME_ROW).float().mean()) < 0.5:
        return None
    return torch.cat([(part @ its.T).argmax(1) for part in mine.split(1024)]) if len(some) < len(mine) else nearest


def _masks(subject: Subject, probe: Probe, setup: Setup, tokenizer: Any) -> Iterator[Hypothesis]:
    config = subject.config
    path = ("mask_token_id",) if config.dialect == "speculators" else ("dflash_config", "mask_token_id")
    for token in _other_masks(config, probe.embedding if setup.embedding is None else setup.embedding, tokenizer):
        names = [repr(tokenizer.convert_ids_to_tokens(i)) for i in (config.mask_token_id, token)]
        yield Hypothesis(
            "mask-token",
            f"its mask token is {config.mask_token_id} ({names[0]}), but it was trained with {token} ({names[1]})",
            f'set "mask_token_id": {token} in config.json',
            replace(setup, config=replace(config, mask_token_id=token)),
            {path: token},
        )


def _other_masks(config: DFlashConfig, embedding: Tensor, tokenizer: Any) -> list[int]:
    """Special tokens with embeddings of their own; tokens that no text has are all alike, and one of them is enough.

    Those that texts have (the end of a turn) come last, the ones added last come first.
    """
    in_text = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "unk", "pad")}
    special = {i for i in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder) if 0 <= i < config.vocab_size}
    seen, found = [config.mask_token_id], []
    for token in sorted(special, key=lambda i: (i in in_text, -i))[:_MAX_MASKS]:
        likeness = torch.nn.functional.cosine_similarity(embedding[seen].float(), embedding[token].float()[None])
        if token not in seen and not bool((likeness > _SAME_EMBEDDING).any()):
            found.append(token)
            seen.append(token)
    return found


def _embedding_scales(subject: Subject, setup: Setup) -> Iterator[Hypothesis]:
    config, of_target = subject.config, subject.target_embedding_scale
    key = "input_embedding_scale"
    for scale in dict.fromkeys([of_target, 1.0]):
        if math.isclose(scale, config.input_embedding_scale, rel_tol=_SAME_SCALE):
            continue
        words = f"{scale:g}, the target's own factor" if scale == of_target else f"{scale:g}"
        edits: Edits = {(key,): scale}
        place = "config.json"
        if config.dialect == "z-lab":
            is_flat_too = subject.raw.get(key) is not None
            edits = {("dflash_config", key): scale} | (edits if is_flat_too else {})
            place = "dflash_config of config.json" + " (and at its top)" * is_flat_too
        yield Hypothesis(
            "embedding-scale",
            f"its block tokens are embedded times {config.input_embedding_scale:g}, but it was trained with {words}",
            f'set "{key}": {scale} in {place}',
            replace(setup, config=replace(config, input_embedding_scale=scale)),
            edits,
        )


def _shorter_blocks(subject: Subject, setup: Setup) -> Iterator[Hypothesis]:
    if all(subject.config.layer_causal):  # the first slots do not depend on how many follow
        return
    nested: tuple[str, ...] = ("block_size",)
    for num_drafted in (15, 7, 4, DEPTH):
        if num_drafted < setup.num_drafted:
            edits: Edits = {nested: num_drafted + 1}
            if isinstance(subject.raw.get("dflash_config"), Mapping):
                edits[("dflash_config", "block_size")] = num_drafted + 1
            yield Hypothesis(
                "block-length",
                f"K = {setup.num_drafted} is more than it was trained for: with K = {num_drafted} its first slots are "
                f"right more often",
                f'set "block_size": {num_drafted + 1} in config.json, or num_speculative_tokens to {num_drafted}',
                replace(setup, num_drafted=num_drafted),
                edits,
            )


def _scales(subject: Subject, setup: Setup) -> Iterator[Hypothesis]:
    outliers = magnitude_outliers(subject.tensors)
    if outliers:
        rescaled = {
            name: tensor * (outliers[name] / tensor.pow(2).mean().sqrt()) if name in outliers else tensor
            for name, tensor in setup.tensors.items()
        }
        first = min(outliers)
        rms = float(subject.tensors[first].pow(2).mean().sqrt())
        yield Hypothesis(
            "quantisation",
            f"scales were dropped from {', '.join(sorted(outliers))}: the values of '{first}' have RMS {rms:.3g} where "
            f"other layers have {outliers[first]:.3g}",
            "re-export the checkpoint with its scales multiplied in, or with its quantization_config",
            replace(setup, tensors=rescaled),
        )


def _layer_key(subject: Subject, ids: tuple[int, ...]) -> tuple[tuple[str, ...], list[int]]:
    if subject.config.dialect == "speculators":
        return ("aux_hidden_state_layer_ids",), [i + 1 for i in ids]
    return ("dflash_config", "target_layer_ids"), list(ids)
