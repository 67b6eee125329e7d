"""Logits of a chunk of drafted slots to their losses, and in place to their gradient; the kernel of draft_loss.py.

One program per slot reads the row twice, for its sum and for its gradient, and writes it once: 6 bytes per logit in
bfloat16. Rows are `row_stride` elements apart, a multiple of 16, so that those of an odd vocabulary too are read and
written 16 bytes at a time; what lies between them may hold anything, and may be overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .tuning import Config, best_config, config, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton on this platform: draft_loss runs its twin
    triton = None

CONFIGS = (
    config(8, 1, TILE=4096),
    config(4, 1, TILE=2048),
    config(4, 1, TILE=4096),
    config(16, 1, TILE=8192),
)


class Labels(NamedTuple):
    """Labels of C slots over V tokens; contiguous. Numbers outside 0..V-1 are no tokens."""

    columns: Tensor  # [C, k] int64, tokens that the label names, some perhaps twice
    probabilities: Tensor  # [C, k] float32, how much of the label is on each
    hard: Tensor  # [C] int64, the text's token; where it is none, loss and gradient are 0

    def rows(self, rows: slice) -> Labels:
        """Those of some slots."""
        return Labels(self.columns[rows], self.probabilities[rows], self.hard[rows])


def row_stride(num_tokens: int) -> int:
    """Elements from one row of logits to the next."""
    return (num_tokens + 15) // 16 * 16


def draft_loss_chunk(
    logits: Tensor,  # [C, V], rows `row_stride(V)` elements apart; becomes the gradient if has_gradient
    labels: Labels,
    offsets: Tensor | None,  # [row_stride(V)] float32, added to the logits
    scales: Tensor | None,  # [C] float32, factors of the gradient; None = 1
    has_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Losses [C] float32, and whether the text's token has the largest logit [C] bool."""
    (num_slots, num_tokens), num_labels = logits.shape, labels.columns.shape[1]
    losses = torch.empty(num_slots, dtype=torch.float32, device=logits.device)
    correct = torch.empty(num_slots, dtype=torch.bool, device=logits.device)

    def launch(target: Tensor, chosen: Config) -> None:
        _draft_loss_kernel[(num_slots,)](
            target,
            *labels,
            losses if offsets is None else offsets,
            losses if scales is None else scales,
            losses,
            correct,
            logits.stride(0),
            num_tokens,
            NUM_LABELS=num_labels,
            LABEL_TILE=triton.next_power_of_2(num_labels),
            HAS_OFFSETS=offsets is not None,
            HAS_SCALES=scales is not None,
            HAS_GRADIENT=has_gradient,
            GROUP=8,
            **chosen.options,
        )

    # Measured on other memory: the kernel overwrites its input, and takes the same time for any values.
    def measured(candidate: Config) -> None:
        launch(logits.new_empty(num_slots, logits.stride(0)), candidate)

    shape = (str(logits.dtype), power_of_two(num_tokens), int(has_gradient))
    launch(logits, best_config("draft_loss", shape, CONFIGS, measured))
    return losses, correct


