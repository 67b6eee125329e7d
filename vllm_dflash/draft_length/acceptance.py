"""Probability that a drafted token is accepted, from the drafter's own maximum probability, learnt while serving.

    P(j accepted | 1..j-1 accepted) = sigmoid(common + position_j + offset_r + slope * logit(p_max[r, j]))

The start, slope 1 and all else 0, takes the drafter at its word. `offset_r` belongs to a request (memory.py). Each
verified block labels its accepted positions with 1 and the first rejected one with 0; positions behind it, and drafted
positions that were not verified, say nothing and are not used, so shorter verify lengths do not bias the estimate. One
Newton step per batch of labels, on a likelihood whose past fades while the prior does not: what is no longer observed
returns to the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Labels after which the weight of older ones has fallen to 1/e.
_MEMORY = 4000.0
#: Probabilities nearer to 0 and 1 are not told apart; logits end at about 9.
_MIN_PROBABILITY = 1e-4
#: Of the prior: common intercept 1, an intercept of a position 0.5, slope 0.5 (deviations).
_COMMON_PRECISION, _POSITION_PRECISION, _SLOPE_PRECISION = 1.0, 4.0, 4.0
#: Marginal rate of each position before anything is known. High, so that drafting gets its trial where cost allows it.
_FIRST_RATE = 0.75
#: Observations that recorded or first rates count for; they fade like others, and come back when nothing is observed.
_RATE_WEIGHT = 8.0


class AcceptanceEstimate:
    """What all requests share.

    Args:
        num_positions: K.
        recorded_rates: up to K shares of cycles in which position 1, 2, ... was accepted (not conditional: they do not
            increase), as a checkpoint records them; None where it does not.
    """

    def __init__(self, num_positions: int, recorded_rates: Sequence[float] | None = None) -> None:
        if num_positions < 1:
            raise ValueError(f"at least one position is drafted, but num_positions is {num_positions}.")
        self.num_positions = num_positions
        size = num_positions + 2  # common, one per position, slope
        self._start = np.zeros(size)
        self._start[-1] = 1.0
        self._prior = np.full(size, _POSITION_PRECISION)
        self._prior[0], self._prior[-1] = _COMMON_PRECISION, _SLOPE_PRECISION
        self._parameters = self._start.copy()
        self._information = np.zeros((size, size))
        self._first_rates = _conditional(recorded_rates, num_positions)
        self._reached, self._accepted = np.zeros(num_positions), np.zeros(num_positions)

    @property
    def rates(self) -> np.ndarray:
        """[K] P(position j accepted | all before accepted), whatever the drafter's confidence."""
        return (self._accepted + _RATE_WEIGHT * self._first_rates) / (self._reached + _RATE_WEIGHT)

    def probabilities(
        self,
        confidences: np.ndarray,  # [D, P] maximum probability per position, P <= K
        offsets: np.ndarray,  # [D] of the requests
    ) -> np.ndarray:
        """[D, P] P(position j accepted | all before accepted)."""
        logits = self._parameters[-1] * _logit(confidences)
        logits += self._parameters[0] + self._parameters[1 : 1 + confidences.shape[1]] + offsets[:, None]
        return _sigmoid(logits)

    def survival(self, confidences: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """[D, K] P(positions 1..j accepted); positions beyond P, or where confidence is NaN, go by their rates."""
        known = confidences.shape[1]
        survival = np.empty((len(confidences), self.num_positions))
        survival[:, :known] = self.probabilities(confidences, offsets)
        survival[:, known:] = self.rates[known:]
        is_unknown = np.isnan(confidences)
        if is_unknown.any():
            survival[:, :known] = np.where(is_unknown, self.rates[:known], survival[:, :known])
        return np.cumprod(survival, axis=1, out=survival)

    def observe(
        self,
        confidences: np.ndarray,  # [D, P]
        offsets: np.ndarray,  # [D]
        verified: np.ndarray,  # [D] int, at most P
        accepted: np.ndarray,  # [D] int, at most verified
    ) -> tuple[np.ndarray, np.ndarray]:
        """Learn from verified blocks.

        Returns:
            [D] sum of (label - probability) and [D] sum of its variance, over the labels of each request: what
            moves the request's own offset.

        Raises:
            ValueError: more was accepted than verified, or verified than has a confidence.
        """
        num_positions = confidences.shape[1]
        if (accepted > verified).any() or (verified > num_positions).any() or (accepted < 0).any():
            raise ValueError(
                f"0 <= accepted <= verified <= {num_positions} positions with a confidence, but accepted is"
                f" {accepted.tolist()} and verified {verified.tolist()}."
            )
        position = np.arange(num_positions)
        reached = position < np.minimum(accepted + 1, verified)[:, None]  # [D, P]
        right = position < accepted[:, None]
        probability = self.probabilities(confidences, offsets)
        residual = np.where(reached, right - probability, 0.0)
        weight = np.where(reached, probability * (1 - probability), 0.0)
        fade = float(np.exp(-np.count_nonzero(reached) / _MEMORY))
        self._learn(_logit(confidences), residual, weight, fade)
        self._reached *= fade
        self._accepted *= fade
        self._reached[:num_positions] += reached.sum(0)
        self._accepted[:num_positions] += (right & reached).sum(0)
        return residual.sum(1), weight.sum(1)

    def _learn(self, logits: np.ndarray, residual: np.ndarray, weight: np.ndarray, fade: float) -> None:
        """One Newton step on the faded likelihood, given residuals and variances [D, P] of the labels."""
        last = 1 + logits.shape[1]
        weighted = weight * logits
        by_position, by_position_slope = weight.sum(0), weighted.sum(0)
        information = np.zeros_like(self._information)
        information[0, 0] = weight.sum()
        information[0, 1:last] = information[1:last, 0] = by_position
        information[range(1, last), range(1, last)] = by_position
        information[-1, 1:last] = information[1:last, -1] = by_position_slope
        information[0, -1] = information[-1, 0] = weighted.sum()
        information[-1, -1] = (weighted * logits).sum()
        gradient = -(1 - fade) * self._prior * (self._parameters - self._start)
        gradient[0] += residual.sum()
        gradient[1:last] += residual.sum(0)
        gradient[-1] += (residual * logits).sum()
        self._information = fade * self._information + information
        self._parameters += np.linalg.solve(self._information + np.diag(self._prior), gradient)
        # A drafter that is less right where it is surer is a run of bad luck, not a rule to act on.
        self._parameters[-1] = np.clip(self._parameters[-1], 0.0, 3.0)


def _conditional(recorded_rates: Sequence[float] | None, num_positions: int) -> np.ndarray:
    """[K] conditional rates from a checkpoint's; positions beyond its last repeat it."""
    if recorded_rates is None or len(recorded_rates) == 0:
        return np.full(num_positions, _FIRST_RATE)
    rates = np.array([1.0, *recorded_rates])
    if not ((rates >= 0) & (rates <= 1)).all() or (np.diff(rates) > 0).any():
        raise ValueError(
            f"recorded rates are shares of cycles that do not increase with the position, but here are"
            f" {list(recorded_rates)}."
        )
    # A rate of 0.01 or less was counted from so few cycles that its quotient says nothing.
    kept = max(int(np.count_nonzero(rates > 0.01)), 2)
    conditional = rates[1:kept] / rates[: kept - 1]
    return np.concatenate([conditional, np.full(num_positions, conditional[-1])])[:num_positions]


def _logit(probability: np.ndarray) -> np.ndarray:
    """Logits; what is not a number counts as no confidence at all."""
    clipped = np.clip(np.nan_to_num(probability, nan=0.0), _MIN_PROBABILITY, 1 - _MIN_PROBABILITY)
    return np.log(clipped / (1 - clipped))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))
