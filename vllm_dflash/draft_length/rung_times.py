"""By how much steps of each draft length take longer than the cost model says, from steps that verified that length.

The cost model explains times by what steps contain, which carries over to batches that were never seen, but it smooths
over what is special about one length: a CUDA graph that exists or does not, a tile that is just full. Here logarithms
of measured over predicted seconds are averaged, by length and by the batch size up to a factor of two. What all steps
of the moment have in common (the clock, another program) is taken off first, so a trial is held against its neighbours.
"""

from __future__ import annotations

import numpy as np

_MODEL_DEVIATION = 0.15  # of the model's log ratios beyond what it says itself
_MAX_COUNT = 16.0  # steps that a mean remembers
_AGE = 2000.0  # steps after which a mean's weight has fallen to 1/e
_CLIP = 3.0  # deviations
_COMMON_STEP = 0.2  # weight of a step in what all have in common


class RungTimes:
    """Residuals of steps by draft length.

    Args:
        num_rungs: draft lengths.
    """

    def __init__(self, num_rungs: int) -> None:
        sizes = 32  # bits of the largest batch
        self._means, self._counts = np.zeros((sizes, num_rungs)), np.zeros((sizes, num_rungs))
        self._steps = np.zeros((sizes, num_rungs))
        self._common: float | None = None

    def observe(self, rung: int, num_requests: int, residual: float, noise: float, step: int) -> None:
        """Take in a step of one length.

        Args:
            rung: index of its length.
            residual: log(measured / predicted seconds).
            noise: deviation of such residuals.
            step: number of the step.
        """
        row = num_requests.bit_length()
        if self._common is None:
            self._common = residual
        mean, count = self._means[row, rung], self._aged(row, step)[rung]
        limit = _CLIP * float(np.hypot(noise, _MODEL_DEVIATION if count < 1 else 0.0))
        departure = float(np.clip(residual - self._common - mean, -limit, limit))
        self._common += _COMMON_STEP * departure
        self._means[row, rung] += departure / (count + 1)
        self._counts[row, rung], self._steps[row, rung] = min(count + 1, _MAX_COUNT), step

    def correct(
        self, seconds: np.ndarray, deviations: np.ndarray, base: int, num_requests: int, noise: float, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a model says of all rungs, corrected.

        Args:
            seconds: [A] predicted.
            deviations: [A] of log(seconds / seconds of the base).
            base: index of a rung.

        Returns:
            [A] seconds and [A] deviations.
        """
        row = num_requests.bit_length()
        counts = self._aged(row, step)
        prior = 1 / (deviations**2 + _MODEL_DEVIATION**2)
        measured = counts / noise**2
        weights = measured / (measured + prior)
        variances = 1 / (measured + prior)
        variances += variances[base]
        variances[base] = 0.0
        return seconds * np.exp(weights * self._means[row]), np.sqrt(variances)

    def _aged(self, row: int, step: int) -> np.ndarray:
        return self._counts[row] * np.exp((self._steps[row] - step) / _AGE)
