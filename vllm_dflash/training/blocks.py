"""Packed rows and the blocks drafted on them.

Several documents lie in one row of T tokens, one after another. A block belongs to one anchor: a supervised token whose
successor is supervised too, so that the drafter always starts where it will start when serving, at a token which the
target wrote.

    row          d0 d0 d0 d0 d0 d1 d1 d1 d1        documents
    anchor                a                        slot 0, its token is known
    slots                 a  m  m  .               slot k sits at the position of the anchor + k and predicts the
                                                   token there; slots behind the document's end have no label
    sees         x  x  x  .                        features of its own document strictly before the anchor, and the
                                                   slots of its own block (causal: only those up to itself)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm_dflash.training.target_features import SequenceFeatures

AnchorRule = Literal["random", "uniform"]


@dataclass(frozen=True)
class PackedRow:
    """Documents one after another; T tokens in all."""

    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    document: Tensor  # [T] int64, 0, 0, ..., 1, 1, ...
    position: Tensor  # [T] int64, counted within the document
    features: Tensor  # [T, F * hidden]
    top_ids: Tensor | None  # [T, k] int32: likeliest tokens after token t
    top_logprobs: Tensor | None  # [T, k]

    def to(self, device: torch.device) -> PackedRow:
        """The same on a device."""
        return PackedRow(*(None if v is None else v.to(device) for v in vars(self).values()))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Blocks:
    """A blocks of `length` slots on a packed row."""

    anchors: Tensor  # [A] int64, rows of the anchors, increasing
    document_start: Tensor  # [A] int64, first row of the anchor's document
    positions: Tensor  # [A, length] int64
    labels: Tensor  # [A, length - 1] int64, tokens of slots 1 to length - 1 (any value where masked)
    label_mask: Tensor  # [A, length - 1] bool

    @property
    def length(self) -> int:
        """Slots of a block, its anchor included."""
        return self.positions.shape[1]

    @property
    def label_rows(self) -> Tensor:
        """[A, length - 1] int64: the row whose *successor* each slot predicts (any value where it has no label)."""
        offsets = torch.arange(self.length - 1, device=self.anchors.device)
        return self.anchors[:, None] + offsets


def pack(documents: Sequence[tuple[Tensor, Tensor, SequenceFeatures]]) -> PackedRow:
    """Lay (token ids, loss mask, features) of several documents in one row."""
    lengths = [len(ids) for ids, _, _ in documents]
    found = [features for _, _, features in documents]

    def joined(name: str) -> Tensor | None:
        parts = [getattr(f, name) for f in found]
        return None if parts[0] is None else torch.cat(parts)

    return PackedRow(
        input_ids=torch.cat([ids for ids, _, _ in documents]),
        loss_mask=torch.cat([mask for _, mask, _ in documents]),
        document=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        position=torch.cat([torch.arange(length) for length in lengths]),
        features=torch.cat([f.features for f in found]),
        top_ids=joined("top_ids"),
        top_logprobs=joined("top_logprobs"),
    )


def draw_anchors(
    row: PackedRow, per_document: int, length: int, rule: AnchorRule, generator: torch.Generator
) -> Tensor:
    """Rows of the anchors, [A] int64, increasing.

    `random` draws up to `per_document` of the possible positions of each document afresh (paper: 512); `uniform` cuts
    each run of supervised tokens into blocks that follow each other, the paper's ablation.
    """
    possible = row.loss_mask[:-1] & row.loss_mask[1:] & (row.document[:-1] == row.document[1:])
    candidates = possible.nonzero()[:, 0]
    documents = row.document[candidates]
    chosen = []
    for document in documents.unique():
        rows = candidates[documents == document]
        if rule == "uniform":
            is_start = torch.ones_like(rows, dtype=torch.bool)
            is_start[1:] = rows[1:] != rows[:-1] + 1
            run_start = torch.cummax(torch.where(is_start, rows, 0), 0).values
            rows = rows[(rows - run_start) % length == 0]
        if len(rows) > per_document:
            rows = rows[torch.randperm(len(rows), generator=generator)[:per_document]].sort().values
        chosen.append(rows)
    return torch.cat(chosen) if chosen else candidates


def make_blocks(row: PackedRow, anchors: Tensor, length: int) -> Blocks:
    """Blocks of `length` slots at the given anchors."""
    slots = torch.arange(length, device=anchors.device)
    rows = anchors[:, None] + slots[1:]
    inside = (rows < len(row.input_ids)) & (
        row.document[rows.clamp(max=len(row.input_ids) - 1)] == row.document[anchors][:, None]
    )
    rows = torch.where(inside, rows, anchors[:, None])
    return Blocks(
        anchors=anchors,
        document_start=anchors - row.position[anchors],
        positions=row.position[anchors][:, None] + slots,
        labels=row.input_ids[rows],
        # A slot behind an unsupervised token is not reached when serving, so the mask must hold for all before it.
        label_mask=(inside & row.loss_mask[rows]).cumprod(1).bool(),
    )
