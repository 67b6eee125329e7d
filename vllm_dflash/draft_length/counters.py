"""Sums over steps, for metrics and a log line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_dflash.draft_length.steps import TimedStep

#: Seconds between two lines in the log, and between two updates of metrics.
_LOG_EVERY, _COUNT_EVERY = 60.0, 1.0


@dataclass
class DraftCounters:
    """What happened since the start; every field only grows."""

    steps: int = 0
    steps_off: int = 0  # without a draft pass
    steps_probing: int = 0  # with a draft pass made to learn
    seconds: float = 0.0
    seconds_off: float = 0.0
    predicted_seconds: float = 0.0  # by the cost model, before it saw the step
    request_steps: int = 0  # requests that got a token, over steps
    drafted: int = 0  # rows through the drafter's LM head
    verified: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and step, bonus included, steps without drafts counted too; 1 before any step."""
        return 1 + self.accepted / max(self.request_steps, 1)

    @property
    def predicted_over_measured(self) -> float:
        """Predicted seconds by measured ones; 1 before any step."""
        return self.predicted_seconds / self.seconds if self.seconds else 1.0

    def add(self, step: TimedStep, predicted_seconds: float, verified: int, accepted: int) -> None:
        """Count a step."""
        self.steps += 1
        self.seconds += step.seconds
        if step.size.num_drafting == 0:
            self.steps_off += 1
            self.seconds_off += step.seconds
        self.predicted_seconds += predicted_seconds
        self.request_steps += step.size.num_requests
        self.drafted += step.size.head_rows
        self.verified += verified
        self.accepted += accepted

    def line(self) -> str:
        """One line for a log."""
        return (
            f"{self.acceptance_length:.2f} tokens per step and request; {self.drafted} drafted,"
            f" {self.verified} verified, {self.accepted} accepted; off in {self.steps_off} of {self.steps} steps"
            f" ({self.seconds_off:.1f} of {self.seconds:.1f} s); predicted time {self.predicted_over_measured:.2f} of"
            " measured"
        )


class CounterReports:
    """Says now and then what was counted.

    Args:
        now: seconds by any clock.
        log: gets a line.
        count: gets the counters.
    """

    def __init__(
        self,
        now: float,
        log: Callable[[str], None] | None = None,
        count: Callable[[DraftCounters], None] | None = None,
    ) -> None:
        self._log, self._count = log, count
        self._next_line, self._next_count = now + _LOG_EVERY, now

    def report(self, now: float, counters: DraftCounters) -> None:
        """After a step; does nothing most of the time."""
        if self._count is not None and now >= self._next_count:
            self._next_count = now + _COUNT_EVERY
            self._count(counters)
        if self._log is not None and now >= self._next_line:
            self._next_line = now + _LOG_EVERY
            self._log(counters.line())
