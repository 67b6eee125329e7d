"""One draft length per step, in a closed loop with machines and drafters of known cost and acceptance.

All times are made up. Nothing is profiled: what steps cost is learnt from their noisy times, as in an engine core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from vllm_dflash.draft_length import CostModel, StepLengthController, StepSize, TimedStep, ladder_of
from vllm_dflash.draft_length.per_step import DraftRows

K = 7


def cpu(size: StepSize) -> float:
    """Seconds where every token costs."""
    draft = (0.002 + 3e-4 * size.query_rows + 7e-4 * size.head_rows) * (size.num_drafting > 0)
    return 0.028 + 0.003 * size.num_tokens + 1e-6 * size.attended_tokens + draft


def gpu(size: StepSize) -> float:
    """Where the first 128 tokens are free, and attention over long contexts is not."""
    draft = (0.0006 + 1e-6 * max(size.query_rows - 128, 0)) * (size.num_drafting > 0)
    return 0.005 + 4e-5 * max(size.num_tokens - 128, 0) + 4e-8 * size.context_tokens + draft


MACHINES: dict[str, Callable[[StepSize], float]] = {"cpu": cpu, "gpu": gpu}


@dataclass
class Server:
    """Requests that never end, a controller, and what came of it.

    `lag` steps pass before the controller hears of a step: 0 where the scheduler waits, 1 where it does not.
    """

    machine: str
    acceptance: dict[str, float]  # probability of every position, by request
    lag: int = 1
    context: int = 500
    recorded: tuple[float, ...] | None = None
    noise: float = 0.05
    num_tokens: int = K
    lengths: list[int] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0
    last: int = 0  # length that the next step verifies

    def __post_init__(self) -> None:
        cost = CostModel.unprofiled(is_flat=self.machine != "cpu")
        self.controller = StepLengthController(ladder_of(self.num_tokens), cost, self.recorded)
        self.rng = np.random.default_rng(0)
        self.waiting: deque[tuple] = deque()

    def run(self, num_steps: int) -> Server:
        for _ in range(num_steps):
            self.step()
        return self

    def step(self) -> None:
        ids, n = list(self.acceptance), len(self.acceptance)
        contexts = np.full(n, self.context)
        length = self.controller.choose(ids, contexts, np.full(n, self.num_tokens))
        verified = np.full(n, self.last)
        truth = np.array(list(self.acceptance.values()))
        runs = (self.rng.random((n, self.num_tokens)) < truth[:, None]).cumprod(1).sum(1)
        accepted = np.minimum(runs, verified)
        size = self.size(self.last, length)
        seconds = MACHINES[self.machine](size)
        noisy = seconds * np.exp(self.rng.normal(0, self.noise)) * (4 if self.rng.random() < 0.005 else 1)
        self.waiting.append((ids if self.last else [], verified[: n * (self.last > 0)], accepted[: n * (self.last > 0)],
                             TimedStep(size, noisy)))  # fmt: skip
        while len(self.waiting) > self.lag:
            self.controller.observe(*self.waiting.popleft())
        self.lengths.append(length)
        self.tokens += n + accepted.sum()
        self.seconds += seconds
        self.last = length

    def size(self, verified: int, drafted: int) -> StepSize:
        n, rows = len(self.acceptance), DraftRows(self.num_tokens)
        drafting = n if drafted else 0
        return StepSize(
            n, n * (1 + verified), n * verified, n * self.context, n * self.context * (1 + verified), drafting,
            drafting * rows.query_rows(drafted), drafting * rows.head_rows(drafted), drafting * self.context,
            n * (1 + verified),
        )  # fmt: skip

    def rate(self, length: int) -> float:
        """True expected tokens per second of a fixed length."""
        truth = np.array(list(self.acceptance.values()))
        gained = (truth[:, None] ** np.arange(1, length + 1)).sum()
        return (len(truth) + gained) / MACHINES[self.machine](self.size(length, length))

    def over(self, length: int) -> float:
        return self.tokens / self.seconds / self.rate(length)

    def best_over(self) -> tuple[int, float]:
        best = max(self.controller.ladder, key=self.rate)
        return best, self.over(best)


def many(count: int, probability: float) -> dict[str, float]:
    return {f"r{i}": probability for i in range(count)}


STEPS = 1200


@pytest.mark.parametrize(
    ("num_tokens", "num_rungs", "ladder"),
    [
        (15, 6, (0, 1, 3, 7, 15)),
        (7, 6, (0, 1, 3, 7)),
        (10, 6, (0, 1, 3, 7, 10)),
        (16, 6, (0, 1, 3, 7, 16)),
        (4, 6, (0, 1, 3, 4)),
        (2, 6, (0, 1, 2)),
        (1, 6, (0, 1)),
        (15, 3, (0, 7, 15)),
        (7, 2, (0, 7)),
    ],
)
def test_ladder_ends_at_k(num_tokens, num_rungs, ladder):
    assert ladder_of(num_tokens, num_rungs) == ladder


@pytest.mark.parametrize("ladder", [(0,), (1, 3), (0, 3, 3), (0, 3, 1)])
def test_what_is_no_ladder_is_refused(ladder):
    with pytest.raises(ValueError, match="a ladder begins with 0"):
        StepLengthController(ladder, CostModel.unprofiled())


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("machine", "concurrency"), [("cpu", 1), ("cpu", 16), ("gpu", 1), ("gpu", 256)])
def test_hopeless_drafter_is_switched_off(machine, concurrency, lag):
    served = Server(machine, many(concurrency, 0.0), lag).run(STEPS)
    assert served.over(0) > 0.97
    assert served.lengths.count(0) > 0.9 * STEPS
    assert any(served.lengths[200:]), "it is tried again"


@pytest.mark.parametrize("probability", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(("machine", "concurrency"), [("cpu", 4), ("cpu", 64), ("gpu", 16), ("gpu", 256)])
def test_never_slower_than_plain(machine, concurrency, probability):
    assert Server(machine, many(concurrency, probability)).run(STEPS).over(0) > 0.97


@pytest.mark.parametrize(
    ("machine", "concurrency", "probability"),
    [("cpu", 1, 0.6), ("cpu", 1, 0.95), ("cpu", 4, 0.8), ("gpu", 4, 0.8), ("gpu", 64, 0.6), ("gpu", 64, 0.95)],
)
def test_the_rung_that_pays_most_is_found(machine, concurrency, probability):
    """Of rungs 1, 3 and 7, each is best somewhere here."""
    served = Server(machine, many(concurrency, probability)).run(STEPS)
    best, over = served.best_over()
    assert over > 0.95
    assert served.lengths[-300:].count(best) > 200


def test_perfect_drafter_is_used_to_the_full():
    served = Server("gpu", many(1, 1.0)).run(400)
    assert served.lengths.count(K) > 380
    assert served.over(K) > 0.95


def test_load_switches_it_off_and_its_end_on_again():
    """A drafter that pays for one request and not for many, on a machine where every token costs."""
    served = Server("cpu", many(1, 0.7)).run(300)
    assert served.lengths[-100:].count(3) > 80
    served.acceptance = many(32, 0.7)
    served.tokens = served.seconds = 0.0
    served.run(500)
    assert served.lengths[-100:].count(0) > 90
    assert served.over(0) > 0.95
    served.acceptance = {"another": 0.7}
    served.run(300)
    assert served.lengths[-100:].count(3) > 80


def test_text_that_becomes_predictable_is_noticed():
    served = Server("gpu", many(4, 0.0)).run(400)
    assert served.lengths[-50:].count(0) > 40
    served.acceptance = dict.fromkeys(served.acceptance, 0.9)
    served.run(600)
    assert served.lengths[-100:].count(K) > 80


def test_recorded_rates_choose_the_first_length():
    """Before anything is timed: one request, a GPU."""
    good = Server("gpu", many(1, 0.5), recorded=(0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)).run(1)
    poor = Server("gpu", many(1, 0.5), recorded=(0.05, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0)).run(1)
    assert good.lengths == [K]
    assert poor.lengths == [0]


def test_a_length_with_a_price_of_its_own_is_left():
    """Steps of seven tokens lack a CUDA graph, say, which no count of tokens explains: rung_times.py."""
    MACHINES["odd"] = lambda size: gpu(size) * (1.8 if size.num_verified == 4 * K else 1.0)
    try:
        served = Server("odd", many(4, 0.8)).run(STEPS)
    finally:
        del MACHINES["odd"]
    assert served.lengths[-300:].count(3) > 200


def test_requests_that_verify_nothing_are_not_drafted_for():
    controller = StepLengthController(ladder_of(K), CostModel.unprofiled(is_flat=True))
    assert controller.choose(["a", "b"], np.full(2, 10), np.zeros(2, dtype=np.int64)) == 0


def test_what_was_learnt_of_finished_requests_is_forgotten():
    served = Server("gpu", many(3, 0.5)).run(30)
    assert served.controller.num_remembered == 3
    served.controller.forget(["r0", "r1", "r2", "unknown"])
    served.acceptance = {"another": 0.5}
    served.run(1)
    assert served.controller.num_remembered == 1


def test_a_busy_servers_plans_are_shared_by_some_steps():
    """Requests come and go in every step, but the batch is much the same."""
    served = Server("gpu", many(64, 0.5)).run(40)
    plans = 0
    plan = served.controller._plan_anew

    def count(*arguments):
        nonlocal plans
        plans += 1
        return plan(*arguments)

    served.controller._plan_anew = count  # type: ignore[method-assign]
    for step in range(40):
        names = list(served.acceptance)
        served.acceptance = dict.fromkeys([*names[1:], f"new{step}"], 0.5)
        served.run(1)
    assert 10 <= plans <= 15


def test_lengths_follow_outcomes_and_times_alone():
    """The same history gives the same lengths: nothing in it looks at tokens, and nothing is drawn."""
    assert Server("gpu", many(16, 0.4)).run(300).lengths == Server("gpu", many(16, 0.4)).run(300).lengths
