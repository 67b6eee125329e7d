"""Between the proposer and draft_length/: what a step is, what became of the last drafts, and the clock.

draft_length/ knows neither vLLM nor time; the proposer knows neither costs nor estimates. One `LengthControl` per
proposer turns batches into the controller's values:

    plan = control.plan(batch)                  who drafts, how many positions
    ...                                         context K/V, draft pass
    decision = control.choose(plan, confidences)
    control.finish(batch, plan, decision, ...)  times; and what the target did with the drafts of the step before

Where nobody drafts, a plan holds for some steps. As long as these are like the one that it was made for, nothing is
asked or told; the controller hears of them at the end, all at once (`_Rest`).

A step's time runs from the end of one `propose` to the end of the next, so everything between is in it: scheduler,
target pass, accept or reject. It counts where a request of the step before is still there; otherwise the engine may
have been idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vllm_dflash.draft_length import (
    CounterReports,
    DraftCounters,
    DraftDecision,
    DraftPlan,
    StepSize,
    TimedStep,
    TraceWriter,
)


class Lengths(Protocol):
    """Decides: DraftLengthController, or ScheduledLengths for lengths that are given."""

    counters: DraftCounters

    def plan(self, request_ids: Any, context_lens: Any, caps: Any, is_seeded: Any) -> DraftPlan: ...
    def choose(self, plan: DraftPlan, confidences: np.ndarray) -> DraftDecision: ...
    def observe(self, decision: Any, verified: Any, accepted: Any, step: TimedStep) -> None: ...
    def rested(self, step: TimedStep, count: int) -> None: ...
    def forget(self, request_ids: Any) -> None: ...


@dataclass(frozen=True)
class StepBatch:
    """A target pass, request by request."""

    request_ids: tuple[str, ...]
    num_rows: np.ndarray  # [R] rows of the target pass
    num_rejected: np.ndarray  # [R] rows at their end that the target refused
    context_lens: np.ndarray  # [R] accepted tokens so far, those of this pass included
    has_exact_lens: bool  # False: they may count rows that were rejected, because a GPU was not waited for
    caps: np.ndarray  # [R] most tokens that each can draft now; 0 = none
    is_seeded: np.ndarray  # [R] bool: sampled, with a seed


@dataclass
class _Rest:
    """Steps for which an empty plan holds."""

    plan: DraftPlan
    batch: StepBatch  # the last one
    left: int  # steps
    count: int = 0  # steps that went by, and their seconds
    seconds: float = 0.0
    context_seconds: float = 0.0

    def covers(self, batch: StepBatch) -> bool:
        """The same requests decode on, and may draft no more and no less."""
        is_same = self.left > 0 and batch.request_ids == self.batch.request_ids
        return is_same and bool((batch.num_rows == 1).all()) and np.array_equal(batch.caps, self.batch.caps)

    def step(self) -> TimedStep:
        """Their mean."""
        size = _size(self.batch, self.plan, 0, 0, 0)
        return TimedStep(size, self.seconds / self.count, 0.0, self.context_seconds / self.count)


class LengthControl:
    """Draft lengths of every step.

    Args:
        lengths: what decides.
        learns: it uses confidences and outcomes; False spares their computation.
        agree: gives the first rank's value on all ranks of a tensor-parallel group; their clocks differ.
        trace: gets every step.
        log: gets a line now and then.
        count: gets the counters now and then.
        clock: seconds; a bench that gives several engines their turns puts one here that stands still in between.
    """

    def __init__(
        self,
        lengths: Lengths,
        learns: bool,
        agree: Callable[[Any], Any] = lambda value: value,
        trace: TraceWriter | None = None,
        log: Callable[[str], None] | None = None,
        count: Callable[[DraftCounters], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.lengths, self.learns = lengths, learns
        self._agree, self.trace, self.clock = agree, trace, clock
        self._pending: DraftDecision | None = None  # its drafts are being verified
        self._known: dict[str, int] = {}  # accepted tokens of its requests when they drafted
        self._last_ids: frozenset[str] = frozenset()
        self._last_end = 0.0
        self._rest: _Rest | None = None
        self._reports = CounterReports(clock(), log, count)

    def plan(self, batch: StepBatch) -> DraftPlan:
        """Who drafts in this step."""
        rest = self._rest
        if rest is not None and rest.covers(batch):
            rest.batch, rest.left = batch, rest.left - 1
            return rest.plan
        self._end_rest()
        return self._agree(self.lengths.plan(batch.request_ids, batch.context_lens, batch.caps, batch.is_seeded))

    def choose(self, plan: DraftPlan, confidences: np.ndarray) -> DraftDecision:
        """How many drafted tokens of each drafting request are verified; `confidences` [D, P]."""
        return self._agree(self.lengths.choose(plan, confidences))

    def finish(
        self,
        batch: StepBatch,
        plan: DraftPlan,
        decision: DraftDecision,
        *,
        query_rows: int,
        context_rows: int,
        context_seconds: float,
        draft_seconds: float,
        alive: Collection[str],
    ) -> None:
        """Learn from the step that ends here.

        Args:
            query_rows: rows of its draft pass.
            context_rows: rows whose context K/V it wrote, those of earlier steps included.
            alive: requests that vLLM still knows; others are forgotten.
        """
        now, rest_steps = self.clock(), plan.rest_steps
        if self._rest is not None:
            if context_rows == 0:
                self._go_on_resting(now, context_seconds)
                return
            rest_steps = self._rest.left
            self._end_rest()  # a step that writes what waited is like no other
        due, waiting = _due(self._pending, batch.request_ids, alive)
        if self._last_ids.intersection(batch.request_ids):
            verified, accepted = _outcome(due, self._known, batch)
            step = TimedStep(
                _size(batch, plan, query_rows, context_rows, int(verified.sum())),
                seconds=now - self._last_end,
                draft_seconds=draft_seconds,
                context_seconds=context_seconds,
            )
            self.lengths.observe(due, verified, accepted, step)
            if self.trace is not None:
                self.trace.write(step, due, verified, accepted)
        self.lengths.forget([i for i in self._last_ids if i not in alive])
        pending = decision if waiting is None else decision.with_those_of(waiting)
        self._pending = pending if len(pending.request_ids) else None
        lens = dict(zip(batch.request_ids, batch.context_lens.tolist()))
        self._known = {i: lens[i] if i in lens else self._known[i] for i in pending.request_ids}
        self._last_ids, self._last_end = frozenset(batch.request_ids), now
        self._reports.report(now, self.lengths.counters)
        if rest_steps and self._pending is None:
            self._rest = _Rest(plan, batch, rest_steps)

    def _go_on_resting(self, now: float, context_seconds: float) -> None:
        rest = self._rest
        assert rest is not None
        seconds, self._last_end = now - self._last_end, now
        rest.count, rest.seconds = rest.count + 1, rest.seconds + seconds
        rest.context_seconds += context_seconds
        if self.trace is not None:
            self.trace.write(TimedStep(_size(rest.batch, rest.plan, 0, 0, 0), seconds, 0.0, context_seconds))

    def _end_rest(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None and rest.count:
            self.lengths.rested(rest.step(), rest.count)
            self._reports.report(self._last_end, self.lengths.counters)


def _due(
    pending: DraftDecision | None, request_ids: Collection[str], alive: Collection[str]
) -> tuple[DraftDecision | None, DraftDecision | None]:
    """Of a decision, what this step's target pass settled, and what waits: requests that the scheduler left out."""
    if pending is None:
        return None, None
    present = set(request_ids)
    waits = np.array([request not in present and request in alive for request in pending.request_ids])
    if not waits.any():
        return pending, None
    return pending.rows(~waits), pending.rows(waits)


