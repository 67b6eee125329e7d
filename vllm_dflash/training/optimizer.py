"""Optimisers and learning rate.

Muon orthogonalises the momentum of matrices (torch.optim.Muon) and leaves vectors to AdamW. Both follow one schedule:
a linear rise over the first `warmup_ratio`, then a cosine to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

#: Muon's steps are of unit size per matrix, AdamW's of about one per entry: this makes one --lr fit both.
_MUON_LR_RATIO = 20.0


def make_optimizers(
    parameters: Iterable[nn.Parameter], kind: str, lr: float, beta2: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon and AdamW; weight decay is for matrices only."""
    trained = [p for p in parameters if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    if kind == "muon":
        muon = torch.optim.Muon(matrices, lr=lr * _MUON_LR_RATIO, weight_decay=weight_decay)
        return [muon, torch.optim.AdamW(vectors, lr=lr, betas=(0.9, beta2), weight_decay=0.0)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2))]


def learning_rate_factor(progress: float, warmup_ratio: float) -> float:
    """Share of the peak learning rate at `progress` (0 to 1) of the run."""
    if progress < warmup_ratio:
        return progress / warmup_ratio
    rest = (progress - warmup_ratio) / max(1 - warmup_ratio, 1e-9)
    return 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Scale each group's peak learning rate, which is kept beside it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor
