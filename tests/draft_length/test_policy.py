"""The policy finds the best lengths there are, against trying all of them."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from vllm_dflash.draft_length import choose_lengths

#: Of 64 requests with 15 positions. It takes 55 microseconds here; the least of many runs is no more when busy.
MAX_SECONDS = 300e-6


def rate(survival, lengths, seconds, token_prices=None, base=None) -> float:
    tokens = (len(survival) if base is None else base) + sum(row[:n].sum() for row, n in zip(survival, lengths))
    extra = 0.0 if token_prices is None else float(np.dot(token_prices, lengths))
    return tokens / (seconds[sum(lengths)] + extra)


def best_rate(survival, seconds, token_prices=None, base=None) -> float:
    every = itertools.product(range(survival.shape[1] + 1), repeat=len(survival))
    return max(rate(survival, lengths, seconds, token_prices, base) for lengths in every)


def times(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    n = np.arange(count + 1)
    return {
        "linear": 1 + 0.2 * n,
        "flat, then rising": 1 + 0.3 * np.maximum(n - 4, 0),
        "steps": 1.0 + n // 3,
        "any": 1 + np.cumsum(rng.exponential(0.15, count + 1)),
    }[kind]


@pytest.mark.parametrize("kind", ["linear", "flat, then rising", "steps", "any"])
@pytest.mark.parametrize("has_prices", [False, True])
def test_lengths_are_the_best_of_all(kind, has_prices):
    rng = np.random.default_rng(0)
    for case in range(40):
        num_requests, num_positions = [(1, 5), (2, 4), (3, 3), (4, 2)][case % 4]
        survival = np.cumprod(rng.beta(2, 1, (num_requests, num_positions)), 1)
        seconds = times(kind, survival.size, rng)
        prices = rng.exponential(0.1, num_requests) if has_prices else None
        base = None if case % 3 else num_requests + 1.5
        lengths = choose_lengths(survival, seconds, prices, base)
        assert rate(survival, lengths, seconds, prices, base) == pytest.approx(
            best_rate(survival, seconds, prices, base), rel=1e-12
        )


def test_long_context_is_verified_less():
    survival = np.cumprod(np.full((2, 6), 0.8), 1)
    lengths = choose_lengths(survival, 1 + 0.05 * np.arange(13), np.array([0.0, 0.1]))
    assert lengths.tolist() == [6, 2]


def test_likely_block_is_verified_further_than_an_unlikely_one():
    survival = np.cumprod([[0.9] * 4, [0.3] * 4], 1)
    assert choose_lengths(survival, 1 + 0.2 * np.arange(9)).tolist() == [4, 0]


def test_equal_survival_is_verified_exactly_as_often_as_it_pays():
    # Four tokens are free, the fifth costs a lot; all are equally good.
    seconds = np.array([1.0] * 5 + [9.0] * 8)
    lengths = choose_lengths(np.full((3, 4), 0.5), seconds)
    assert lengths.sum() == 4


def test_a_capped_position_is_not_verified_where_time_is_flat():
    survival = np.array([[0.5, 0.0, 0.0], [0.9, 0.8, 0.0]])
    assert choose_lengths(survival, np.ones(7)).tolist() == [1, 2]
    assert choose_lengths(survival, np.ones(7), np.array([0.0, 1e-9])).tolist() == [1, 2]


def test_nothing_is_verified_where_nothing_pays():
    assert choose_lengths(np.full((2, 3), 0.1), 1 + np.arange(7.0)).tolist() == [0, 0]
    assert choose_lengths(np.full((2, 3), 0.1), 1 + np.arange(7.0), np.array([1.0, 2.0])).tolist() == [0, 0]


def test_no_position_at_all():
    assert choose_lengths(np.empty((2, 0)), np.ones(1)).tolist() == [0, 0]
    assert choose_lengths(np.empty((0, 3)), np.ones(1)).tolist() == []


@pytest.mark.parametrize(("count", "prices"), [(12, None), (13, [1.0])])
def test_shapes_that_do_not_fit_are_refused(count, prices):
    with pytest.raises(ValueError, match=r"13 step times and 3 prices"):
        choose_lengths(np.full((3, 4), 0.5), np.ones(count), None if prices is None else np.array(prices))


def test_it_is_fast():
    survival = np.cumprod(np.random.default_rng(0).beta(4, 1, (64, 15)), 1)
    seconds = 1e-2 + 1e-5 * np.arange(961)
    least = min(_seconds(survival, seconds) for _ in range(200))
    assert least < MAX_SECONDS


def _seconds(survival: np.ndarray, seconds: np.ndarray) -> float:
    started = time.perf_counter()
    choose_lengths(survival, seconds)
    return time.perf_counter() - started
