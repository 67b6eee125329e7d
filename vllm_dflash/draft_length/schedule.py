"""Lengths that were given in advance: a fixed K, or a schedule that tests force, such as 7, 0, 3, 0, 7.

The same calls as the controllers', so that a proposer or a scheduler does not tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_dflash.draft_length.counters import DraftCounters
from vllm_dflash.draft_length.decision import DraftDecision, DraftPlan
from vllm_dflash.draft_length.steps import TimedStep


class _Schedule:
    """One length per step, over and over.

    Raises:
        ValueError: there is none, or a negative one.
    """

    def __init__(self, schedule: Sequence[int]) -> None:
        if not schedule or min(schedule) < 0:
            raise ValueError(f"a schedule holds at least one length, none negative, but it is {list(schedule)}.")
        self.schedule = tuple(schedule)
        self.counters = DraftCounters()
        self._step = 0

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing is remembered."""

    def _next(self) -> int:
        self._step += 1
        return self.schedule[(self._step - 1) % len(self.schedule)]


class ScheduledLengths(_Schedule):
    """Every request verifies as many tokens as the schedule says for this step, or as its cap allows.

    Args:
        schedule: one length per step, repeated; a single one is a fixed K.
    """

    def plan(
        self,
        request_ids: Sequence[str],
        context_lens: np.ndarray,  # [R]
        caps: np.ndarray,  # [R]
        is_seeded: np.ndarray | None = None,  # not looked at: the schedule depends on nothing
    ) -> DraftPlan:
        """As DraftLengthController.plan."""
        lengths = np.minimum(caps, self._next())
        drafting = np.flatnonzero(lengths > 0)
        return DraftPlan(
            drafting=drafting,
            num_positions=int(lengths.max(initial=0)),
            request_ids=tuple(request_ids),
            context_lens=context_lens,
            caps=lengths[drafting],
            fixed=np.ones(len(drafting), dtype=bool),
            is_probe=False,
            step=self._step,
        )

    def choose(self, plan: DraftPlan, confidences: np.ndarray) -> DraftDecision:
        """As DraftLengthController.choose."""
        ids = tuple(plan.request_ids[row] for row in plan.drafting)
        return DraftDecision(ids, confidences, plan.caps.astype(np.int64), plan.fixed)

    def observe(
        self, decision: DraftDecision | None, verified: np.ndarray, accepted: np.ndarray, step: TimedStep
    ) -> None:
        """Counts only."""
        self.counters.add(step, step.seconds, int(verified.sum()), int(accepted.sum()))

    def rested(self, step: TimedStep, count: int) -> None:
        """Never: its plans hold for one step."""


class ScheduledStepLengths(_Schedule):
    """The same for runners whose scheduler sets one length for all requests of a step.

    Args:
        schedule: one length per step, repeated.
    """

    def choose(self, request_ids: Sequence[str], context_lens: np.ndarray, caps: np.ndarray) -> int:
        """As StepLengthController.choose."""
        return self._next()

    def observe(
        self, request_ids: Sequence[str], verified: np.ndarray, accepted: np.ndarray, step: TimedStep | None
    ) -> None:
        """Counts only."""
        if step is not None:
            self.counters.add(step, step.seconds, int(verified.sum()), int(accepted.sum()))
