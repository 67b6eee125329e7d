"""Loops at the end of answers: found where text repeats exactly up to the end, and only there."""

from __future__ import annotations

import random
import time

import pytest

from vllm_dflash.training.data import Example
from vllm_dflash.training.loops import MAX_PERIOD, cut_loop, last_answer, loop_start

TEXT = list(range(1000, 1100))  # a hundred tokens, all different


def test_loop_begins_where_the_first_round_does() -> None:
    assert loop_start([*TEXT, *[1, 2, 3, 4] * 20]) == 100


def test_round_may_be_incomplete_at_the_end() -> None:
    passage = list(range(30))
    assert loop_start([*TEXT, *passage * 3, *passage[:7]]) == 100
    # Without what follows, three rounds less one token are too few.
    assert loop_start([*TEXT, *passage * 2, *passage[:29]]) is None


def test_loop_may_have_begun_within_a_round() -> None:
    """The last two tokens before the first whole round already belong to the loop."""
    assert loop_start([*TEXT, 3, 4, *[1, 2, 3, 4] * 20]) == 100


def test_one_other_token_at_the_end_is_no_loop() -> None:
    assert loop_start([*TEXT, *[1, 2, 3, 4] * 20, 5]) is None
    assert loop_start([*TEXT, *[1, 2, 3, 4] * 20, 1, 2, 5]) is None


def test_one_other_token_within_shortens_the_loop() -> None:
    assert loop_start([*TEXT, *[1, 2, 3, 4] * 20, 5, *[1, 2, 3, 4] * 16]) == 181


def test_numbered_list_is_no_loop() -> None:
    """Equal items, but their numbers count: 1. item 2. item 3. item ..."""
    assert loop_start([token for number in range(40) for token in (2000 + number, 7, 8, 9, 10, 11)]) is None


def test_table_is_no_loop() -> None:
    """Rows of 40 cells with one changing value; and a rule of 20 dashes, as Markdown writes it."""
    rows = [token for number in range(12) for token in [1] * 19 + [3000 + number] + [2] * 20]
    assert loop_start(rows) is None
    assert loop_start([*TEXT, *[5, 6] * 20]) is None


@pytest.mark.parametrize(("period", "is_loop"), [(1, True), (MAX_PERIOD, True), (MAX_PERIOD + 1, False)])
def test_longest_period(period: int, is_loop: bool) -> None:
    ids = [*TEXT, *list(range(period)) * (3 if period > 1 else 64)]
    assert loop_start(ids) == (100 if is_loop else None)


def test_arguments_are_thresholds() -> None:
    ids = [*TEXT, *[1, 2, 3, 4] * 10]
    assert loop_start(ids) is None  # 40 tokens
    assert loop_start(ids, min_tokens=40) == 100
    assert loop_start(ids, min_tokens=41) is None
    assert loop_start(ids, min_tokens=40, min_repeats=11) is None
    assert loop_start(ids, min_tokens=40, max_period=3) is None


def test_short_sequences() -> None:
    assert loop_start([]) is None
    assert loop_start([1]) is None
    assert loop_start([1] * 63) is None
    assert loop_start([1] * 64) == 0


def test_same_as_a_search_over_all_starts_and_periods() -> None:
    """The oracle tries every start and every period with loops."""

    def oracle(ids: list[int]) -> int | None:
        for start in range(len(ids)):
            tail = ids[start:]
            for period in range(1, 6):
                is_periodic = all(tail[i] == tail[i - period] for i in range(period, len(tail)))
                if is_periodic and len(tail) >= max(3 * period, 7):
                    return start
        return None

    random.seed(0)
    found = []
    for _ in range(3000):
        ids = [random.randrange(2) for _ in range(random.randrange(24))]
        found.append(loop_start(ids, max_period=5, min_repeats=3, min_tokens=7))
        assert found[-1] == oracle(ids), ids
    assert sum(start is not None for start in found) == 98


def test_cut_keeps_one_round_of_the_answer() -> None:
    prompt, passage = [9, 1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4]
    ids = [*prompt, *TEXT, *passage * 20]
    cut = cut_loop(Example("a", "s", ids, [False] * 9 + [True] * 180))
    assert cut == Example("a", "s", [*prompt, *TEXT, *passage], [False] * 9 + [True] * 104)


def test_loop_that_began_in_the_prompt_leaves_an_answer() -> None:
    cut = cut_loop(Example("a", "s", [1, 2, 3, 4] * 40, [False] * 80 + [True] * 80))
    assert cut.input_ids == [1, 2, 3, 4] * 21
    assert sum(cut.loss_mask) == 4


def test_loop_is_found_before_what_the_template_puts_behind_the_answer() -> None:
    ids = [9, *[1, 2, 3, 4] * 20, 7, 8]
    looping = Example("a", "s", ids, [False] + [True] * 80 + [False] * 2)
    assert last_answer(looping) == [1, 2, 3, 4] * 20
    assert cut_loop(looping) == Example("a", "s", [9, 1, 2, 3, 4], [False] + [True] * 4)


def test_example_without_loop_is_returned_as_it_is() -> None:
    for ids, mask in [
        (TEXT, [True] * 100),
        ([*[1, 2, 3, 4] * 20, 5], [True] * 81),
        ([1, 2, 3, 4] * 20, [False] * 80),  # the prompt repeats itself, not the target
    ]:
        example = Example("a", "s", ids, mask)
        assert cut_loop(example) is example


def test_speed() -> None:
    """A thousand answers of 512 tokens take a fraction of a second; the limit allows for a busy machine."""
    random.seed(0)
    answers = [[random.randrange(50) for _ in range(512)] for _ in range(1000)]
    started = time.process_time()
    assert all(loop_start(ids) is None for ids in answers)
    assert time.process_time() - started < 3
