"""The loss of one packed row: draw anchors, draft all blocks, score their slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_dflash.training.attention import Backend
from vllm_dflash.training.blocks import Blocks, PackedRow, draw_anchors, make_blocks
from vllm_dflash.training.loss import (
    SlotLabels,
    draw_candidates,
    mix_labels,
    slot_cross_entropy,
    slot_weights,
)
from vllm_dflash.training.settings import TrainSettings


@dataclass(frozen=True)
class TargetTables:
    """The target's frozen ends."""

    embedding: Tensor  # [vocabulary, hidden]
    head: Tensor  # [draft vocabulary, hidden]
    column: Tensor  # [vocabulary] int64: draft token of each target token, -1 where the drafter cannot draft it

    @property
    def target_ids(self) -> Tensor:
        """Target token of each draft token, [draft vocabulary] int64."""
        drafted = (self.column >= 0).nonzero()[:, 0]
        return drafted[self.column[drafted].argsort()]  # d2t of a checkpoint need not increase


@dataclass(frozen=True)
class StepResult:
    """Loss and what to log of one packed row."""

    loss: Tensor  # scalar
    correct: Tensor  # [S] float: drafted tokens equal to the text's, by slot
    labelled: Tensor  # [S] float: slots that had a label
    num_anchors: int


def tables_of(target: Any, vocabulary: Tensor | None) -> TargetTables:
    """Embedding and head of a Hugging Face model, the head reduced to a draft vocabulary [V'] where there is one."""
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    chosen = torch.arange(len(head), device=head.device) if vocabulary is None else vocabulary.to(head.device)
    column = torch.full((len(embedding),), -1, device=head.device)
    column[chosen] = torch.arange(len(chosen), device=head.device)
    return TargetTables(embedding, head if vocabulary is None else head[chosen].clone(), column)


def row_loss(
    drafter: Any, row: PackedRow, tables: TargetTables, settings: TrainSettings, backend: Backend, seed: int
) -> StepResult:
    """Loss of one packed row.

    Args:
        drafter: a Drafter, or what a framework wrapped around it.
        seed: decides anchors, block length and negatives; equal seeds give equal losses.
    """
    generator = torch.Generator().manual_seed(seed)
    length = _block_length(settings, generator)
    anchors = draw_anchors(row, settings.max_anchors, settings.draft_block_size, settings.anchors, generator)
    blocks = make_blocks(row, anchors, length)
    hidden = drafter(row, blocks, tables.embedding, backend)  # [A, length - 1, hidden]
    # Serving never gets past a token that the drafter cannot draft, so slots behind one are not worth learning.
    can_draft = tables.column[blocks.labels] >= 0
    mask = blocks.label_mask & (can_draft | ~blocks.label_mask).long().cumprod(1).bool()
    head = _own_head(drafter)
    losses, correct = _score(hidden[mask], row, blocks, mask, tables, head, settings, generator)
    slot_losses = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, losses)
    rule = "uniform" if settings.truncate_blocks else settings.loss_weight
    weights = slot_weights(rule, slot_losses, mask, settings.effective_loss_decay, settings.dpace_alpha)
    loss = (slot_losses * weights).sum() / weights.sum().clamp_min(1e-9)
    hits = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, correct.float())
    return StepResult(loss, hits.sum(0).detach(), blocks.label_mask.float().sum(0), len(anchors))


def _block_length(settings: TrainSettings, generator: torch.Generator) -> int:
    """Slots of this row's blocks: all, or so that slot k takes part as often as the decay would weight it."""
    if not settings.truncate_blocks:
        return settings.draft_block_size
    slots = torch.arange(settings.draft_block_size - 1)
    share = torch.exp(-slots / settings.effective_loss_decay)
    return int((torch.rand((), generator=generator) < share).sum()) + 1


def _own_head(drafter: Any) -> Tensor | None:
    lm_head = getattr(getattr(drafter, "module", drafter), "lm_head", None)
    return None if lm_head is None else lm_head.weight


def _score(
    hidden: Tensor,  # [N, hidden], the labelled slots
    row: PackedRow,
    blocks: Blocks,
    mask: Tensor,
    tables: TargetTables,
    own_head: Tensor | None,
    settings: TrainSettings,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    head = tables.head if own_head is None else own_head
    labels = _labels(row, blocks, mask, tables, settings.soft_share if settings.soft_labels else 0.0)
    offsets = None
    if settings.loss_negatives:
        candidates = draw_candidates(labels.columns, len(head), settings.loss_negatives, generator)
        place = torch.empty(len(head), dtype=torch.int64, device=head.device)
        place[candidates.tokens] = torch.arange(len(candidates.tokens), device=head.device)
        labels = SlotLabels(place[labels.columns], labels.probabilities, place[labels.hard])
        head, offsets = head[candidates.tokens], candidates.offsets
    return slot_cross_entropy(hidden, head, labels, offsets)


def _labels(row: PackedRow, blocks: Blocks, mask: Tensor, tables: TargetTables, soft_share: float) -> SlotLabels:
    hard = tables.column[blocks.labels[mask]]
    if not soft_share or row.top_ids is None or row.top_logprobs is None:
        return mix_labels(hard, None, None, 0.0)
    rows = blocks.label_rows[mask]
    return mix_labels(hard, tables.column[row.top_ids[rows].long()], row.top_logprobs[rows], soft_share)