if triton is not None:

    @triton.jit(do_not_specialize=["vocab_size"])
    def _draft_loss_kernel(
        logits_ptr,  # [C, row_stride], beyond vocab_size anything; overwritten if HAS_GRADIENT
        columns_ptr,  # [C, NUM_LABELS] int64
        probabilities_ptr,  # [C, NUM_LABELS] float32
        hard_ptr,  # [C] int64
        offsets_ptr,  # [row_stride] float32, read only if HAS_OFFSETS
        scales_ptr,  # [C] float32, read only if HAS_SCALES
        out_losses_ptr,  # [C] float32
        out_correct_ptr,  # [C] bool
        row_stride,
        vocab_size,
        NUM_LABELS: tl.constexpr,
        LABEL_TILE: tl.constexpr,
        HAS_OFFSETS: tl.constexpr,
        HAS_SCALES: tl.constexpr,
        HAS_GRADIENT: tl.constexpr,
        TILE: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        """One program per slot: once over its logits for their sum, once more to turn them into the gradient."""
        slot = tl.program_id(0)
        row_ptr = logits_ptr + slot.to(tl.int64) * row_stride
        hard = tl.load(hard_ptr + slot)
        is_labelled = (hard >= 0) & (hard < vocab_size)
        label = tl.arange(0, LABEL_TILE)
        column = tl.load(columns_ptr + slot * NUM_LABELS + label, mask=label < NUM_LABELS, other=-1)
        counts = is_labelled & (column >= 0) & (column < vocab_size)
        share = tl.load(probabilities_ptr + slot * NUM_LABELS + label, mask=counts, other=0.0)
        label_logit = _logits_at(row_ptr, offsets_ptr, column, counts, HAS_OFFSETS)
        hard_logit = _logits_at(row_ptr, offsets_ptr, hard, is_labelled, HAS_OFFSETS)
        near = hard // GROUP * GROUP + tl.arange(0, GROUP)
        before_hard = _logits_at(row_ptr, offsets_ptr, near, is_labelled & (near < hard), HAS_OFFSETS)

        # Maximum and sum by groups of tokens that one thread holds, so that the loop has no reduction over threads.
        # The start is finite: infinities of equal sign have no difference.
        group = tl.arange(0, TILE // GROUP) * GROUP
        tile = group[:, None] + tl.arange(0, GROUP)[None, :]
        group_max = tl.full([TILE // GROUP], -3.0e38, tl.float32)
        group_sum = tl.zeros([TILE // GROUP], tl.float32)
        is_best = tl.full([TILE // GROUP], 1, tl.int1)
        for first in tl.range(0, tl.where(is_labelled, vocab_size, 0), TILE):
            logit = _tile_of_logits(row_ptr, offsets_ptr, first + tile, row_stride, vocab_size, HAS_OFFSETS)
            top = tl.max(logit, axis=1)
            # Of equal logits the first counts as the largest, as in torch. Within the label's own group: below.
            is_best &= tl.where(first + group + GROUP <= hard, top < hard_logit, top <= hard_logit)
            top = tl.maximum(top, group_max)
            group_sum = group_sum * tl.exp(group_max - top) + tl.sum(tl.exp(logit - top[:, None]), axis=1)
            group_max = top

        largest = tl.max(group_max)
        mass = tl.where(is_labelled, tl.sum(group_sum * tl.exp(group_max - largest)), 1.0)
        label_logit = tl.where(counts, label_logit, largest)
        # In this order: with large logits, the logarithm of the whole sum would have lost its last digits.
        tl.store(out_losses_ptr + slot, tl.sum(share * ((largest - label_logit) + tl.log(mass))))
        is_correct = is_labelled & (tl.min(is_best.to(tl.int32)) == 1) & (tl.max(before_hard) < hard_logit)
        tl.store(out_correct_ptr + slot, is_correct)

        if HAS_GRADIENT:
            scale = 1.0
            if HAS_SCALES:
                scale = tl.load(scales_ptr + slot)
            factor = scale * tl.sum(share) / mass
            at_label = factor * tl.exp(label_logit - largest)
            for other in tl.range(NUM_LABELS):
                # A token that is named twice gets both shares, in both of its lanes, which then write the same.
                is_same = column == tl.load(columns_ptr + slot * NUM_LABELS + other)
                at_label -= tl.where(is_same, scale * tl.load(probabilities_ptr + slot * NUM_LABELS + other), 0.0)
            for first in tl.range(0, vocab_size, TILE):
                token = first + tile
                logit = _tile_of_logits(row_ptr, offsets_ptr, token, row_stride, vocab_size, HAS_OFFSETS)
                gradient = factor * tl.exp(tl.where(is_labelled, logit - largest, float("-inf")))
                tl.store(row_ptr + token, gradient.to(row_ptr.dtype.element_ty), mask=token < row_stride)
            # Other threads have written to the labels' columns above.
            tl.debug_barrier()
            tl.store(row_ptr + column, at_label.to(row_ptr.dtype.element_ty), mask=counts)

    @triton.jit
    def _tile_of_logits(row_ptr, offsets_ptr, token, row_stride, vocab_size, HAS_OFFSETS: tl.constexpr):
        """Logits in float32, -inf beyond the vocabulary. Loads are masked by the row's stride, a multiple of 16."""
        logit = _logits_at(row_ptr, offsets_ptr, token, token < row_stride, HAS_OFFSETS)
        return tl.where(token < vocab_size, logit, float("-inf"))

    @triton.jit
    def _logits_at(row_ptr, offsets_ptr, token, mask, HAS_OFFSETS: tl.constexpr):
        """Logits in float32 with their offsets, -inf where masked."""
        logit = tl.load(row_ptr + token, mask=mask, other=float("-inf")).to(tl.float32)
        if HAS_OFFSETS:
            logit += tl.load(offsets_ptr + token, mask=mask, other=0.0)
        return logit
