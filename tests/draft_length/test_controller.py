"""The controller in a closed loop with machines and drafters of known cost and acceptance. All times are made up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from vllm_dflash.draft_length import (
    CostModel,
    DraftDecision,
    DraftLengthController,
    DraftLengthSettings,
    ScheduledLengths,
    StepSize,
    TimedStep,
)

K = 7


def cpu(size: StepSize) -> tuple[float, float]:
    """Seconds of target and draft pass where every token costs."""
    target = 0.028 + 0.003 * size.num_tokens + 1e-6 * size.attended_tokens
    return target, (0.002 + 3e-4 * size.query_rows + 7e-4 * size.head_rows) * (size.num_drafting > 0)


def gpu(size: StepSize) -> tuple[float, float]:
    """Where the first 128 tokens are free."""
    return 0.005 + 4e-5 * max(size.num_tokens - 128, 0), 0.0008 * (size.num_drafting > 0)


def profile(machine) -> CostModel:
    steps = []
    for num_requests in (1, 4, 16, 64):
        for length in (0, 1, 3, 7):
            for context in (100, 5000):
                for num_drafting in {0, num_requests if length else 0}:
                    size = step_size(
                        np.full(num_requests, length), np.full(num_requests, context), num_drafting, length
                    )
                    steps.append(timed(machine, size))
    return CostModel.from_profile(steps)


def step_size(lengths: np.ndarray, contexts: np.ndarray, num_drafting: int, num_positions: int) -> StepSize:
    num_requests, num_tokens = len(lengths), len(lengths) + int(lengths.sum())
    return StepSize(
        num_requests, num_tokens, int(lengths.sum()), int(contexts.sum()), int(contexts @ (1 + lengths)),
        num_drafting, num_drafting * (K + 1), num_drafting * num_positions, int(contexts[:num_drafting].sum()),
        num_tokens,
    )  # fmt: skip


def timed(machine, size: StepSize) -> TimedStep:
    target, draft = machine(size)
    context = 1e-4 + 1e-6 * size.context_rows
    return TimedStep(size, target + draft + context, draft, context)


COSTS = {"cpu": profile(cpu).to_json(), "gpu": profile(gpu).to_json()}


@dataclass
class Server:
    """Requests that never end, a controller, and what came of it."""

    machine: Callable[[StepSize], tuple[float, float]]
    controller: DraftLengthController
    acceptance: dict[str, float]  # probability of every position, by request
    confidence: float = 0.7  # what the drafter says of hopeless positions; otherwise it says the truth
    contexts: dict[str, int] = field(default_factory=dict)
    seeded: frozenset[str] = frozenset()
    streams: dict[str, np.random.Generator] = field(default_factory=dict)
    lengths: list[dict[str, int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0

    def run(self, num_steps: int) -> Server:
        for _ in range(num_steps):
            self.step()
        return self

    def step(self) -> None:
        ids = list(self.acceptance)
        contexts = np.array([self.contexts.get(i, 100) for i in ids])
        is_seeded = np.array([i in self.seeded for i in ids])
        plan = self.controller.plan(ids, contexts, np.full(len(ids), K), is_seeded)
        truth = np.array(list(self.acceptance.values()))
        said = np.where(truth < 0.1, self.confidence, truth.clip(0, 0.99))[plan.drafting]
        draws = np.array([self.stream(i).random(K) for i in ids])
        decision = self.controller.choose(plan, np.tile(said[:, None], plan.num_positions))
        verified = decision.lengths
        runs = (draws < truth[:, None]).cumprod(1).sum(1)[plan.drafting]
        accepted = np.minimum(runs, verified)
        lengths = np.zeros(len(ids), dtype=np.int64)
        lengths[plan.drafting] = verified
        step = timed(self.machine, step_size(lengths, contexts, len(plan.drafting), plan.num_positions))
        self.controller.observe(decision, verified, accepted, step)
        self.lengths.append(dict(zip(ids, lengths.tolist())))
        self.positions.append(plan.num_positions)
        self.tokens += len(ids) + accepted.sum()
        self.seconds += step.seconds

    def stream(self, request: str) -> np.random.Generator:
        """Random numbers of a request, which do not depend on its neighbours."""
        if request not in self.streams:
            self.streams[request] = np.random.default_rng(list(request.encode()))
        return self.streams[request]

    def over_plain(self) -> float:
        n = len(self.acceptance)
        contexts = np.array([self.contexts.get(i, 100) for i in self.acceptance])
        plain = timed(self.machine, step_size(np.zeros(n, dtype=np.int64), contexts, 0, 0)).seconds
        return self.tokens / self.seconds / (n / plain)

    def mean_length(self, request: str, last: int = 100) -> float:
        return float(np.mean([lengths[request] for lengths in self.lengths[-last:]]))


def server(machine_name: str, acceptance: dict[str, float], **arguments) -> Server:
    settings = arguments.pop("settings", None)
    controller = DraftLengthController(K, CostModel.from_json(COSTS[machine_name]), settings=settings)
    return Server({"cpu": cpu, "gpu": gpu}[machine_name], controller, acceptance, **arguments)


def many(count: int, probability: float) -> dict[str, float]:
    return {f"r{i}": probability for i in range(count)}


@pytest.mark.parametrize(("machine", "concurrency"), [("cpu", 1), ("cpu", 8), ("gpu", 1), ("gpu", 16)])
def test_hopeless_drafter_costs_next_to_nothing(machine, concurrency):
    served = server(machine, many(concurrency, 0.0)).run(400)
    counters = served.controller.counters
    assert served.over_plain() > 0.97
    assert counters.steps_probing > 0
    assert counters.steps_off > 0.9 * counters.steps


@pytest.mark.parametrize(("machine", "least"), [("cpu", 1.8), ("gpu", 6.5)])
def test_perfect_drafter_is_used_to_the_full(machine, least):
    served = server(machine, {"a": 1.0}).run(150)
    assert served.mean_length("a") > 0.95 * K
    assert served.over_plain() > least


@pytest.mark.parametrize("probability", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_no_fixed_length_is_better_on_a_cpu(probability, concurrency):
    served = server("cpu", many(concurrency, probability)).run(300)
    zeros, contexts = np.zeros(concurrency, dtype=np.int64), np.full(concurrency, 100)
    rates = [concurrency / timed(cpu, step_size(zeros, contexts, 0, 0)).seconds]
    for length in range(1, K + 1):
        tokens = concurrency * (1 + sum(probability**j for j in range(1, length + 1)))
        rates.append(tokens / timed(cpu, step_size(zeros + length, contexts, concurrency, length)).seconds)
    assert served.over_plain() > 0.93 * max(rates) / rates[0]
    assert served.over_plain() > 0.97


def test_predictable_request_gets_longer_drafts_than_a_chaotic_neighbour():
    served = server("cpu", {"proof": 0.95, "chat": 0.3}).run(200)
    assert served.mean_length("proof") > served.mean_length("chat") + 2


@pytest.mark.case("F4")
def test_load_switches_it_off_and_on_again():
    served = server("cpu", many(1, 0.7)).run(100)
    assert served.mean_length("r0", 50) > 1
    served.acceptance = many(32, 0.7)
    served.run(100)
    assert served.mean_length("r0", 50) < 0.2
    served.acceptance = many(1, 0.7)
    served.run(20)
    assert served.mean_length("r0", 10) > 1


def test_acceptance_that_comes_back_is_noticed():
    served = server("gpu", many(4, 0.0)).run(300)
    assert served.mean_length("r0", 50) < 0.5
    served.acceptance = many(4, 0.9)
    served.run(400)
    assert served.mean_length("r0", 50) > 4


@pytest.mark.case("F5")
def test_drafts_narrow_as_context_grows_and_return_for_a_short_request():
    served = server("cpu", {"long": 0.7})
    by_context = []
    for context in (100, 2000, 10_000, 60_000):
        served.contexts = {"long": context}
        served.run(80)
        by_context.append(served.mean_length("long", 40))
    assert sorted(by_context, reverse=True) == by_context
    assert by_context[0] > 2
    assert by_context[-1] < 1
    served.acceptance = {"short": 0.7}
    served.run(60)
    assert served.mean_length("short", 30) > 2


def test_seeded_request_has_the_same_lengths_beside_any_neighbours():
    def lengths_of(machine: str, neighbours: dict[str, float]) -> list[int]:
        served = server(machine, {"s": 0.6} | neighbours, seeded=frozenset("s")).run(80)
        return [lengths["s"] for lengths in served.lengths]

    alone = lengths_of("gpu", {})
    assert len(set(alone)) > 3
    assert lengths_of("cpu", many(20, 0.1)) == alone
    assert lengths_of("gpu", many(3, 0.95)) == alone


def test_neighbours_of_a_seeded_request_keep_their_own_lengths():
    served = server("cpu", {"s": 0.5, "good": 0.95, "bad": 0.02}, seeded=frozenset("s")).run(150)
    assert served.mean_length("good") > 3
    assert served.mean_length("bad") < 1


def test_caps_are_kept():
    controller = DraftLengthController(K, CostModel.from_json(COSTS["gpu"]))
    plan = controller.plan(["a", "b", "c"], np.full(3, 100), np.array([0, 2, 99]))
    assert plan.drafting.tolist() == [1, 2]
    decision = controller.choose(plan, np.full((2, plan.num_positions), 0.99))
    assert decision.lengths.tolist() == [2, K]
    nobody = controller.plan(["a"], np.full(1, 100), np.zeros(1, dtype=np.int64))
    assert len(nobody.drafting) == nobody.num_positions == 0
    assert len(controller.choose(nobody, np.empty((0, 0))).lengths) == 0


def test_head_rows_that_cannot_pay_are_left_out_but_looked_at_now_and_then():
    served = server("cpu", many(2, 0.6)).run(200)
    positions = np.array(served.positions[100:])
    drafting = positions[positions > 0]
    assert np.median(drafting) < K
    assert drafting.max() == K


def test_plain_steps_are_timed_where_speculation_gains_little():
    served = server("cpu", many(1, 0.42)).run(300)
    gaps = [sum(lengths.values()) for lengths in served.lengths[-200:]]
    assert served.controller.counters.steps_off < 0.05 * 300
    assert gaps.count(0) > 0


def test_outcomes_may_come_late_and_of_requests_that_are_gone():
    controller = DraftLengthController(K, CostModel.from_json(COSTS["gpu"]))
    waiting: list[DraftDecision] = []
    for step in range(60):
        ids = [f"r{step // 10}", "stays"]
        plan = controller.plan(ids, np.full(2, 100), np.full(2, K))
        waiting.append(controller.choose(plan, np.full((len(plan.drafting), plan.num_positions), 0.6)))
        late = waiting.pop(0) if len(waiting) > 3 else None
        verified = late.lengths if late else np.zeros(0, dtype=np.int64)
        controller.observe(
            late, verified, verified // 2, timed(gpu, step_size(np.zeros(2, int), np.full(2, 100), 0, 0))
        )
        if step % 10 == 9:
            controller.forget([ids[0]])
    assert controller.num_remembered == 1
    assert controller.counters.verified > 50


def test_memory_is_bounded_without_being_told_of_finished_requests():
    controller = DraftLengthController(
        K, CostModel.from_json(COSTS["gpu"]), settings=DraftLengthSettings(max_requests=16)
    )
    for step in range(50):
        ids = [f"{step}-{i}" for i in range(4)]
        plan = controller.plan(ids, np.full(4, 100), np.full(4, K))
        controller.choose(plan, np.full((len(plan.drafting), plan.num_positions), 0.6))
    assert controller.num_remembered == 16


def test_counters():
    controller = DraftLengthController(K, CostModel.from_json(COSTS["gpu"]))
    assert controller.counters.acceptance_length == controller.counters.predicted_over_measured == 1
    contexts = np.full(2, 100)
    plan = controller.plan(["a", "b"], contexts, np.full(2, K))
    decision = controller.choose(plan, np.full((2, plan.num_positions), 0.9))
    step = timed(gpu, step_size(np.array([3, 1]), contexts, 2, plan.num_positions))
    controller.observe(decision, np.array([3, 1]), np.array([2, 0]), step)
    controller.observe(
        None, np.zeros(0, int), np.zeros(0, int), timed(gpu, step_size(np.zeros(2, int), contexts, 0, 0))
    )
    counters = controller.counters
    assert (counters.steps, counters.steps_off, counters.verified, counters.accepted) == (2, 1, 4, 2)
    assert counters.drafted == 2 * plan.num_positions
    assert counters.acceptance_length == 1.5  # 6 tokens of 2 requests in 2 steps
    assert counters.seconds_off == pytest.approx(0.0051, rel=0.01)
    assert counters.predicted_over_measured == pytest.approx(1, abs=0.05)
    assert "1.50 tokens per step and request" in counters.line()


def test_same_input_same_lengths():
    first, second = (server("cpu", many(3, 0.6)).run(60).lengths for _ in range(2))
    assert first == second


def test_confidences_of_another_shape_are_refused():
    controller = DraftLengthController(K, CostModel.from_json(COSTS["gpu"]))
    plan = controller.plan(["a"], np.full(1, 100), np.full(1, K))
    with pytest.raises(ValueError, match=rf"shape \(1, {plan.num_positions}\), but they have \(1, 1\)"):
        controller.choose(plan, np.full((1, 1), 0.5))


def test_schedule_is_followed_up_to_the_caps():
    lengths = ScheduledLengths([7, 0, 3])
    seen = []
    for _ in range(6):
        plan = lengths.plan(["a", "b"], np.full(2, 100), np.array([7, 2]))
        decision = lengths.choose(plan, np.full((len(plan.drafting), plan.num_positions), 0.5))
        seen.append((plan.num_positions, decision.lengths.tolist()))
    assert seen == [(7, [7, 2]), (0, []), (3, [3, 2])] * 2
    with pytest.raises(ValueError, match="at least one length, none negative"):
        ScheduledLengths([])


def test_package_imports_neither_vllm_nor_torch_and_reads_no_clock():
    program = (
        "import sys, time\n"
        "def refuse(*_): raise AssertionError('clock')\n"
        "import numpy as np\n"
        "from vllm_dflash.draft_length import *\n"
        "assert not {'torch', 'vllm'} & set(sys.modules), 'heavy import'\n"
        "for name in ('time', 'perf_counter', 'monotonic', 'perf_counter_ns'): setattr(time, name, refuse)\n"
        "c = DraftLengthController(3, CostModel.unprofiled())\n"
        "p = c.plan(['a'], np.ones(1), np.full(1, 3))\n"
        "d = c.choose(p, np.full((len(p.drafting), p.num_positions), 0.9))\n"
        "c.observe(d, d.lengths, d.lengths, TimedStep(StepSize(1, 1), 0.01))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_off_is_decided_for_several_steps_at_a_time_and_probed_all_the_same():
    served = server("cpu", many(4, 0.0)).run(300)
    controller, ids, contexts, caps = served.controller, list(served.acceptance), np.full(4, 100), np.full(4, K)
    plain = timed(cpu, step_size(np.zeros(4, dtype=np.int64), contexts, 0, 0))
    decided, probes, rested = 0, controller.counters.steps_probing, 0
    before = controller.counters.steps
    while rested < 3000:
        plan = controller.plan(ids, contexts, caps)
        decision = controller.choose(plan, np.full((len(plan.drafting), plan.num_positions), 0.7))
        nothing = np.zeros(len(plan.drafting), dtype=np.int64)
        assert plan.rest_steps == 0 or len(plan.drafting) == 0
        controller.observe(decision, nothing, nothing, plain)
        if plan.rest_steps:
            controller.rested(plain, plan.rest_steps)
        decided, rested = decided + 1, rested + plan.rest_steps
    assert controller.counters.steps == before + decided + rested
    assert decided < rested / 5
    # Half a percent of the time; a probe is about as dear as a plain step's half.
    assert 10 < controller.counters.steps_probing - probes < 80


def test_seeded_requests_are_planned_for_in_every_step():
    """Their lengths count steps of their own."""
    controller = server("cpu", {}).controller
    ids, contexts = ["a", "b"], np.full(2, 100)
    for is_seeded, rests in ((np.array([False, False]), True), (np.array([False, True]), False)):
        plan = controller.plan(ids, contexts, np.zeros(2, dtype=np.int64), is_seeded)
        assert (plan.rest_steps > 0) == rests
