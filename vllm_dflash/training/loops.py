"""Answers that end in a loop: small models under greedy decoding repeat themselves until the length limit.

A loop is trivially predicted. Left in the training data it teaches a drafter to copy, and in a measurement it raises
the acceptance length. Only exact repetition up to the end counts, so that a list with counting numbers, or a table
with different rows, is no loop.

Measured on 3,584 greedy answers of SmolLM2-135M-Instruct, at most 512 tokens long, of which 2,334 end by themselves
and 1,250 stop at the limit (none of the former is ever called a loop):

    longest period    32     64    128    256
    3 repetitions    518    793    895    897
    4 repetitions    510    767    846    846
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_dflash.training.data import Example

#: Longest repeated passage, in tokens; one paragraph. Longer ones hardly occur (table above).
MAX_PERIOD = 128
#: Fewer repetitions occur in text that goes on sensibly: a refrain, two equal cases of a program.
MIN_REPEATS = 3
#: A row of zeros, of dashes or of table cells repeats a few tokens often; together they stay shorter than this.
MIN_TOKENS = 64


def loop_start(
    token_ids: Sequence[int],
    max_period: int = MAX_PERIOD,
    min_repeats: int = MIN_REPEATS,
    min_tokens: int = MIN_TOKENS,
) -> int | None:
    """Index at which the tail of a sequence begins to repeat itself up to the end; None where it does not.

    The passage stands there at least `min_repeats` times, and another incomplete time if the sequence ends within
    it, on `min_tokens` tokens or more in all.
    """
    loop = _find_loop(list(token_ids), max_period, min_repeats, min_tokens)
    return None if loop is None else loop[0]


def last_answer(example: Example) -> list[int]:
    """The tokens of its last answer, without what a chat template puts behind it unsupervised."""
    start, end = _last_answer(example)
    return example.input_ids[start:end]


def cut_loop(example: Example) -> Example:
    """The example without the repetitions of the loop that its last answer ends in; one round of it stays.

    An example without loop is returned as it is.
    """
    start, answer_end = _last_answer(example)
    loop = _find_loop(example.input_ids[start:answer_end], MAX_PERIOD, MIN_REPEATS, MIN_TOKENS)
    if loop is None:
        return example
    end = start + sum(loop)
    return replace(example, input_ids=example.input_ids[:end], loss_mask=example.loss_mask[:end])


def _last_answer(example: Example) -> tuple[int, int]:
    """Where the last run of supervised tokens begins and ends."""
    end = len(example.loss_mask)
    while end > 0 and not example.loss_mask[end - 1]:
        end -= 1
    start = end
    while start > 0 and example.loss_mask[start - 1]:
        start -= 1
    return start, end


def _find_loop(ids: list[int], max_period: int, min_repeats: int, min_tokens: int) -> tuple[int, int] | None:
    """Start and period of the loop at the end, with the shortest period that fits."""
    for period in range(1, min(max_period, len(ids) // min_repeats) + 1):
        # A tail of `needed` tokens repeats iff its last `needed - period` tokens also stand one period earlier.
        needed = max(min_repeats * period, min_tokens)
        start = len(ids) - needed
        if start < 0 or ids[-1] != ids[-1 - period] or ids[start + period :] != ids[start : len(ids) - period]:
            continue
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        return start, period
    return None
