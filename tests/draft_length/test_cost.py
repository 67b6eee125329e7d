"""The cost model fits machines of both kinds, follows drift, and is not spoilt by pauses."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from vllm_dflash.draft_length import CostModel, StepSize, TimedStep
from vllm_dflash.draft_length.nonnegative import nonnegative_least_squares
from vllm_dflash.draft_length.terms import NAMES, ROW_KNOTS, TOKEN_KNOTS, ramp_table, ramps

BLOCK = 8
TOKENS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512]


def cpu(size: StepSize) -> tuple[float, float, float]:
    """Target, draft and context seconds of a machine whose time is nearly linear in tokens."""
    target = 0.026 + 0.004 * size.num_tokens + 2e-7 * size.context_tokens + 1e-7 * size.attended_tokens
    draft = (0.002 + 4e-4 * size.query_rows + 1e-3 * size.head_rows) * (size.num_drafting > 0)
    return target, draft, 3e-4 + 1e-4 * size.context_rows


def gpu(size: StepSize) -> tuple[float, float, float]:
    """Of a machine whose time is flat until its arithmetic is full."""
    target = 0.005 + 3e-5 * max(size.num_tokens - 128, 0) + 2e-8 * size.context_tokens
    draft = (0.001 + 5e-6 * max(size.query_rows - 128, 0) + 1e-6 * size.head_rows) * (size.num_drafting > 0)
    return target, draft, 1e-4 + 1e-7 * size.context_rows


def size_of(num_tokens: int, num_requests: int = 1, context: int = 200, num_drafting: int = 0) -> StepSize:
    return StepSize(
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_verified=num_tokens - num_requests,
        context_tokens=num_requests * context,
        attended_tokens=num_tokens * context,
        num_drafting=num_drafting,
        query_rows=num_drafting * BLOCK,
        head_rows=num_drafting * (BLOCK - 1),
        draft_context_tokens=num_drafting * context,
        context_rows=num_tokens,
    )


def timed(machine, size: StepSize, factor: float = 1.0, has_parts: bool = True) -> TimedStep:
    target, draft, context = (factor * seconds for seconds in machine(size))
    parts = (draft, context) if has_parts else (None, None)
    return TimedStep(size, target + draft + context, *parts)


def profile(machine, noise: float = 0.0, has_parts: bool = True) -> list[TimedStep]:
    rng = np.random.default_rng(0)
    sizes = [size_of(n, context=context) for n in TOKENS for context in (200, 8000)]
    sizes += [size_of(n, n) for n in TOKENS[:12]]
    sizes += [size_of(d, d, num_drafting=d) for d in (1, 2, 4, 8, 16, 32, 64)]
    return [timed(machine, size, np.exp(rng.normal(0, noise)), has_parts) for size in sizes]


@functools.cache
def _fitted() -> str:
    return CostModel.from_profile(profile(cpu)).to_json()


def profiled() -> CostModel:
    """A new model of the CPU, fitted once."""
    return CostModel.from_json(_fitted())


def error(model: CostModel, machine, size: StepSize, factor: float = 1.0) -> float:
    return abs(model.seconds(size) / (factor * sum(machine(size))) - 1)


@pytest.mark.parametrize("machine", [cpu, gpu])
@pytest.mark.parametrize("has_parts", [True, False])
def test_profile_fits_between_and_beyond_what_it_saw(machine, has_parts):
    model = CostModel.from_profile(profile(machine, has_parts=has_parts))
    for size in [
        size_of(5), size_of(20, 5), size_of(100, 10), size_of(200, 4, 1000), size_of(40, 10, num_drafting=10),
        size_of(24, 6, 3000, num_drafting=3),
    ]:  # fmt: skip
        assert error(model, machine, size) < 0.06, size
    # Half as many tokens again as the profile's largest step.
    assert error(model, machine, size_of(768, 8)) < 0.1


def test_prices_are_positive_and_time_does_not_fall_with_tokens():
    model = CostModel.from_profile(profile(gpu, noise=0.1))
    assert min(model.price(name) for name in NAMES) > 0
    assert (np.diff(model.token_seconds(np.arange(1000))) >= 0).all()


def test_flat_part_is_flat_and_rising_part_rises():
    seconds = CostModel.from_profile(profile(gpu)).token_seconds(np.array([1, 64, 256, 512]))
    assert seconds[1] - seconds[0] < 0.1 * 0.005
    assert seconds[3] - seconds[2] == pytest.approx(256 * 3e-5, rel=0.1)


@pytest.mark.parametrize("has_parts", [True, False])
def test_machine_that_becomes_twice_as_slow_is_followed_within_50_steps(has_parts):
    rng = np.random.default_rng(0)
    model = profiled()
    for _ in range(300):
        model.observe(timed(cpu, size_of(4, num_drafting=1), np.exp(rng.normal(0, 0.03)), has_parts))
    for _ in range(50):
        model.observe(timed(cpu, size_of(4, num_drafting=1), 2 * np.exp(rng.normal(0, 0.03)), has_parts))
    assert error(model, cpu, size_of(4, num_drafting=1), 2) < 0.08
    # Prices that no step has shown since move along: the machine is slower, not this kind of step.
    assert error(model, cpu, size_of(64, 8), 2) < 0.3


def test_pauses_do_not_spoil_it():
    rng = np.random.default_rng(0)
    model, worst = profiled(), 0.0
    for i in range(400):
        pause = 10.0 if rng.random() < 0.05 else 1.0
        model.observe(timed(cpu, size_of(4, num_drafting=1), pause * np.exp(rng.normal(0, 0.03))))
        if i > 50:
            worst = max(worst, error(model, cpu, size_of(4, num_drafting=1)), error(model, cpu, size_of(1)))
    assert worst < 0.25  # right behind a pause; the scale matters to no decision
    assert error(model, cpu, size_of(4, num_drafting=1)) < 0.06


def test_one_pause_moves_prices_by_no_more_than_a_late_step():
    def after(factor: float) -> float:
        model = profiled()
        for _ in range(100):
            model.observe(timed(cpu, size_of(4)))
        model.observe(timed(cpu, size_of(4), factor))
        return model.seconds(size_of(4))

    assert after(1000.0) == after(10.0)
    assert after(10.0) < 1.15 * after(1.0)


def test_overhead_that_the_profile_lacked_is_not_taken_for_dear_tokens():
    model = profiled()

    def served(size: StepSize) -> TimedStep:
        target, draft, context = cpu(size)
        return TimedStep(size, target + 0.015 + draft + context, draft, context)

    for i in range(200):
        model.observe(served(size_of(1 + i % 4)))
    assert model.seconds(size_of(1)) == pytest.approx(served(size_of(1)).seconds, rel=0.04)
    gained = model.seconds(size_of(5)) - model.seconds(size_of(1))
    assert gained == pytest.approx(0.0164, rel=0.3)


def test_guess_takes_its_scale_from_the_first_steps():
    model = CostModel.unprofiled(0.02)
    for _ in range(10):
        model.observe(timed(cpu, size_of(1), 10.0))
    assert error(model, cpu, size_of(1), 10.0) < 0.1


def test_context_is_learnt_while_it_grows():
    model = CostModel.from_profile([timed(cpu, size_of(n, context=0)) for n in TOKENS]
                                   + [timed(cpu, size_of(1, context=0, num_drafting=1))])  # fmt: skip
    for context in range(0, 200_000, 500):
        model.observe(timed(cpu, size_of(1, context=context)))
    assert error(model, cpu, size_of(1, context=200_000)) < 0.05
    assert error(model, cpu, size_of(1, context=100)) < 0.1


def test_times_that_are_not_positive_are_ignored():
    model = profiled()
    before = model.seconds(size_of(4, num_drafting=1))
    model.observe(TimedStep(size_of(4, num_drafting=1), 0.0))
    model.observe(TimedStep(size_of(4, num_drafting=1), float("nan")))
    assert model.seconds(size_of(4, num_drafting=1)) == before


def test_observe_returns_what_was_predicted():
    model = profiled()
    before = model.seconds(size_of(4))
    assert model.observe(timed(cpu, size_of(4), 3.0)) == before
    assert model.seconds(size_of(4)) > before


def test_json_round_trip():
    model = CostModel.from_profile(profile(cpu, noise=0.05))
    model.observe(timed(cpu, size_of(4), 1.3))
    again = CostModel.from_json(model.to_json())
    assert again.seconds(size_of(20, 4, num_drafting=4)) == model.seconds(size_of(20, 4, num_drafting=4))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 0, "prices": {}}', '{"format": 1, "prices": {"step": 1}, "guessed": []}']
)
def test_a_file_that_is_no_cost_model_is_refused(text):
    with pytest.raises(ValueError, match="profile anew"):
        CostModel.from_json(text)


def test_profile_without_draft_pass_or_with_bad_times_is_refused():
    with pytest.raises(ValueError, match="with and without a draft pass; of these 1 0 have one"):
        CostModel.from_profile([timed(cpu, size_of(1))])
    with pytest.raises(ValueError, match="with and without a draft pass; of these 1 1 have one"):
        CostModel.from_profile([timed(cpu, size_of(1, num_drafting=1))])
    with pytest.raises(ValueError, match=r"positive, but here is -1\.0 s"):
        CostModel.from_profile([TimedStep(size_of(1), -1.0), timed(cpu, size_of(1, num_drafting=1))])
    with pytest.raises(ValueError, match="positive prices"):
        CostModel(np.zeros(len(NAMES)))


@pytest.mark.parametrize("knots", [TOKEN_KNOTS, ROW_KNOTS])
def test_table_of_ramps_is_the_sum_of_ramps(knots):
    prices = np.random.default_rng(0).random(len(knots))
    for count in (0, 1, 2, 5, 17.5, 600, 4096, 9000):
        assert np.interp(count, *ramp_table(knots, prices)) == pytest.approx(ramps(count, knots) @ prices)


def test_nonnegative_least_squares_is_scipys():
    from scipy.optimize import nnls

    rng = np.random.default_rng(0)
    for _ in range(10):
        matrix, values = rng.normal(size=(30, 8)) * 10.0 ** rng.integers(-3, 3, 8), rng.normal(size=30)
        matrix[:, 3] = 0
        assert np.allclose(
            matrix @ nonnegative_least_squares(matrix, values), matrix @ nnls(matrix, values)[0], atol=1e-5
        )


def test_blocks_of_a_causal_drafter_have_as_many_rows_as_positions():
    cost = CostModel.unprofiled(0.02)
    counts, positions = np.array([1, 3]), np.array([2, 5])
    shorter = cost.draft_pass_seconds(counts, positions, None, np.zeros(2))
    assert shorter[0] == cost.draft_pass_seconds(np.array(1), 2, 3, np.array(0))
    assert shorter[1] == cost.draft_pass_seconds(np.array(3), 5, 6, np.array(0))
