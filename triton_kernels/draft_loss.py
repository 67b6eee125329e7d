"""Cross-entropy of drafted slots, with gradients, a chunk of slots at a time; for training.

For slot s with hidden state h_s, logits l_v = w_v . h_s + offset_v over V tokens, and a sparse label p over k of them:

    loss_s = sum_v p_v (log(sum_u exp(l_u)) - l_v)        correct_s: the text's token has the largest logit
    d loss_s / d l_v = (sum_u p_u) softmax(l)_v - p_v     d h_s = (d l) W     d W = (d l)^T h

Losses are put out by slot, since how much each counts may depend on all of them (D-PACE); the weighted sum is the
caller's, and its weights arrive in the backward pass as the gradient of `losses`. Where W is frozen, d h_s of weight 1
is kept from the forward pass, [S, H], and only scaled later. Where W is trained, the backward pass computes the logits
again, because each slot's weight has to be known before d W is summed over slots.

Logits exist for one chunk of slots, [chunk, V], at most LOGITS_BYTES: the library's product writes them, the kernel of
draft_loss_chunk.py turns them into d l in place, a second product multiplies that with W. With H = 4096, V = 151,936
and 512 blocks of 15 slots (on paper, not measured; for an H200 with 4.8 TB/s and 700 TFLOP/s of bfloat16 products):

    frozen W            2 products, 2 H flops per logit each        19.1 TFLOP    27 ms
                        kernel, 2 + 2 + 2 bytes per logit            7.0 GB        1.5 ms
    no logits at all    3 products (logits once per direction)      28.7 TFLOP    41 ms
    torch's operations  2 products, some 40 bytes per logit, mostly in float32    27 + 10 ms

Leaving logits unwritten saves 10 bytes per logit, 2.1 ps, for 2 H flops, 2.9 H fs: it would pay for H below some 700,
if its products ran at the library's speed, and they cannot: d h of 64 slots alone is 1 MB of accumulators. Trained:
4 products, 55 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .draft_loss_chunk import Labels, draft_loss_chunk, row_stride, triton

#: Logits held at a time. A chunk should have several hundred slots, so that its products are bound by arithmetic and
#: not by reading W: 768 slots of 151,936 tokens in bfloat16.
LOGITS_BYTES = 256 << 20

#: Rows of W whose gradient is added at a time, which bounds the memory for a chunk's share of it.
_WEIGHT_ROWS = 8192


def has_kernel(hidden: Tensor) -> bool:
    """Whether `draft_loss` runs the kernel on such a tensor, and not the twin."""
    return triton is not None and hidden.is_cuda


def draft_loss(
    hidden: Tensor,  # [S, H]
    weight: Tensor,  # [V, H]; gets a gradient where it requires one
    columns: Tensor,  # [S, k] int64, tokens that the label names, some perhaps twice; outside 0..V-1 = none
    probabilities: Tensor,  # [S, k] float32, how much of the label is on each
    hard: Tensor,  # [S] int64, the text's token; outside 0..V-1 = the slot has no label, its loss and gradient are 0
    offsets: Tensor | None = None,  # [V] float32, added to the logits
    chunk_slots: int | None = None,  # slots whose logits are held at a time; default: by LOGITS_BYTES
) -> tuple[Tensor, Tensor]:
    """Losses [S] float32, and whether the text's token is the most probable [S] bool. See the module docstring.

    Products are in autocast's type where that is on, otherwise in the type of `hidden`; sums are in float32.

    Raises:
        ValueError: shapes do not fit together.
    """
    if columns.shape != probabilities.shape or not len(hidden) == len(columns) == len(hard):
        raise ValueError(
            f"{len(hidden)} slots, but columns {tuple(columns.shape)}, probabilities {tuple(probabilities.shape)} and "
            f"hard {tuple(hard.shape)}; each slot needs one row of each."
        )
    if not has_kernel(hidden):
        return draft_loss_torch(hidden, weight, columns, probabilities, hard, offsets, chunk_slots)
    return _DraftLoss.apply(hidden, weight, columns, probabilities, hard, offsets, chunk_slots)


def draft_loss_torch(
    hidden: Tensor,
    weight: Tensor,
    columns: Tensor,
    probabilities: Tensor,
    hard: Tensor,
    offsets: Tensor | None = None,
    chunk_slots: int | None = None,  # has no meaning here
) -> tuple[Tensor, Tensor]:
    """The twin: holds all logits. In float64 where `hidden` is."""
    dtype, (num_tokens, _) = _product_dtype(hidden), weight.shape
    labelled = ((hard >= 0) & (hard < num_tokens)).nonzero()[:, 0]
    logits = hidden[labelled].to(dtype) @ weight.to(dtype).T
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if offsets is not None:
        logits = logits + offsets
    columns = columns[labelled]
    counts = (columns >= 0) & (columns < num_tokens)
    shares = torch.where(counts, probabilities[labelled], 0.0)
    losses = -(logits.log_softmax(1).gather(1, torch.where(counts, columns, 0)) * shares).sum(1)
    correct = torch.zeros_like(hard, dtype=torch.bool)
    correct[labelled] = logits.argmax(1) == hard[labelled]
    return losses.new_zeros(len(hidden)).index_put((labelled,), losses), correct


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        probabilities: Tensor,
        hard: Tensor,
        offsets: Tensor | None,
        chunk_slots: int | None,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        labels = Labels(columns.contiguous(), probabilities.contiguous(), hard.contiguous())
        needs_hidden, ctx.is_trained, *_ = ctx.needs_input_grad
        gradient = torch.empty_like(hidden) if needs_hidden and not ctx.is_trained else None
        ctx.dtype, ctx.chunk_slots = _product_dtype(hidden), chunk_slots
        narrow, offsets = weight.to(ctx.dtype), _padded(offsets)
        for rows, logits in _chunks(hidden.to(ctx.dtype), narrow, chunk_slots):
            losses[rows], correct[rows] = draft_loss_chunk(
                logits, labels.rows(rows), offsets, None, has_gradient=gradient is not None
            )
            if gradient is not None:
                gradient[rows] = logits @ narrow
        ctx.save_for_backward(*(hidden, weight, offsets, *labels) if ctx.is_trained else (gradient,))
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scales = gradients[0].contiguous()
        no_gradients = (None,) * 5
        if not ctx.is_trained:
            (gradient,) = ctx.saved_tensors
            return (gradient * scales[:, None]).to(gradient.dtype), None, *no_gradients
        hidden, weight, offsets, *labels = ctx.saved_tensors
        found = _gradients(hidden, weight, offsets, Labels(*labels), scales, ctx.dtype, ctx.chunk_slots)
        return *found, *no_gradients


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    labels: Labels,
    scales: Tensor,  # [S] float32
    dtype: torch.dtype,
    chunk_slots: int | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and weight, from logits computed again."""
    narrow_hidden, narrow = hidden.to(dtype), weight.to(dtype)
    d_hidden = torch.empty_like(hidden)
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for rows, logits in _chunks(narrow_hidden, narrow, chunk_slots):
        draft_loss_chunk(logits, labels.rows(rows), offsets, scales[rows], has_gradient=True)
        d_hidden[rows] = logits @ narrow
        for start in range(0, len(weight), _WEIGHT_ROWS):
            part = slice(start, start + _WEIGHT_ROWS)
            d_weight[part] += logits[:, part].T @ narrow_hidden[rows]
    return d_hidden, d_weight.to(weight.dtype)


def _chunks(hidden: Tensor, weight: Tensor, chunk_slots: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Slots and their logits [chunk, V], all in the same memory."""
    num_slots, num_tokens = len(hidden), len(weight)
    stride = row_stride(num_tokens)
    if chunk_slots is None:
        # A multiple of 128: whole tiles of the products, and aligned rows of labels.
        chunk_slots = max(LOGITS_BYTES // (stride * hidden.element_size()) // 128 * 128, 128)
    memory = hidden.new_empty(min(chunk_slots, num_slots), stride)
    for start in range(0, num_slots, chunk_slots):
        rows = slice(start, min(start + chunk_slots, num_slots))
        logits = memory[: rows.stop - start, :num_tokens]
        yield rows, torch.mm(hidden[rows], weight.T, out=logits)


def _padded(offsets: Tensor | None) -> Tensor | None:
    """Offsets with as many elements as a row of logits has room for."""
    return None if offsets is None else functional.pad(offsets.float(), (0, row_stride(len(offsets)) - len(offsets)))
