"""What the draft length controller is told about steps: outcomes of drafts, sizes, and times that can be known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vllm_dflash.draft_length import DraftDecision, ScheduledLengths, StepSize, read_trace
from vllm_dflash.draft_length.trace import TraceWriter
from vllm_dflash.length_control import LengthControl, StepBatch


class Recorded(ScheduledLengths):
    """Fixed lengths that keep what they observe."""

    def __init__(self, length: int) -> None:
        super().__init__([length])
        self.observed: list[tuple] = []
        self.forgotten: list[str] = []

    def observe(self, decision, verified, accepted, step):
        self.observed.append((decision and decision.request_ids, verified.tolist(), accepted.tolist(), step))

    def forget(self, request_ids):
        self.forgotten += request_ids


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def batch(ids: str, num_rows: list[int], num_rejected: list[int], context_lens: list[int], cap: int = 3) -> StepBatch:
    rows, rejected, lens, caps = (np.array(v) for v in (num_rows, num_rejected, context_lens, [cap] * len(ids)))
    return StepBatch(tuple(ids), rows, rejected, lens, True, caps, is_seeded=np.zeros(len(ids), dtype=bool))


def step(control: LengthControl, clock: Clock, seconds: float, this: StepBatch, alive: str | None = None) -> None:
    plan = control.plan(this)
    decision = control.choose(plan, np.full((len(plan.drafting), plan.num_positions), 0.5))
    clock.now += seconds
    control.finish(
        this, plan, decision, query_rows=4 * len(plan.drafting),
        context_rows=int((this.num_rows - this.num_rejected).sum()), context_seconds=0.01, draft_seconds=0.02,
        alive=set(this.request_ids if alive is None else alive),
    )  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lengths() -> Recorded:
    return Recorded(3)


@pytest.fixture
def control(lengths, clock) -> LengthControl:
    return LengthControl(lengths, learns=True, clock=clock)


def test_drafts_of_a_request_that_is_left_out_for_a_step_are_settled_when_it_comes_back(control, lengths, clock):
    """A full token budget leaves requests out; their drafts wait in the scheduler."""
    step(control, clock, 1.0, batch("ab", [7, 5], [0, 0], [7, 5]))
    step(control, clock, 0.5, batch("a", [4], [3], [8]), alive="ab")
    step(control, clock, 0.5, batch("ab", [4, 4], [3, 1], [9, 8]))
    assert [(ids, verified, accepted) for ids, verified, accepted, _ in lengths.observed] == [
        (("a",), [3], [0]),
        (("a", "b"), [3, 3], [0, 2]),
    ]


def test_outcomes_belong_to_the_drafts_of_the_step_before(control, lengths, clock):
    """a: three drafted, two accepted. b: comes with a prompt of five tokens, then all three accepted."""
    step(control, clock, 1.0, batch("a", [7], [0], [7]))
    step(control, clock, 0.5, batch("ab", [4, 5], [1, 0], [10, 5]))
    step(control, clock, 0.25, batch("ba", [4, 4], [0, 3], [9, 11]))
    assert [(ids, verified, accepted) for ids, verified, accepted, _ in lengths.observed] == [
        (("a",), [3], [2]),
        (("a", "b"), [3, 3], [0, 3]),
    ]
    first, second = (observed[3] for observed in lengths.observed)
    assert (first.seconds, first.context_seconds, first.draft_seconds) == (0.5, 0.01, 0.02)
    assert first.size == StepSize(
        num_requests=2,
        num_tokens=9,
        num_verified=3,
        context_tokens=15,
        attended_tokens=4 * 10 + 5 * 5,
        num_drafting=2,
        query_rows=8,
        head_rows=6,
        draft_context_tokens=15,
        context_rows=8,
    )
    assert second.seconds == 0.25


def test_time_in_which_the_engine_may_have_been_idle_is_no_step(control, lengths, clock):
    step(control, clock, 1.0, batch("a", [7], [0], [7]))
    step(control, clock, 60.0, batch("b", [5], [0], [5]), alive="b")
    assert lengths.observed == []
    assert lengths.forgotten == ["a"]
    step(control, clock, 0.5, batch("b", [1], [0], [6]))
    assert lengths.observed[0][3].seconds == 0.5


def test_a_request_that_was_preempted_verified_nothing(control, lengths, clock):
    step(control, clock, 1.0, batch("ab", [7, 5], [0, 0], [7, 5]))
    step(control, clock, 0.5, batch("a", [4], [0], [11]), alive="ab")  # b is waiting
    step(control, clock, 0.5, batch("ab", [4, 4], [0, 0], [15, 4]))  # b comes back, beginning with its first tokens
    assert [(verified, accepted) for _, verified, accepted, _ in lengths.observed] == [([3], [3]), ([3, 0], [3, 0])]
    assert lengths.forgotten == []


def test_drafts_cut_by_a_grammar_were_verified_as_far_as_they_came(control, lengths, clock):
    step(control, clock, 1.0, batch("a", [7], [0], [7]))
    step(control, clock, 0.5, batch("a", [2], [0], [9]))
    assert lengths.observed[0][1:3] == ([1], [1])


def test_every_rank_goes_by_the_first_one(lengths, clock):
    other = Recorded(2)
    values: list = []

    def first(value):
        values.append(value)
        return value

    leads = LengthControl(lengths, learns=True, agree=first, clock=clock)
    this = batch("a", [7], [0], [7])
    confidences = np.full((1, 3), 0.5)
    leads.choose(leads.plan(this), confidences)
    follows = LengthControl(other, learns=True, agree=lambda _: values.pop(0), clock=clock)
    plan = follows.plan(this)
    assert plan.num_positions == 3
    assert follows.choose(plan, confidences).lengths.tolist() == [3]


def test_steps_are_traced(lengths, clock, tmp_path):
    with TraceWriter(tmp_path / "trace.jsonl", 3) as trace:
        control = LengthControl(lengths, learns=True, trace=trace, clock=clock)
        step(control, clock, 1.0, batch("a", [7], [0], [7]))
        step(control, clock, 0.5, batch("a", [4], [1], [10]))
    (traced,) = read_trace(tmp_path / "trace.jsonl").steps
    assert traced.step == lengths.observed[0][3]
    (cycle,) = traced.cycles
    assert (cycle.id, cycle.p_max, cycle.verified, cycle.accepted) == ("a", (0.5, 0.5, 0.5), 3, 2)


def test_a_line_is_logged_now_and_then(lengths, clock):
    lines: list[str] = []
    control = LengthControl(lengths, learns=True, log=lines.append, clock=clock)
    for _ in range(70):
        step(control, clock, 1.0, batch("a", [1], [0], [7]))
    assert len(lines) == 1


def test_nothing_is_pending_after_a_step_without_drafts(control, lengths, clock):
    step(control, clock, 1.0, batch("a", [7], [0], [7], cap=0))
    step(control, clock, 0.5, batch("a", [1], [0], [8]))
    assert lengths.observed[0][:3] == (None, [], [])
    assert isinstance(control.choose(control.plan(batch("a", [1], [0], [9])), np.ones((1, 3))), DraftDecision)


class Resting(Recorded):
    """Plans nothing, for four steps at a time."""

    def __init__(self) -> None:
        super().__init__(0)
        self.planned = 0
        self.rests: list[tuple] = []

    def plan(self, *arguments):
        self.planned += 1
        return replace(super().plan(*arguments), rest_steps=3)

    def rested(self, step, count):
        self.rests.append((count, step))


def plain_steps(control: LengthControl, clock: Clock, first: int, count: int, ids: str = "a", **changed) -> None:
    """Requests of one length, each step a second longer than the one before."""
    for length in range(first, first + count):
        rows = [1] * len(ids)
        step(control, clock, float(length), replace(batch(ids, rows, [0] * len(ids), [length] * len(ids)), **changed))


@pytest.fixture
def resting(clock) -> LengthControl:
    control = LengthControl(Resting(), learns=True, clock=clock)
    step(control, clock, 1.0, batch("a", [7], [0], [7]))  # the prompt; its plan holds for no step with one row
    return control


@pytest.fixture(autouse=True)
def without_context_rows(monkeypatch, request):
    """Rows of plain steps wait, in tests of steps that are rested."""
    if "resting" in request.fixturenames:
        finish = LengthControl.finish
        monkeypatch.setattr(LengthControl, "finish", lambda *a, **k: finish(*a, **(k | {"context_rows": 0})))


def test_a_plan_without_drafts_holds_for_the_steps_that_are_like_it(resting, clock):
    lengths, before = resting.lengths, resting.lengths.planned
    plain_steps(resting, clock, 8, 3)
    assert (lengths.planned, lengths.rests) == (before, [])
    plain_steps(resting, clock, 11, 1)
    [(count, mean)] = lengths.rests
    assert (lengths.planned, count) == (before + 1, 3)
    assert (mean.seconds, mean.draft_seconds) == (9.0, 0.0)
    assert mean.context_seconds == pytest.approx(0.01)
    assert mean.size == StepSize(num_requests=1, num_tokens=1, context_tokens=10, attended_tokens=10)
    assert [observed[3].seconds for observed in lengths.observed] == [11.0]


@pytest.mark.parametrize("changed", ["requests", "caps", "rows"])
def test_another_step_ends_the_rest(resting, clock, changed):
    plain_steps(resting, clock, 8, 1)
    before = resting.lengths.planned
    if changed == "requests":
        plain_steps(resting, clock, 9, 1, "ab")
    elif changed == "caps":
        plain_steps(resting, clock, 9, 1, caps=np.array([2]))
    else:
        step(resting, clock, 9.0, batch("a", [5], [0], [13]))
    assert resting.lengths.planned == before + 1
    assert [count for count, _ in resting.lengths.rests] == [1]
    assert resting.lengths.observed[-1][3].seconds == 9.0


def test_time_behind_the_last_step_is_no_part_of_the_rest(resting, clock):
    plain_steps(resting, clock, 8, 2)
    clock.now += 1000.0
    step(resting, clock, 1.0, batch("b", [5], [0], [5]), alive="b")
    [(count, mean)] = resting.lengths.rests
    assert (count, mean.seconds) == (2, 8.5)
    assert resting.lengths.forgotten == ["a"]


def test_a_step_that_writes_rows_is_told_by_itself_and_the_plan_holds_on(resting, clock, monkeypatch):
    lengths, before = resting.lengths, resting.lengths.planned
    plain_steps(resting, clock, 8, 1)
    monkeypatch.undo()
    step(resting, clock, 5.0, batch("a", [1], [0], [9]))
    assert (lengths.planned, [count for count, _ in lengths.rests]) == (before, [1])
    assert lengths.observed[-1][3].seconds == 5.0
    assert lengths.observed[-1][3].size.context_rows == 1
    step(resting, clock, 1.0, batch("a", [1], [0], [10]))
    step(resting, clock, 1.0, batch("a", [1], [0], [11]))
    assert lengths.planned == before + 1  # three steps in all


def test_steps_that_are_rested_are_traced(resting, clock, tmp_path):
    resting.trace = TraceWriter(tmp_path / "trace.jsonl", 3)
    plain_steps(resting, clock, 8, 4)
    resting.trace.flush()
    assert [line.step.seconds for line in read_trace(tmp_path / "trace.jsonl").steps] == [8.0, 9.0, 10.0, 11.0]
