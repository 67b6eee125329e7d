"""The estimate of acceptance: usable before it has seen anything, then calibrated, not biased by short lengths."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_dflash.draft_length import AcceptanceEstimate
from vllm_dflash.draft_length.memory import RequestMemory

K, D = 5, 32
NO_OFFSETS = np.zeros(D)


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def true_probability(confidences: np.ndarray) -> np.ndarray:
    """A drafter that is too sure of itself, the more so the later the position."""
    return 1 / (1 + np.exp(-(0.6 * logit(confidences) - 0.3 - 0.2 * np.arange(confidences.shape[1]))))


def cycles(num: int, rng: np.random.Generator, truth=true_probability):
    for _ in range(num):
        confidences = rng.beta(3, 1.5, (D, K)).clip(0.02, 0.98)
        yield confidences, (rng.random((D, K)) < truth(confidences)).cumprod(1).sum(1)


def learnt(verified_of, num: int = 300) -> AcceptanceEstimate:
    rng = np.random.default_rng(0)
    estimate = AcceptanceEstimate(K)
    for confidences, runs in cycles(num, rng):
        verified = verified_of(rng, confidences)
        estimate.observe(confidences, NO_OFFSETS, verified, np.minimum(runs, verified))
    return estimate


def mean_error(estimate: AcceptanceEstimate) -> float:
    confidences = np.random.default_rng(9).beta(3, 1.5, (D, K)).clip(0.02, 0.98)
    return float(np.abs(estimate.probabilities(confidences, NO_OFFSETS) - true_probability(confidences)).mean())


def test_before_anything_is_seen_the_drafter_is_taken_at_its_word():
    estimate = AcceptanceEstimate(2)
    confidences = np.array([[0.9, 0.5]])
    assert estimate.probabilities(confidences, np.zeros(1)) == pytest.approx(confidences)
    assert estimate.survival(confidences, np.zeros(1)) == pytest.approx(np.array([[0.9, 0.45]]))


def test_miscalibrated_confidence_is_corrected():
    full = learnt(lambda rng, confidences: np.full(D, K))
    assert mean_error(AcceptanceEstimate(K)) > 0.15
    assert mean_error(full) < 0.03


def test_verifying_few_tokens_does_not_bias_it():
    # Lengths follow confidence, as they do in serving.
    cut = learnt(lambda rng, confidences: 1 + (confidences.cumprod(1) > rng.random((D, 1))).sum(1).clip(max=K - 1))
    assert mean_error(cut) < 0.04


def test_positions_behind_the_first_rejected_one_say_nothing():
    estimate, again = AcceptanceEstimate(K), AcceptanceEstimate(K)
    confidences = np.full((1, K), 0.7)
    changed = confidences.copy()
    changed[0, 2:] = 0.1  # not reached
    for e, c in ((estimate, confidences), (again, changed)):
        e.observe(c, np.zeros(1), np.array([K]), np.array([1]))
    assert np.array_equal(
        estimate.probabilities(confidences, np.zeros(1)), again.probabilities(confidences, np.zeros(1))
    )


def test_nothing_verified_teaches_nothing():
    estimate = AcceptanceEstimate(K)
    residuals, information = estimate.observe(np.full((1, K), 0.7), np.zeros(1), np.array([0]), np.array([0]))
    assert residuals.tolist() == information.tolist() == [0]
    assert estimate.probabilities(np.array([[0.7]]), np.zeros(1)) == pytest.approx(0.7)


def test_old_outcomes_fade():
    estimate = learnt(lambda rng, confidences: np.full(D, K))

    def reversed_truth(confidences: np.ndarray) -> np.ndarray:
        return np.full_like(confidences, 0.95)

    for confidences, runs in cycles(200, np.random.default_rng(1), reversed_truth):
        estimate.observe(confidences, NO_OFFSETS, np.full(D, K), runs)
    assert estimate.probabilities(np.full((1, K), 0.7), np.zeros(1)).min() > 0.88
    assert estimate.rates.min() > 0.88


def test_rates_start_from_the_checkpoint_and_are_learnt():
    recorded = AcceptanceEstimate(4, [0.6, 0.3, 0.15])
    assert recorded.rates == pytest.approx([0.6, 0.5, 0.5, 0.5])
    for _ in range(100):
        recorded.observe(np.full((2, 4), 0.5), np.zeros(2), np.array([4, 4]), np.array([0, 2]))
    assert recorded.rates == pytest.approx([0.5, 1, 0, 0.5], abs=0.06)


def test_recorded_rates_of_zero_leave_a_rate_for_every_position():
    assert np.isfinite(AcceptanceEstimate(4, [0.5, 0.0, 0.0]).rates).all()
    assert AcceptanceEstimate(2, [0.0, 0.0]).rates.tolist() == [0, 0]
    assert AcceptanceEstimate(2, []).rates.tolist() == AcceptanceEstimate(2).rates.tolist()


def test_positions_without_a_confidence_go_by_their_rates():
    estimate = AcceptanceEstimate(3, [0.5, 0.25, 0.125])
    assert estimate.survival(np.array([[0.8]]), np.zeros(1)) == pytest.approx(np.array([[0.8, 0.4, 0.2]]))


def test_confidence_that_is_not_a_number_counts_as_none():
    probabilities = AcceptanceEstimate(2).probabilities(np.array([[np.nan, 1.0]]), np.zeros(1))
    assert probabilities[0, 0] < 1e-3
    assert 0.999 < probabilities[0, 1] < 1


def test_requests_keep_their_own_offset():
    rng = np.random.default_rng(0)
    estimate, memory = AcceptanceEstimate(K), RequestMemory(K, 8)
    slots = memory.slots(["chat", "proof"], 1)
    confidences = np.full((2, K), 0.7)
    for _ in range(60):
        runs = (rng.random((2, K)) < np.array([[0.4], [0.95]])).cumprod(1).sum(1)
        moved = estimate.observe(confidences, memory.offsets[slots], np.full(2, K), runs)
        memory.learn(slots, *moved)
    chat, proof = estimate.probabilities(confidences, memory.offsets[slots])[:, 0]
    assert chat < 0.55
    assert proof > 0.8


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least one position"):
        AcceptanceEstimate(0)
    with pytest.raises(ValueError, match="do not increase"):
        AcceptanceEstimate(3, [0.3, 0.6])
    estimate = AcceptanceEstimate(3)
    for verified, accepted in ((2, 3), (3, 1), (1, -1)):
        with pytest.raises(ValueError, match="0 <= accepted <= verified <= 2"):
            estimate.observe(np.full((1, 2), 0.5), np.zeros(1), np.array([verified]), np.array([accepted]))
