"""Cross-entropy over drafted slots, without ever holding a [slots, vocabulary] tensor.

    labels    hard: the token that the text has; soft: a mixture (1 - s) * hard + s * the target's likeliest tokens
    weights   of slot k in a block of B:
                uniform   1
                decay     exp(-(k - 1) / gamma)                                     DFlash paper
                dpace     sum over m >= k of P_m,  P_m = prod_{j <= m} ((1 - a) q_j + a),  q_j = exp(-CE_j)
                          (D-PACE, arXiv 2605.18810: how much slot k's success still matters for the accepted length)
    vocabulary  all drafted tokens; or only those that occur in the batch plus random others, whose logits get the
                logarithm of how many tokens each of them stands for, so that the sum over the vocabulary stays unbiased

The target's head is frozen, so the gradient of each slot's loss with respect to its hidden state is known as soon as
its logits are, chunk by chunk in the forward pass. A head that is trained goes through checkpointing instead. On a GPU
`triton_kernels.draft_loss` does the same with a kernel between the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vllm_dflash.triton_kernels import draft_loss as kernels

#: Slots per chunk without kernel: with a vocabulary of 50,000 a chunk's logits take 100 MB in float32.
CHUNK = 512

WeightRule = Literal["uniform", "decay", "dpace"]


@dataclass(frozen=True)
class SlotLabels:
    """What N slots should predict: a sparse distribution each, over columns of the head."""

    columns: Tensor  # [N, k] int64
    probabilities: Tensor  # [N, k] float32, rows sum to 1
    hard: Tensor  # [N] int64, the column of the text's token


@dataclass(frozen=True)
class Candidates:
    """The part of the drafted vocabulary that a batch is scored against."""

    tokens: Tensor  # [C] int64, rows of the full head
    offsets: Tensor  # [C] float32, added to the logits


def slot_cross_entropy(
    hidden: Tensor, head: Tensor, labels: SlotLabels, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy [N] float32 of each slot, and whether its most probable token is the text's [N] bool.

    Args:
        hidden: [N, hidden].
        head: [C, hidden] of any float type; where it requires a gradient it gets one.
        offsets: [C] added to the logits.
    """
    run = kernels.draft_loss if kernels.has_kernel(hidden) else _draft_loss
    return run(hidden, head, labels.columns, labels.probabilities, labels.hard, offsets)


def slot_weights(rule: WeightRule, losses: Tensor, mask: Tensor, gamma: float, alpha: float) -> Tensor:
    """Weight [A, S] of each slot's loss, without gradient; 0 where masked.

    Args:
        losses: cross-entropy [A, S]; only `dpace` looks at it.
        mask: which slots have a label [A, S].
        gamma: decay length of `decay`, in slots.
        alpha: smoothing of `dpace`, 0 to 1.
    """
    if rule == "uniform":
        return mask.float()
    if rule == "decay":
        return mask * torch.exp(-torch.arange(mask.shape[1], device=mask.device) / gamma)
    smoothed = torch.where(mask, (1 - alpha) * torch.exp(-losses.detach()) + alpha, 1.0)
    prefix = torch.where(mask, smoothed.cumprod(1), 0.0)
    return mask * prefix.flip(1).cumsum(1).flip(1)


def mix_labels(hard: Tensor, columns: Tensor | None, logprobs: Tensor | None, soft_share: float) -> SlotLabels:
    """Labels of N slots from the text's tokens [N] and the target's likeliest ones [N, k] (columns; negative: none).

    The soft part is renormalised over its k tokens.
    """
    if columns is None or logprobs is None or not soft_share:
        return SlotLabels(hard[:, None], torch.ones_like(hard, dtype=torch.float32)[:, None], hard)
    probabilities = torch.where(columns >= 0, logprobs.float().exp(), 0.0)
    probabilities = soft_share * probabilities / probabilities.sum(1, keepdim=True).clamp_min(1e-9)
    rest = 1 - probabilities.sum(1, keepdim=True)
    return SlotLabels(torch.cat([hard[:, None], columns.clamp_min(0)], 1), torch.cat([rest, probabilities], 1), hard)


def draw_candidates(used: Tensor, vocab_size: int, num_negatives: int, generator: torch.Generator) -> Candidates:
    """The tokens in `used` (any shape) and up to `num_negatives` random others of a vocabulary.

    Each random one stands for (all others) / (those drawn), so its logit gets the logarithm of that.
    """
    is_used = torch.zeros(vocab_size, dtype=torch.bool)
    is_used[used.flatten().cpu()] = True
    others = (~is_used).nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), generator=generator)[:num_negatives]]
    is_drawn = is_used.clone()
    is_drawn[drawn] = True
    tokens = is_drawn.nonzero()[:, 0]
    standing_for = torch.tensor(max(len(others), 1) / max(len(drawn), 1)).log()
    offsets = torch.where(is_used[tokens], 0.0, standing_for)
    return Candidates(tokens.to(used.device), offsets.to(used.device))


def _draft_loss(
    hidden: Tensor, head: Tensor, columns: Tensor, probabilities: Tensor, hard: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the kernel's `draft_loss` does, by torch's operations on chunks of slots."""
    if head.requires_grad:
        return _checkpointed(hidden, head, SlotLabels(columns, probabilities, hard), offsets)
    return _FrozenHeadCrossEntropy.apply(hidden, head.to(hidden.dtype), columns, probabilities, hard, offsets)


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """Forward keeps d loss / d hidden, [N, hidden], instead of logits, [N, vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, columns: Tensor, probabilities: Tensor, hard: Tensor, offsets: Any
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = _logits(hidden[rows], head, offsets)
            correct[rows] = logits.argmax(-1) == hard[rows]
            logprobs = logits.log_softmax(-1)
            losses[rows] = -(logprobs.gather(1, columns[rows]) * probabilities[rows]).sum(1)
            difference = logprobs.exp_().scatter_add_(1, columns[rows], -probabilities[rows])
            gradient[rows] = difference.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None, None, None, None


def _checkpointed(hidden: Tensor, head: Tensor, labels: SlotLabels, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    def of_chunk(rows: Tensor, columns: Tensor, probabilities: Tensor, hard: Tensor) -> tuple[Tensor, Tensor]:
        logits = _logits(rows, head, offsets)
        losses = -(logits.log_softmax(-1).gather(1, columns) * probabilities).sum(1)
        return losses, logits.argmax(-1) == hard

    pieces = [
        checkpoint(of_chunk, *parts, use_reentrant=False)
        for parts in zip(*(t.split(CHUNK) for t in (hidden, labels.columns, labels.probabilities, labels.hard)))
    ]
    losses, correct = zip(*pieces)
    return torch.cat(losses), torch.cat(correct)


def _logits(hidden: Tensor, head: Tensor, offsets: Tensor | None) -> Tensor:
    logits = (hidden @ head.T).float()
    return logits if offsets is None else logits + offsets
