"""Least squares with coefficients that are not negative, for a few dozen unknowns. Serving does not depend on SciPy."""

from __future__ import annotations

import numpy as np

_TOLERANCE = 1e-10  # of the largest correlation


def nonnegative_least_squares(
    matrix: np.ndarray,  # [n, d]
    values: np.ndarray,  # [n]
) -> np.ndarray:
    """Coefficients [d] >= 0 that minimise |matrix @ x - values|^2, by the active set method of Lawson and Hanson.

    Columns of zeros get the coefficient 0. Others should not depend on each other.
    """
    gram, target = matrix.T @ matrix, matrix.T @ values
    found, is_free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], dtype=bool)
    limit = _TOLERANCE * np.abs(target).max(initial=0.0)
    for _ in range(3 * len(found)):
        descent = np.where(is_free, -np.inf, target - gram @ found)
        if descent.max() <= limit:
            break
        is_free[np.argmax(descent)] = True
        while True:
            tried = np.zeros_like(found)
            tried[is_free] = np.linalg.solve(gram[np.ix_(is_free, is_free)], target[is_free])
            if not (is_below := is_free & (tried <= 0)).any():
                break
            # As far towards it as all coefficients stay positive; those that reach 0 are held there.
            step = (found[is_below] / (found[is_below] - tried[is_below])).min()
            found = found + step * (tried - found)
            is_free &= found > 1e-14 * found.max()
        found = tried
    return found
