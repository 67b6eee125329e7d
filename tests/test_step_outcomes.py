"""What the controller of step lengths is told of vLLM's steps: outcomes, sizes, and times where they can be known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_dflash.draft_length import DraftCounters, DraftRows, ScheduledStepLengths, StepSize
from vllm_dflash.step_lengths import StepLengths

K = 3


class Recorded(ScheduledStepLengths):
    """Fixed lengths that keep what they are asked and told."""

    def __init__(self) -> None:
        super().__init__([K])
        self.asked: list[tuple] = []
        self.told: list[tuple] = []
        self.forgotten: list[str] = []

    def choose(self, request_ids, context_lens, caps):
        self.asked.append((list(request_ids), context_lens.tolist(), caps.tolist()))
        return super().choose(request_ids, context_lens, caps)

    def observe(self, request_ids, verified, accepted, step):
        self.told.append((list(request_ids), verified.tolist(), accepted.tolist(), step))

    def forget(self, request_ids):
        self.forgotten += request_ids


def request(
    name: str, context: int, seed: int | None = None, temperature: float = 0.0, **extra_args
) -> SimpleNamespace:
    parameters = SimpleNamespace(seed=seed, temperature=temperature, extra_args=extra_args or None)
    return SimpleNamespace(request_id=name, num_computed_tokens=context, sampling_params=parameters)


class Steps:
    """A scheduler with requests, and a clock that the test moves."""

    def __init__(self, *requests: SimpleNamespace, **arguments) -> None:
        self.now = 100.0
        self.scheduler = SimpleNamespace(running=list(requests), requests={r.request_id: r for r in requests})
        self.chooser = Recorded()
        self.lengths = StepLengths(
            self.scheduler, self.chooser, (0, 1, K), DraftRows(K), clock=lambda: self.now, **arguments
        )

    def finish(self, seconds: float, drafts: dict[str, int], sampled: dict[str, int], **changes) -> tuple:
        """A step whose requests verified so many drafts and were given so many tokens."""
        self.now += seconds
        scheduled = {name: 1 + drafts.get(name, 0) for name in sampled} | changes.pop("rows", {})
        output = {
            "num_scheduled_tokens": scheduled,
            "total_num_scheduled_tokens": sum(scheduled.values()),
            "scheduled_spec_decode_tokens": {name: [-1] * count for name, count in drafts.items()},
            "num_spec_tokens_to_schedule": K,
            "num_invalid_spec_tokens": None,
            "finished_req_ids": set(),
        } | changes
        tokens = [[7] * count for count in sampled.values()]
        result = SimpleNamespace(sampled_token_ids=tokens, req_id_to_index={name: i for i, name in enumerate(sampled)})
        self.lengths.finish(SimpleNamespace(**output), result)
        return self.chooser.told[-1] if self.chooser.told else ()


def test_outcomes_are_what_was_verified_and_accepted():
    steps = Steps(request("a", 10), request("b", 20), request("c", 30))
    assert steps.finish(1.0, {"a": 3, "b": 2}, {"a": 3, "b": 1, "c": 1})[:3] == (["a", "b"], [3, 2], [2, 0])


def test_drafts_that_a_grammar_refused_were_not_verified():
    steps = Steps(request("a", 10))
    assert steps.finish(1.0, {"a": 3}, {"a": 2}, num_invalid_spec_tokens={"a": 2})[:3] == (["a"], [1], [1])


def test_a_request_without_a_token_has_no_outcome():
    """It was aborted, or its prompt is not at an end."""
    steps = Steps(request("a", 10), request("b", 20))
    assert steps.finish(1.0, {"a": 3, "b": 3}, {"a": 4, "b": 0})[:3] == (["a"], [3], [3])


def test_sizes_count_what_costs():
    steps = Steps(request("a", 10), request("b", 20))
    steps.finish(1.0, {}, {"a": 1, "b": 1})
    step = steps.finish(0.25, {"a": 3}, {"a": 1, "b": 1})[3]
    assert step.seconds == pytest.approx(0.25)
    assert step.size == StepSize(
        num_requests=2, num_tokens=5, num_verified=3, context_tokens=30, attended_tokens=4 * 10 + 20, num_drafting=2,
        query_rows=2 * 4, head_rows=2 * 3, draft_context_tokens=30, context_rows=5,
    )  # fmt: skip


def test_a_step_behind_a_pause_is_not_timed():
    """Nothing of the step before it is there: the engine may have been idle."""
    steps = Steps(request("a", 10), request("b", 20))
    assert steps.finish(1.0, {}, {"a": 1})[3] is None
    assert steps.finish(9.0, {}, {"b": 1})[3] is None
    assert steps.finish(0.5, {}, {"b": 1})[3].seconds == pytest.approx(0.5)


def test_a_draft_pass_that_ends_behind_the_results_is_in_the_next_time():
    steps = Steps(request("a", 10), drafts_behind=True)
    steps.finish(1.0, {}, {"a": 1})
    first = steps.finish(1.0, {"a": 3}, {"a": 1}, num_spec_tokens_to_schedule=0)[3]
    second = steps.finish(1.0, {}, {"a": 1})[3]
    assert (first.size.num_drafting, second.size.num_drafting) == (1, 0)


def test_empty_steps_are_not_looked_at():
    steps = Steps(request("a", 10))
    assert steps.finish(1.0, {}, {}) == ()


def test_finished_requests_are_forgotten():
    steps = Steps(request("a", 10))
    steps.finish(1.0, {}, {"a": 1}, finished_req_ids={"old"})
    assert steps.chooser.forgotten == ["old"]


def test_a_choice_sees_contexts_and_bounds():
    steps = Steps(request("a", 10), request("b", 20, dflash_max_draft=1), request("c", 30, dflash=False))
    assert steps.lengths[3] == K
    assert steps.chooser.asked == [(["a", "b", "c"], [10, 20, 30], [3, 1, 0])]


@pytest.mark.parametrize(("seed", "temperature", "is_asked"), [(5, 0.7, False), (5, 0.0, True), (None, 0.7, True)])
def test_k_does_not_change_beside_a_seed(seed, temperature, is_asked):
    steps = Steps(request("a", 10), request("b", 20, seed=seed, temperature=temperature))
    assert steps.lengths[2] == K
    assert bool(steps.chooser.asked) is is_asked


def test_counters_and_a_line_come_now_and_then():
    lines: list[str] = []
    counts: list[DraftCounters] = []
    steps = Steps(request("a", 10), log=lines.append, count=counts.append)
    for _ in range(100):
        steps.finish(1.0, {}, {"a": 1})
    assert len(lines) == 1
    assert 90 <= len(counts) <= 101
    assert np.isclose(steps.now, 200.0)
