"""Reduced draft vocabularies: which tokens are in them, and how a checkpoint names them."""

from __future__ import annotations

import torch

from vllm_dflash.training.data import Example
from vllm_dflash.training.vocabulary import coverage, from_d2t, most_frequent_tokens, to_d2t


def example(ids: list[int], supervised: str) -> Example:
    return Example("a", "s", ids, [character == "x" for character in supervised])


#: Supervised: 30 three times, 20 twice, 10 and 40 once; 7 is seen most of all, but only in prompts.
EXAMPLES = [
    example([7, 7, 7, 30, 20, 30], "...xxx"),
    example([7, 30, 20, 10, 40, 7], ".xxxx."),
]


def test_most_frequent_supervised_tokens_in_increasing_order() -> None:
    assert most_frequent_tokens(EXAMPLES, 2).tolist() == [20, 30]
    assert most_frequent_tokens(EXAMPLES, 4).tolist() == [10, 20, 30, 40]
    assert most_frequent_tokens(EXAMPLES, 2).dtype == torch.int64


def test_end_of_text_is_always_in() -> None:
    assert most_frequent_tokens(EXAMPLES, 2, always=[99]).tolist() == [30, 99]
    assert most_frequent_tokens(EXAMPLES, 2, always=[30]).tolist() == [20, 30]


def test_lowest_unseen_tokens_fill_up() -> None:
    assert most_frequent_tokens(EXAMPLES, 7, always=[1]).tolist() == [0, 1, 2, 10, 20, 30, 40]
    # Never a token beyond the vocabulary, even where all of it is asked for.
    assert most_frequent_tokens([example([2, 4], "xx")], 5).tolist() == [0, 1, 2, 3, 4]


def test_coverage_counts_supervised_tokens() -> None:
    assert coverage(EXAMPLES, torch.tensor([20, 30])) == 5 / 7
    assert coverage(EXAMPLES, torch.tensor([7])) == 0.0
    assert coverage([], torch.tensor([7])) == 0.0


def test_d2t_is_what_is_added_to_a_draft_token() -> None:
    vocabulary = torch.tensor([0, 3, 4, 9])
    assert to_d2t(vocabulary).tolist() == [0, 2, 2, 6]
    assert from_d2t(torch.tensor([0, 2, 2, 6])).tolist() == [0, 3, 4, 9]