def _outcome(due: DraftDecision | None, known: dict[str, int], batch: StepBatch) -> tuple[np.ndarray, np.ndarray]:
    """Verified and accepted tokens [D] of each request of a decision; 0 where its drafts were not verified.

    Args:
        known: accepted tokens of each request when it drafted. A request that was preempted comes back with a chunk of
            its text, which does not begin there.
    """
    if due is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    place = {request: row for row, request in enumerate(batch.request_ids)}
    rows = np.array([place.get(request, -1) for request in due.request_ids], dtype=np.int64)
    rejected, num_rows = batch.num_rejected[rows], batch.num_rows[rows]
    before = batch.context_lens[rows] - num_rows + rejected
    is_verified = (rows >= 0) & (before == np.array([known.get(i, -1) for i in due.request_ids], dtype=np.int64))
    # Fewer than decided were cut by a grammar or by the step's token budget.
    verified = np.where(is_verified & (num_rows - 1 <= due.lengths), num_rows - 1, 0)
    return verified, np.maximum(verified - np.where(is_verified, rejected, 0), 0)


def _size(batch: StepBatch, plan: DraftPlan, query_rows: int, context_rows: int, num_verified: int) -> StepSize:
    drafting = plan.drafting
    return StepSize(
        num_requests=len(batch.request_ids),
        num_tokens=int(batch.num_rows.sum()),
        num_verified=num_verified,
        context_tokens=int(batch.context_lens.sum()),
        attended_tokens=int(batch.num_rows @ batch.context_lens),
        num_drafting=len(drafting),
        query_rows=query_rows,
        head_rows=len(drafting) * plan.num_positions,
        draft_context_tokens=int(batch.context_lens[drafting].sum()),
        context_rows=context_rows,
    )
