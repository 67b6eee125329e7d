"""A drafter run in a given way on the probe: what it would have drafted, and how likely it found what the target wrote.

    tau     accepted as far as the draft equals the text (training/acceptance.py), by the walk
    score   per anchor, the mean over slots of  sum_v p(v) (log q(v) - log p(v)):  p is the target's distribution (its
            likeliest tokens), q the drafter's; minus their divergence in nats, so 0 is best

Two ways to run a drafter on the same few answers can have the same tau by chance; the score is a number per anchor, so
that a difference of a few percent shows. Wrong layers, causality or RoPE cost no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.doctor.probe import Probe
from vllm_dflash.training.acceptance import Acceptance, walk
from vllm_dflash.training.attention import Visibility
from vllm_dflash.training.blocks import Blocks, PackedRow, make_blocks
from vllm_dflash.training.model import Drafter, Variant

#: Log-probability of a token that the drafter cannot draft, and the least that counts: one slot must not decide.
_FLOOR = -12.0
#: Slots that repairs are compared on. Later ones are rarely reached.
DEPTH = 3
_ANCHORS_AT_ONCE = 128
#: Neighbouring anchors see nearly the same text, so a difference counts once per so many of them.
_ANCHORS_PER_UNIT = 8


@dataclass(frozen=True)
class Setup:
    """A drafter and everything about how it is run that a repair may change."""

    config: DFlashConfig
    tensors: Mapping[str, Tensor]  # without head and d2t
    head: Tensor  # [V', hidden]
    target_ids: Tensor  # [V'] int64: target token of each draft token; one that is no target token is never right
    num_drafted: int  # K
    embedding: Tensor | None = None  # of its own, [vocabulary, hidden]
    layer_ids: tuple[int, ...] | None = None  # in the order that fc reads them; None for config's
    rotates_pairs: bool = False  # RoPE turns entries (0, 1), (2, 3), ... rather than the two halves of a head
    predicts_from_anchor: bool = False  # slot k predicts the token behind its own position
    features: Literal["own", "shifted", "shuffled"] = "own"  # controls


@dataclass(frozen=True)
class Replay:
    """What came of it."""

    scores: Tensor  # [A] float32, nats
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(frozen=True)
class Gain:
    """How much better one way is than another on the same anchors."""

    nats: float  # per slot
    t: float  # of the mean over units of neighbouring anchors


@torch.inference_mode()
def replay(probe: Probe, setup: Setup, depth: int = DEPTH) -> Replay:
    """Walk the probe with up to `depth` drafted tokens per cycle, and score the first slots of every anchor.

    A bidirectional drafter still drafts all of K slots, because the first depend on how many follow.
    """
    row, drafter = _row(probe, setup), _drafter(setup)
    scores = []

    def draft(row: PackedRow, blocks: Blocks) -> Tensor:
        logits, scored = _run(probe, setup, drafter, row, blocks, depth)
        scores.append(scored)
        return setup.target_ids[logits.argmax(-1)]

    acceptance = Acceptance(walk(row, draft, depth, probe.ids))
    return Replay(torch.cat(scores), acceptance)


@torch.inference_mode()
def screen(probe: Probe, setup: Setup, stride: int) -> Replay:
    """Only the score of the first two slots, at every `stride`-th anchor: a fraction of the work, to choose by."""
    row, drafter = _row(probe, setup), _drafter(setup)
    anchors, depth = _anchors(row)[::stride], min(2, setup.num_drafted)
    scores = [
        _run(probe, setup, drafter, row, make_blocks(row, some, depth + 1), depth)[1]
        for some in anchors.split(_ANCHORS_AT_ONCE)
    ]
    return Replay(torch.cat(scores))


def gain(of: Replay, over: Replay) -> Gain:
    """The gain of one replay over another on the same probe, with the same depth."""
    difference = (of.scores - over.scores).double().cpu().numpy()
    units = [u.mean() for u in np.array_split(difference, max(2, len(difference) // _ANCHORS_PER_UNIT))]
    error = np.std(units, ddof=1) / len(units) ** 0.5
    return Gain(float(difference.mean()), float(np.mean(units) / max(error, 1e-9)))


def pair_rows(tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Rows of queries and keys from interleaved order (0, 1), (2, 3), ... to the two halves that we rotate."""
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            heads = tensor.view(-1, head_dim, *tensor.shape[1:])
            changed[name] = heads[:, order.to(tensor.device)].reshape(tensor.shape)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            changed[name] = tensor[order.to(tensor.device)]
    return changed


