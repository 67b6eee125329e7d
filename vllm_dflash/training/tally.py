"""Sums over the rows of a few training steps, for one line of metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm_dflash.training.step import StepResult


@dataclass
class Tally:
    """What was added up since the last line of metrics."""

    num_slots: int
    loss: float = 0.0
    rows: int = 0
    anchors: int = 0
    tokens: int = 0
    grad_norm: float = 0.0  # of the last step
    correct: Tensor = field(init=False)  # [num_slots]
    labelled: Tensor = field(init=False)  # [num_slots]

    def __post_init__(self) -> None:
        self.correct, self.labelled = torch.zeros(self.num_slots), torch.zeros(self.num_slots)

    @property
    def accuracy(self) -> list[float]:
        """Share of labelled slots that were drafted as the text has them, by slot."""
        return (self.correct / self.labelled.clamp_min(1)).tolist()

    def add(self, result: StepResult, num_tokens: int) -> None:
        """Add a row; where blocks were truncated, its later slots have no label."""
        length = len(result.correct)
        self.correct[:length] += result.correct.cpu()
        self.labelled[:length] += result.labelled.cpu()
        self.loss += float(result.loss.detach())
        self.rows += 1
        self.anchors += result.num_anchors
        self.tokens += num_tokens

    def over_processes(self, accelerator: Any) -> Tally:
        """The sums of all processes of a run; each of them takes part."""
        counts = torch.tensor([self.loss, self.rows, self.anchors, self.tokens])
        sums = torch.cat([counts, self.correct, self.labelled]).to(accelerator.device)
        loss, *counted = accelerator.reduce(sums, "sum").tolist()
        rows, anchors, tokens = (int(count) for count in counted[:3])
        total = Tally(self.num_slots, loss, rows, anchors, tokens, self.grad_norm)
        total.correct, total.labelled = torch.tensor(counted[3:]).split(self.num_slots)
        return total
