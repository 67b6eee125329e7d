"""One draft length for all requests of a step, for runners whose scheduler sets it before the step is run.

    every step:
        length = controller.choose(request_ids, context_lens, caps)          before the step: drafted at its end,
                                                                             verified in the next one
        controller.observe(request_ids, verified, accepted, timed_step)      when its results are known

Under asynchronous scheduling the second call is one step behind the first. What decides is what DraftLengthController
knows too, but for the drafter's probabilities, which are on the device: the rate that each position starts from stands
for them, so that acceptance is learnt from outcomes alone. Costs are not profiled but learnt from whole steps.

The length is the rung of a ladder with the most expected tokens per second; 0 is plain decoding. Now and then another
rung is tried for some steps, one that may be better for all that is known, which a small share of the time that has
passed pays for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dflash.draft_length.acceptance import AcceptanceEstimate
from vllm_dflash.draft_length.cost import CostModel
from vllm_dflash.draft_length.counters import DraftCounters
from vllm_dflash.draft_length.memory import RequestMemory
from vllm_dflash.draft_length.rung_times import RungTimes
from vllm_dflash.draft_length.steps import StepSize, TimedStep

#: Each rung has CUDA graphs of its own.
_RUNGS = (0, 1, 3, 7, 15)
#: A rung so near to K is left out.
_NEAR = 0.75
#: A step of a trial's length that verifies what a step of that length drafted.
_TRIAL_STEPS = 2
_ALIKE = 0.1  # part of the verified tokens that may be missing
_MIN_PRICE = 1e-3  # of a trial, as a part of a step's seconds


def ladder_of(num_speculative_tokens: int, num_rungs: int = len(_RUNGS) + 1) -> tuple[int, ...]:
    """Draft lengths that a step may have, increasing: 0, some between, K; at most `num_rungs`, which is at least 2."""
    between = [rung for rung in _RUNGS[1:] if rung <= _NEAR * num_speculative_tokens]
    # Of too many, the short ones are left out: K = 3 is where a cheap pass and a fair acceptance usually meet.
    return (0, *between[max(len(between) - num_rungs + 2, 0) :], num_speculative_tokens)


@dataclass(frozen=True)
class DraftRows:
    """Rows of a request in a draft pass."""

    num_speculative_tokens: int
    is_whole_block: bool = True  # False: an anchor and as many masks as are asked for
    has_whole_head: bool = True  # False: LM head for what is asked for

    def query_rows(self, length: int) -> int:
        """Through the layers."""
        return 1 + (self.num_speculative_tokens if self.is_whole_block else length)

    def head_rows(self, length: int) -> int:
        """Through the LM head."""
        return self.num_speculative_tokens if self.has_whole_head else length


@dataclass(frozen=True)
class StepLengthSettings:
    """How cautious the controller is."""

    trial_share: float = 0.005  # of time, spent on steps with another length than the best known
    first_trials: float = 2.0  # steps' worth of seconds that may be spent on trials at once
    unsettled_until: int = 8  # steps, each with a plan of its own
    switch_margin: float = 0.02  # expected gain over the present length before it is left; to 0 at any gain
    doubt: float = 1.0  # deviations by which a length that is not known well is taken to be better
    as_likely: float = 0.3  # logarithm of a rate by which trials are not told apart; the one made longest ago is next
    plan_every: int = 4  # steps for which a length is kept while the same requests are decoded,
    plan_at_most_every: int = 16  # twice as many each time that the next is no other
    tolerated_change: float = 0.125  # of the number of requests, for which a plan is kept all the same
    max_requests: int = 1024  # remembered at a time
    all_timed_until: int = 512  # steps whose times are all learnt from; then one in `timed_every`
    timed_every: int = 5


@dataclass(frozen=True)
class _Trial:
    """A length that may be better than the present one, and what a step with it is expected to lose."""

    length: int
    price: float  # seconds


class StepLengthController:
    """Decides the draft length of every step.

    Args:
        ladder: lengths to choose from, increasing; the first is 0, the last K.
        cost: seconds of steps; corrected by `observe`.
        recorded_rates: of the checkpoint, see AcceptanceEstimate.
        draft_rows: rows of a draft pass; default whole blocks and heads.
        settings: how cautious.

    Raises:
        ValueError: no ladder.
    """

    def __init__(
        self,
        ladder: Sequence[int],
        cost: CostModel,
        recorded_rates: Sequence[float] | None = None,
        draft_rows: DraftRows | None = None,
        settings: StepLengthSettings | None = None,
    ) -> None:
        if len(ladder) < 2 or ladder[0] != 0 or list(ladder) != sorted(set(ladder)):
            raise ValueError(f"a ladder begins with 0, increases and ends with K, but it is {list(ladder)}.")
        self.ladder, self.num_speculative_tokens = tuple(ladder), ladder[-1]
        self.cost, self.settings = cost, settings or StepLengthSettings()
        self.draft_rows = draft_rows or DraftRows(self.num_speculative_tokens)
        self.acceptance = AcceptanceEstimate(self.num_speculative_tokens, recorded_rates)
        self.counters = DraftCounters()
        self._confidences = self.acceptance.rates  # [K], in place of the drafter's probabilities
        self._memory = RequestMemory(self.num_speculative_tokens, self.settings.max_requests)
        self._step = 0
        self._length: int | None = None  # decided last, trials aside
        self._planned_for: tuple[str, ...] = ()
        self._planned_until = 0  # step
        self._plan_steps = self.settings.plan_every
        self._trial: _Trial | None = None
        self._times = RungTimes(len(self.ladder))
        self._used = dict.fromkeys(self.ladder, 0)  # step of the last use
        self._trial_steps = 0  # that are left of a trial
        self._saved_seconds: float | None = None  # for trials; None before a step was timed
        self._finished: list[str] = []  # requests that are to be forgotten
        self._outcomes: list[tuple[Sequence[str], np.ndarray, np.ndarray]] = []  # to be learnt from before a plan

    def choose(
        self,
        request_ids: Sequence[str],
        context_lens: np.ndarray,  # [R] tokens in each request's cache
        caps: np.ndarray,  # [R] most tokens that each verifies, whatever the length
    ) -> int:
        """Length of this step's drafts."""
        self._step += 1
        ids = tuple(request_ids)
        if not self._trial_steps and self._is_plan_due(ids):
            before = self._length
            self._length = self._plan_anew(ids, context_lens, np.clip(caps, 0, self.num_speculative_tokens))
            is_same = ids == self._planned_for and self._length == before
            longer = min(2 * self._plan_steps, self.settings.plan_at_most_every)
            self._plan_steps = longer if is_same else self.settings.plan_every
            if self.counters.steps < self.settings.unsettled_until:
                self._plan_steps = 1
            self._planned_for, self._planned_until = ids, self._step + self._plan_steps
        assert self._length is not None
        trial, length = self._trial, self._length
        if trial is not None and not self._trial_steps and self._can_pay(trial.price):
            self._trial_steps = _TRIAL_STEPS
        if trial is not None and self._trial_steps:
            self._trial_steps -= 1
            self._planned_until = self._step + 3  # what it tells arrives by then
            self.counters.steps_probing += length == 0
            length = trial.length
            if not self._trial_steps:
                self._trial = None
        self._used[length] = self._step
        return length

    def observe(
        self,
        request_ids: Sequence[str],  # [D] whose drafts the step verified
        verified: np.ndarray,  # [D] tokens
        accepted: np.ndarray,  # [D]
        step: TimedStep | None,  # None: its time is not known
    ) -> None:
        """Learn from a step."""
        if len(request_ids):
            self._outcomes.append((request_ids, verified, accepted))
            if len(self._outcomes) > self.settings.plan_at_most_every:
                self._learn()
        if step is None:
            return
        rung = self._rung(step.size)
        is_due = self._step <= self.settings.all_timed_until or self._step % self.settings.timed_every == 0
        predicted = self.cost.observe(step) if is_due else self.cost.seconds(step.size)
        if rung is not None and step.seconds > 0:
            residual = math.log(step.seconds / predicted)
            self._times.observe(rung, step.size.num_requests, residual, self.cost.noise, self._step)
        self.counters.add(step, predicted, int(verified.sum()), int(accepted.sum()))
        if self._saved_seconds is None:
            self._saved_seconds = self.settings.first_trials * step.seconds
        self._saved_seconds += self.settings.trial_share * step.seconds

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is remembered of finished requests, once their outcomes have been learnt from."""
        self._finished.extend(request_ids)
        if len(self._finished) > self.settings.max_requests:  # nothing is planned beside seeded requests
            self._learn()

    @property
    def num_remembered(self) -> int:
        """Requests in memory."""
        return len(self._memory)

    def _is_plan_due(self, ids: tuple[str, ...]) -> bool:
        """A plan costs a millisecond, and a busy server's batch changes in every step: there some steps share one."""
        if self._step >= self._planned_until:
            return True
        before, now = len(self._planned_for), len(ids)
        return ids != self._planned_for and abs(now - before) + 1 > before * self.settings.tolerated_change

    def _plan_anew(self, ids: tuple[str, ...], context_lens: np.ndarray, caps: np.ndarray) -> int:
        """The length with the most expected tokens per second; also looks for one to try."""
        self._learn()
        slots = self._memory.slots(ids, self._step)
        offsets = self._memory.aged_offsets(slots, self._step)
        survival = self.acceptance.survival(np.tile(self._confidences, (len(ids), 1)), offsets)
        survival *= np.arange(self.num_speculative_tokens) < caps[:, None]
        gained = np.concatenate([[0.0], np.cumsum(survival.sum(0))])[list(self.ladder)]
        present = self.ladder.index(self._length) if self._length is not None else 0
        sizes = [self._size(length, context_lens, caps) for length in self.ladder]
        seconds, deviations = self._times.correct(
            *self.cost.compare(sizes, present), present, len(ids), self.cost.noise, self._step
        )
        rates = (len(ids) + gained) / seconds
        best = int(np.argmax(rates))
        needed = rates[present] * (1 if best == 0 or self._length is None else 1 + self.settings.switch_margin)
        if rates[best] <= needed and best != present:
            best = present
        self._trial = self._next_trial(best, rates, seconds, deviations) if caps.any() else None
        return self.ladder[best]

    def _next_trial(self, best: int, rates: np.ndarray, seconds: np.ndarray, deviations: np.ndarray) -> _Trial:
        """What to try beside `best`, an index into the ladder."""
        hopes = np.log(rates / rates[best]) + self.settings.doubt * deviations
        hopes[best] = -np.inf
        likely = np.flatnonzero(hopes >= hopes.max() - self.settings.as_likely)
        tried = min(likely, key=lambda rung: self._used[self.ladder[rung]])
        lost = _TRIAL_STEPS * seconds[tried] * (1 - rates[tried] / rates[best])
        return _Trial(self.ladder[tried], max(float(lost), _MIN_PRICE * float(seconds[best])))

    def _can_pay(self, seconds: float) -> bool:
        """Takes so much off what was saved, if it is there."""
        if self._saved_seconds is None or self._saved_seconds < seconds:
            return False
        self._saved_seconds = min(self._saved_seconds, 3 * seconds) - seconds
        return True

    def _rung(self, size: StepSize) -> int | None:
        """Index of the length that all of a step's requests verified and drafted; None where they were not alike."""
        length = round(size.num_verified / size.num_requests)
        is_alike = abs(size.num_verified - length * size.num_requests) <= _ALIKE * size.num_verified
        is_decode = size.num_tokens == size.num_requests + size.num_verified
        if not (is_alike and is_decode and (size.num_drafting > 0) == (length > 0)):
            return None
        return self.ladder.index(length) if length in self.ladder else None

    def _size(self, length: int, context_lens: np.ndarray, caps: np.ndarray) -> StepSize:
        """A step whose requests verify, and draft, so many tokens."""
        num_requests, context = len(context_lens), int(context_lens.sum())
        verified = np.minimum(caps, length)
        num_tokens, num_drafting = num_requests + int(verified.sum()), num_requests if length else 0
        return StepSize(
            num_requests=num_requests,
            num_tokens=num_tokens,
            num_verified=num_tokens - num_requests,
            context_tokens=context,
            attended_tokens=int(context_lens @ (1 + verified)),
            num_drafting=num_drafting,
            query_rows=num_drafting * self.draft_rows.query_rows(length),
            head_rows=num_drafting * self.draft_rows.head_rows(length),
            draft_context_tokens=context if length else 0,
            context_rows=num_tokens,
        )

    def _learn(self) -> None:
        """Learn from the outcomes since the last plan, all at once."""
        if self._outcomes:
            self._learn_outcomes()
        self._memory.forget(self._finished)
        self._finished.clear()

    def _learn_outcomes(self) -> None:
        slots = self._memory.find([request for ids, _, _ in self._outcomes for request in ids])
        verified = np.concatenate([verified for _, verified, _ in self._outcomes])
        accepted = np.concatenate([accepted for _, _, accepted in self._outcomes])
        self._outcomes.clear()
        confidences = np.tile(self._confidences, (len(slots), 1))
        learnt = self._memory.learn_outcomes(self.acceptance, slots, confidences, verified, accepted)
        self._memory.mark_drafted(learnt, self._step)
