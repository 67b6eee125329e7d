"""Policies that bench/simulate.py steps through: ours, and an oracle. What each knows stands there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from step_costs import StepCosts, profile, timed

from vllm_dflash.draft_length import BACKLOG_ROWS, CostModel, DraftDecision, DraftLengthController, choose_lengths

NOISE, PAUSE_SHARE, PAUSE = 0.03, 0.005, 5.0  # of measured times
Decided = tuple[np.ndarray, int, np.ndarray]  # requests that draft [D], head positions, lengths [R]


@dataclass(frozen=True)
class Cell:
    """One setting."""

    costs: StepCosts
    context: int
    concurrency: int
    num_positions: int
    is_causal: bool = False  # blocks may be as short as the positions that are asked for

    def block_size(self, num_positions: int) -> int:
        """Rows of a request in a draft pass for so many positions."""
        return (num_positions if self.is_causal else self.num_positions) + 1


class Fixed:
    """Verifies the same number of tokens always."""

    def __init__(self, cell: Cell, length: int) -> None:
        self.lengths = np.full(cell.concurrency, length)

    def decide(
        self, text: Any, context_lens: np.ndarray, probabilities: np.ndarray, confidences: np.ndarray
    ) -> Decided:
        return np.arange(len(self.lengths)), int(self.lengths[0]), self.lengths

    def observe(self, *_: Any) -> None:
        pass


class Ours:
    """The served controller."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell, self._rng = cell, np.random.default_rng(seed)
        cost = CostModel.from_profile(profile(cell.costs, cell.num_positions, cell.block_size, NOISE, seed))
        self.controller = DraftLengthController(cell.num_positions, cost, is_causal=cell.is_causal)
        self._decision: DraftDecision | None = None

    def decide(
        self, text: Any, context_lens: np.ndarray, probabilities: np.ndarray, confidences: np.ndarray
    ) -> Decided:
        ids = text.ids
        plan = self.controller.plan(ids, context_lens, np.full(len(ids), self.cell.num_positions))
        self._decision = self.controller.choose(plan, confidences[plan.drafting, : plan.num_positions])
        lengths = np.zeros(len(ids), dtype=np.int64)
        lengths[plan.drafting] = self._decision.lengths
        return plan.drafting, plan.num_positions, lengths

    def observe(
        self, drafting: np.ndarray, lengths: np.ndarray, accepted: np.ndarray, size: Any, finished: Any
    ) -> None:
        error = self._rng.normal(0, NOISE, 3) + (np.log(PAUSE) if self._rng.random() < PAUSE_SHARE else 0.0)
        step = timed(self.cell.costs, size, error)
        self.controller.observe(self._decision, lengths[drafting], accepted[drafting], step)
        self.controller.forget(finished)


class Oracle:
    """Knows true costs and probabilities; what exactly stands in the module's docstring."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def decide(
        self, text: Any, context_lens: np.ndarray, probabilities: np.ndarray, confidences: np.ndarray
    ) -> Decided:
        expected = np.cumprod(text.expected(), 1)
        order = np.argsort(-expected.sum(1))
        counts = {-(-len(order) * i // 8) for i in range(9)}
        tried = [(self._lengths(np.sort(order[:count]), expected, context_lens)) for count in counts]
        drafting, positions, _ = max(tried, key=lambda one: one[-1])[0]
        survival = np.cumprod(probabilities, 1)[:, :positions]
        return self._lengths(drafting, survival, context_lens)[0]

    def _lengths(self, drafting: np.ndarray, survival: np.ndarray, context_lens: np.ndarray) -> tuple[Decided, float]:
        """Best lengths after a draft pass for these requests, and the rate that they give."""
        cell, costs, (n, num_positions) = self.cell, self.cell.costs, survival.shape
        counts = n + np.arange(len(drafting) * num_positions + 1)
        # Contexts of the requests are nearly the same here, so their mean stands for each.
        context = float(context_lens.sum())
        seconds = costs.target(counts, n, context, counts * context / n)
        seconds = seconds + costs.context(counts) * (1.0 if len(drafting) else min(n / BACKLOG_ROWS, 1.0))
        contexts = float(context_lens[drafting].sum())
        lengths, positions = np.zeros(n, dtype=np.int64), 0
        if len(drafting):
            draft = float(costs.draft(len(drafting), num_positions, cell.block_size(num_positions), contexts))
            lengths[drafting] = choose_lengths(survival[drafting], seconds + draft, base_tokens=n)
            positions = int(lengths.max())
        gained = float((survival * (np.arange(num_positions) < lengths[:, None])).sum())
        draft = float(costs.draft(len(drafting), positions, cell.block_size(positions), contexts))
        return (drafting, positions, lengths), (n + gained) / (float(seconds[lengths.sum()]) + draft)

    def observe(self, *_: Any) -> None:
        pass
