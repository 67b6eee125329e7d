"""The statistics: right p-values under the null, small ones for a wrong sampler, impossible tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vllm_dflash.parity.fit import SMALLEST_P, Fit
from vllm_dflash.parity.oracle import Sampling, next_token_probabilities
from vllm_dflash.parity.sampling import accepted_places


def fit_of(temperature: float, sizes: list[int], seed: int) -> Fit:
    """Draws at a temperature, tested as if it had been 1; one prefix for each of `sizes`."""
    generator = np.random.default_rng(seed)
    fit = Fit(seed)
    for size in sizes:
        logits = generator.normal(0, 2, 50)
        drawn = generator.choice(
            50, size, p=next_token_probabilities(logits, [], [], Sampling(temperature=temperature))
        )
        wanted = next_token_probabilities(logits, [], [], Sampling())
        fit.add(Counter(drawn.tolist()), wanted, wanted)
    return fit


def test_chi_square_by_hand():
    fit = Fit()
    halves = np.array([0.5, 0.5, 0.0])
    fit.add({0: 60, 1: 40}, halves, halves)
    fit.add({0: 45, 1: 55}, halves, halves)
    assert fit.chi_square == pytest.approx(4.0 + 1.0)
    assert fit.degrees_of_freedom == 2
    assert fit.p_often == pytest.approx(np.exp(-5.0 / 2))  # chi-square with two degrees of freedom
    assert fit.num_tested == 200


def test_small_cells_are_pooled():
    fit = Fit()
    probabilities = np.array([0.9, 0.04, 0.03, 0.03])
    fit.add({0: 88, 1: 5, 2: 4, 3: 3}, probabilities, probabilities)
    assert fit.degrees_of_freedom == 1  # 90 and 10 expected
    assert fit.chi_square == pytest.approx(2**2 / 90 + 2**2 / 10)


@pytest.mark.parametrize("sizes", [[400, 200, 100], [2] * 60, [500, 30, 1, 1, 1, 3, 4]])
def test_correct_draws_have_uniform_p_values(sizes):
    p_values = np.array([fit_of(1.0, sizes, seed).p_value for seed in range(150)])
    assert (p_values < 0.05).mean() < 0.1
    assert (p_values < 0.5).mean() < 0.6
    assert p_values.min() > SMALLEST_P


@pytest.mark.parametrize("sizes", [[2000], [1] * 2000, [200, 3, 2, 1] * 10])
@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_a_wrong_temperature_is_found(sizes, temperature):
    assert fit_of(temperature, sizes, seed=1).p_value < SMALLEST_P


def test_an_impossible_token_is_a_bug_by_itself():
    fit = Fit()
    strict, generous = np.array([0.6, 0.4, 0.0, 0.0]), np.array([0.6, 0.3, 0.1, 0.0])
    fit.add({0: 60, 1: 40, 2: 1}, strict, generous)
    assert (fit.num_at_border, fit.impossible) == (1, [])
    assert fit.p_value > 0.5
    fit.add({0: 60, 3: 1}, strict, generous)
    assert fit.impossible == [(2, 3)]
    assert fit.p_value == 0.0


def test_a_token_without_alternative_is_no_evidence():
    fit = Fit()
    fit.add({1: 50}, np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert (fit.num_tested, fit.p_value) == (0, 1.0)


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [([0, 0, 0], 0), ([3], 3), ([7], 3), ([1, 1], 1 + 1), ([2, 5], 2), ([0, 2], 2), ([], 0)],
)
def test_accepted_drafts_among_the_first_four_tokens(accepted, expected):
    """Token 0 comes from the prompt's pass; a cycle with r accepted drafts fills r + 1 places."""
    assert accepted_places(accepted, 4) == expected