def _row(probe: Probe, setup: Setup) -> PackedRow:
    features = probe.features(setup.layer_ids or setup.config.target_layer_ids)
    if setup.features == "shifted":
        features = features.roll(1, 0)
    elif setup.features == "shuffled":
        generator = torch.Generator().manual_seed(0)
        features = features[torch.randperm(len(features), generator=generator).to(features.device)]
    return replace(probe.row, features=features, top_ids=None, top_logprobs=None)


def _drafter(setup: Setup) -> Drafter:
    config = setup.config
    # Predicting from the slot before is what the autoregressive ablation does, with true tokens for masks.
    variant = Variant(drafting="autoregressive") if setup.predicts_from_anchor else Variant()
    with torch.device("meta"):
        drafter = Drafter(config, variant)
    tensors = pair_rows(setup.tensors, config.head_dim) if setup.rotates_pairs else setup.tensors
    drafter.load_state_dict(dict(tensors), assign=True)
    for index, layer in enumerate(drafter.layers):
        layer.self_attn.visibility = Visibility(config.layer_causal[index], config.sliding_windows[index])  # type: ignore[union-attr]
    return drafter.eval()


def _anchors(row: PackedRow) -> Tensor:
    """Rows where a cycle can start and has something to draft."""
    same = row.loss_mask[:-1] & row.loss_mask[1:] & (row.document[:-1] == row.document[1:])
    return (same & (row.position[:-1] > 0)).nonzero()[:, 0]


def _run(
    probe: Probe, setup: Setup, drafter: Drafter, row: PackedRow, blocks: Blocks, depth: int
) -> tuple[Tensor, Tensor]:
    """Logits [A, depth, V'] and scores [A] of some blocks."""
    is_causal = all(setup.config.layer_causal)
    drafted = blocks if is_causal else make_blocks(row, blocks.anchors, setup.num_drafted + 1)
    if setup.predicts_from_anchor:  # its slots get masks, not the text
        masks = torch.full_like(drafted.labels, setup.config.mask_token_id)
        drafted = replace(drafted, labels=masks)
    embedding = probe.embedding if setup.embedding is None else setup.embedding
    embedding = embedding.to(setup.head.dtype)
    hidden = drafter(row, drafted, embedding, "sdpa")[:, :depth]  # compiling flex attention would take longer
    logits = (hidden @ setup.head.T).float()
    return logits, _scores(probe, setup, blocks, logits)


def _scores(probe: Probe, setup: Setup, blocks: Blocks, logits: Tensor) -> Tensor:
    assert probe.row.top_ids is not None
    assert probe.row.top_logprobs is not None
    depth = min(logits.shape[1], DEPTH)
    logits = logits[:, :depth]
    rows, is_labelled = blocks.label_rows[:, :depth], blocks.label_mask[:, :depth]
    rows = rows.clamp(max=len(probe.row.input_ids) - 1)
    likely, weights = probe.row.top_ids[rows].long(), probe.row.top_logprobs[rows].float().softmax(-1)
    column = torch.full((len(probe.embedding),), -1, device=logits.device)
    valid = (setup.target_ids >= 0) & (setup.target_ids < len(column))
    column[setup.target_ids[valid]] = valid.nonzero()[:, 0]
    columns = column[likely]
    logprobs = logits.gather(-1, columns.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    logprobs = torch.where(columns >= 0, logprobs, _FLOOR).clamp(min=_FLOOR)
    per_slot = (weights * (logprobs - weights.clamp(min=1e-9).log())).sum(-1)
    return (per_slot * is_labelled).sum(1) / is_labelled.sum(1).clamp(min=1)
