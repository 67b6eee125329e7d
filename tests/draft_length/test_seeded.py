"""Lengths of seeded requests: literal sequences of the rule."""

from __future__ import annotations

import numpy as np

from vllm_dflash.draft_length.seeded import FIRST_LENGTH, after_verification, seeded_lengths_now

K = 7


def lengths_for(accepts: list[int]) -> list[int]:
    """Lengths of one request whose drafts would be accepted as far as listed."""
    state, misses = np.array([FIRST_LENGTH]), np.array([0])
    lengths = []
    for run in accepts:
        length = seeded_lengths_now(state, np.array([True]), np.array([K]))
        lengths.append(int(length[0]))
        state, misses = after_verification(state, misses, length, np.minimum(run, length), K)
    return lengths


def test_it_grows_while_all_is_accepted_and_shrinks_to_what_was():
    assert lengths_for([7, 7, 7, 2, 0, 1, 1, 7]) == [3, 6, 7, 7, 3, 1, 2, 2]


def test_after_eight_misses_it_pauses_for_sixteen_steps():
    assert lengths_for([0] * 34) == [3, 1, 1, 1, 1, 1, 1, 1] + [0] * 16 + [1] * 8 + [0] * 2


def test_an_accepted_token_ends_a_run_of_misses():
    assert 0 not in lengths_for([0, 0, 0, 0, 0, 0, 0, 1] * 4)


def test_cap_cuts_the_length_and_other_rows_keep_their_state():
    state = np.array([5, 5, -3])
    lengths = seeded_lengths_now(state, np.array([True, False, False]), np.array([2, 7, 7]))
    assert lengths.tolist() == [2, 0, 0]
    assert state.tolist() == [5, 5, -3]


def test_what_was_not_verified_changes_nothing():
    state, misses = after_verification(np.array([4]), np.array([2]), np.array([0]), np.array([0]), K)
    assert (state.tolist(), misses.tolist()) == ([4], [2])
