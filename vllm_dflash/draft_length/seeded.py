"""Lengths of sampled requests with a seed: their own accepted counts decide, and nothing else.

A seeded request must give the same text in every run and beside any neighbours. vLLM draws a request's random numbers
in the order in which tokens are verified, so the text depends on the lengths, and these may depend neither on time,
nor on the batch, nor on what was learnt from others. Probabilities are left out as well: they differ in the last bits
from one batch shape to the next, and a threshold would turn that into another length. What is left are counts:

    start         3
    all accepted  twice as many, at most K
    a accepted    a + 1
    nothing accepted 8 times in a row  no draft for 16 steps, then 1 again

It does not know what a step costs, so "never slower than plain" does not hold for a batch of seeded requests.
"""

from __future__ import annotations

from typing import Final

import numpy as np

FIRST_LENGTH: Final = 3
_MAX_MISSES: Final = 8
_PAUSE: Final = 16


def seeded_lengths_now(state: np.ndarray, is_first_choice: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """[R] lengths of this step, from the state of each request: its length, or minus the steps of a pause still to go.

    Args:
        state: [R] int; changed in place: a pause gets one step shorter.
        is_first_choice: [R] bool, rows of seeded requests; others get 0 and keep their state.
        caps: [R] int, most tokens that each may draft.
    """
    lengths = np.where(is_first_choice, np.clip(state, 0, caps), 0)
    is_paused = is_first_choice & (state <= 0)
    state[is_paused] = np.where(state[is_paused] >= -1, 1, state[is_paused] + 1)
    return lengths


def after_verification(
    state: np.ndarray,  # [D] int > 0
    misses: np.ndarray,  # [D] int, cycles in a row without an accepted token
    verified: np.ndarray,  # [D] int; 0 leaves a request as it is
    accepted: np.ndarray,  # [D] int
    num_positions: int,
) -> tuple[np.ndarray, np.ndarray]:
    """State and misses after a cycle."""
    length = np.where(accepted == verified, np.minimum(2 * verified, num_positions), accepted + 1)
    missed = np.where(accepted > 0, 0, misses + 1)
    pauses = missed >= _MAX_MISSES
    length = np.where(pauses, -_PAUSE, length)
    was_verified = verified > 0
    return np.where(was_verified, length, state), np.where(was_verified, np.where(pauses, 0, missed), misses)
