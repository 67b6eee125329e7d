"""Intervals of tau: where they lie, how wide they are, and that they cover the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_dflash.training.bootstrap import CONFIDENCE, tau_interval


def documents(number: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Accepted tokens and cycles of simulated answers. True tau: 1 + E[accepted] / E[cycles] = 1 + 7 * 0.3 = 3.1."""
    random = np.random.default_rng(seed)
    cycles = random.integers(10, 100, number)
    accepted = random.binomial(7 * cycles, random.beta(3, 7, number))  # texts differ in how easy they are
    return accepted.tolist(), cycles.tolist()


def test_equal_documents_leave_no_doubt():
    assert tau_interval([3] * 5, [2] * 5) == (2.5, 2.5)


def test_interval_is_as_wide_as_theory_says():
    """Standard error of a ratio R = sum a / sum c: sqrt(sum (a - R c)^2) / sum c, and 1.96 of them on either side."""
    accepted, cycles = documents(200)
    ratio = sum(accepted) / sum(cycles)
    error = sum((a - ratio * c) ** 2 for a, c in zip(accepted, cycles)) ** 0.5 / sum(cycles)
    interval = tau_interval(accepted, cycles)
    assert interval is not None
    assert interval[0] == pytest.approx(1 + ratio - 1.96 * error, abs=0.25 * error)
    assert interval[1] == pytest.approx(1 + ratio + 1.96 * error, abs=0.25 * error)


def test_documents_are_resampled_not_cycles():
    """Ten answers of a thousand cycles each, all accepted or none: ten observations, not ten thousand."""
    interval = tau_interval([2000, 0] * 5, [1000] * 10)
    assert interval is not None
    # Of ten draws with share 1/2, between 2 and 8 are the one kind in 97.9 % of cases: tau 1.4 to 2.6.
    assert interval == pytest.approx((1.4, 2.6))


def test_long_answers_weigh_more():
    """Pooled over cycles, as vLLM does: the one answer of a single cycle cannot pull tau to the mean of both, 2.5."""
    interval = tau_interval([300, 0], [100, 1])
    assert interval is not None
    assert interval[0] == 1.0  # both draws are the short answer, in a quarter of the resamples
    assert interval[1] == 4.0
    interval = tau_interval([300] * 50 + [0], [100] * 50 + [1])
    assert interval is not None
    assert interval[0] > 3.99


def test_four_times_the_documents_halve_the_interval():
    accepted, cycles = documents(50)
    few, many = tau_interval(accepted, cycles), tau_interval(accepted * 4, cycles * 4)
    assert few is not None
    assert many is not None
    assert (many[1] - many[0]) / (few[1] - few[0]) == pytest.approx(0.5, abs=0.05)


def test_equal_data_give_equal_intervals():
    assert tau_interval(*documents(30)) == tau_interval(*documents(30))


@pytest.mark.parametrize(("accepted", "cycles"), [([], []), ([3], [2]), ([0, 0], [0, 0])])
def test_too_little_to_say(accepted, cycles):
    """No document, one document, and documents that end before anything is drafted."""
    assert tau_interval(accepted, cycles) is None


def test_coverage():
    """Of 200 measurements on 40 documents, about 95 % of the intervals contain the true tau.

    Percentile intervals of 40 documents are a little too narrow; 180 to 198 is 90 % to 99 %.
    """
    intervals = [tau_interval(*documents(40, seed)) for seed in range(200)]
    covered = sum(interval is not None and interval[0] <= 3.1 <= interval[1] for interval in intervals)
    assert CONFIDENCE == 0.95
    assert 180 <= covered <= 198
