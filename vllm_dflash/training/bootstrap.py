"""Confidence intervals of tau."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Two-sided confidence of intervals, and resamples they are estimated from.
CONFIDENCE, RESAMPLES = 0.95, 2000


def tau_interval(accepted: Sequence[int], cycles: Sequence[int]) -> tuple[float, float] | None:
    """Percentile bootstrap interval of 1 + sum(accepted) / sum(cycles); None for fewer than two units.

    Args:
        accepted, cycles: of each independent unit, a document or a batch of them. Cycles of one document are not
            independent, so documents are resampled, not cycles.
    """
    if len(cycles) < 2 or not sum(cycles):
        return None
    from scipy.stats import bootstrap

    def tau(a: np.ndarray, c: np.ndarray, axis: int = -1) -> np.ndarray:
        return 1 + a.sum(axis) / np.maximum(c.sum(axis), 1)

    result = bootstrap(
        (np.asarray(accepted), np.asarray(cycles)),
        tau,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
