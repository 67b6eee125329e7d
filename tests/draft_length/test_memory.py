"""Memory of requests: bounded, forgetful, and honest about what it does not know."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_dflash.draft_length import AcceptanceEstimate
from vllm_dflash.draft_length.memory import RequestMemory

K = 3


def estimate() -> AcceptanceEstimate:
    """Nothing learnt: the drafter is right, and every position has the rate 0.5."""
    return AcceptanceEstimate(K, [0.5, 0.25, 0.125])


def block(probability: float) -> np.ndarray:
    """Confidences of one."""
    return np.full((1, K), probability)


def test_a_full_memory_forgets_who_was_seen_longest_ago():
    memory = RequestMemory(K, 2)
    memory.slots(["a", "b"], 1)
    memory.slots(["a"], 2)
    memory.slots(["c"], 3)
    assert len(memory) == 2
    assert (memory.find(["a", "b", "c"]) >= 0).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="a step has 3 requests, but there is memory for 2"):
        memory.slots(["a", "b", "c"], 4)


def test_requests_of_the_same_step_do_not_displace_each_other():
    memory = RequestMemory(K, 3)
    memory.slots(["a", "b", "c"], 1)
    slots = memory.slots(["d", "a", "e"], 2)
    assert len(set(slots.tolist())) == 3
    assert (memory.find(["a", "d", "e"]) == slots[[1, 0, 2]]).all()


def test_a_freed_slot_starts_anew():
    memory = RequestMemory(K, 1)
    slot = memory.slots(["a"], 1)
    memory.learn(slot, np.array([3.0]), np.array([1.0]))
    assert memory.offsets[slot] > 0
    memory.forget(["a", "unknown"])
    assert len(memory) == 0
    assert memory.offsets[memory.slots(["b"], 2)] == 0


def test_before_any_block_rates_stand_for_it():
    memory = RequestMemory(K, 2)
    expected = memory.expected_survival(memory.slots(["a"], 1), 4, estimate(), 1)
    assert expected.shape == (1, 4, K)
    assert np.allclose(expected, [0.5, 0.25, 0.125])


def test_own_blocks_outweigh_those_of_others_and_fade():
    memory = RequestMemory(K, 4)
    good, bad = memory.slots(["good", "bad"], 1)[:, None]
    for step in range(1, 11):
        memory.remember(good, block(0.9), step)
        memory.remember(bad, block(0.1), step)
    both = np.concatenate([good, bad])
    soon = memory.expected_survival(both, 2, estimate(), 11)[:, :, 0].mean(1)
    late = memory.expected_survival(both, 2, estimate(), 300)[:, :, 0].mean(1)
    assert soon[0] > 0.8
    assert soon[1] < 0.2
    assert late == pytest.approx([0.5, 0.5], abs=0.02)  # the mean of what the pool holds


def test_blocks_are_grouped_by_how_well_they_turned_out():
    memory = RequestMemory(K, 1)
    slot = memory.slots(["a"], 1)
    for step, first in enumerate([0.9, 0.2] * 8):
        memory.remember(slot, block(first), step)
    worse, better = memory.expected_survival(slot, 2, estimate(), 16)[0, :, 0]
    assert worse < 0.35
    assert better > 0.75


def test_a_busy_request_does_not_crowd_the_pool():
    memory = RequestMemory(K, 4)
    busy = memory.slots(["busy"], 1)
    for step in range(1, 200):
        memory.remember(busy, block(0.99), step)
    others = [memory.slots([name], 200) for name in ("b", "c")]
    for slot in others:
        memory.remember(slot, block(0.1), 200)
    new = memory.slots(["new"], 201)
    assert memory.expected_survival(new, 2, estimate(), 201)[0, :, 0].mean() == pytest.approx((4 * 0.99 + 2 * 0.1) / 6)


def test_the_pool_is_judged_by_what_is_known_now():
    memory, learnt = RequestMemory(K, 2), estimate()
    memory.remember(memory.slots(["a"], 1), block(0.9), 1)
    before = memory.expected_survival(memory.slots(["new"], 2), 2, learnt, 2)[0, 0, 0]
    for _ in range(50):
        learnt.observe(np.full((4, K), 0.9), np.zeros(4), np.full(4, K), np.zeros(4, dtype=np.int64))
    after = memory.expected_survival(memory.slots(["new"], 3), 2, learnt, 3)[0, 0, 0]
    assert before > 0.85
    assert after < 0.2


def test_own_blocks_are_judged_by_what_is_known_now():
    memory, learnt = RequestMemory(K, 2), estimate()
    slot = memory.slots(["a"], 1)
    for step in range(1, 9):
        memory.remember(slot, block(0.9), step)
    before = memory.expected_survival(slot, 2, learnt, 9)[0, :, 0]
    for _ in range(50):
        learnt.observe(np.full((4, K), 0.9), np.zeros(4), np.full(4, K), np.zeros(4, dtype=np.int64))
    after = memory.expected_survival(slot, 2, learnt, 9)[0, :, 0]
    assert before == pytest.approx([0.9, 0.9])
    assert after == pytest.approx([0.1, 0.1], abs=0.1)
    assert memory.expected_survival(memory.slots(["a"], 9), 2, estimate(), 9)[0, 0, 0] > 0.85


def test_positions_without_head_rows_go_by_their_rates_in_the_pool():
    memory = RequestMemory(K, 2)
    memory.remember(memory.slots(["a"], 1), block(0.8)[:, :1], 1)
    expected = memory.expected_survival(memory.slots(["new"], 2), 2, estimate(), 2)
    assert expected[0, 0] == pytest.approx([0.8, 0.4, 0.2])
