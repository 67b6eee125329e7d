"""Labels of differences, on cases made by hand."""

from __future__ import annotations

import pytest

from vllm_dflash.parity.compare import EPSILON, Difference, first_difference, judge, num_compared


@pytest.mark.parametrize(
    ("plain", "dflash", "expected"),
    [
        ([4, 5, 6], [4, 5, 6], None),
        ([4, 5, 6], [4, 7, 6], Difference("p", 1, 5, 7)),
        ([4, 5, 6], [9, 9, 9], Difference("p", 0, 4, 9)),
        ([4, 5], [4, 5, 6], Difference("p", 2, None, 6)),
        ([4, 5, 6], [4], Difference("p", 1, 5, None)),
        ([], [], None),
    ],
)
def test_first_difference(plain, dflash, expected):
    assert first_difference("p", plain, dflash) == expected


def test_tokens_behind_a_difference_are_not_compared():
    assert num_compared(None, [4, 5, 6]) == 3
    assert num_compared(Difference("p", 1, 5, 7), [4, 5, 6]) == 2


@pytest.mark.parametrize(
    ("logprobs", "label", "gap"),
    [
        ({5: -1.0, 7: -1.0}, "tie within epsilon", 0.0),
        ({5: -1.0, 7: -1.2}, "tie within epsilon", 0.2),
        ({5: -1.2, 7: -1.0}, "tie within epsilon", 0.2),
        ({5: -1.0, 7: -1.3}, "BUG", 0.3),
        ({5: -1.3, 7: -1.0}, "BUG", 0.3),
        ({5: -1.0, 7: -1.0, 8: -0.5}, "BUG", 0.5),  # equal, but neither is what the target prefers
        ({5: -1.0, 7: -1.0, 8: -0.9}, "tie within epsilon", 0.1),
    ],
)
@pytest.mark.case("F12")
def test_a_tie_is_two_tokens_near_the_best(logprobs, label, gap):
    verdict = judge(Difference("p", 1, 5, 7), logprobs, EPSILON["bfloat16"])
    assert verdict.label == label
    assert verdict.gap == pytest.approx(gap)
    assert verdict.logprobs == logprobs


def test_the_worse_token_is_named():
    assert "the token with drafts" in judge(Difference("p", 1, 5, 7), {5: -1.0, 7: -3.0}, 0.25).reason
    assert "the token without drafts" in judge(Difference("p", 1, 5, 7), {5: -3.0, 7: -1.0}, 0.25).reason


@pytest.mark.parametrize(("plain", "dflash"), [(None, 6), (6, None)])
def test_an_answer_that_ends_early_is_a_bug(plain, dflash):
    verdict = judge(Difference("p", 2, plain, dflash), {}, 1e9)
    assert verdict.label == "BUG"
    assert "ends after 2 tokens" in verdict.reason


def test_distances_in_the_runs_are_of_each_runs_own_choice():
    recorded = {5: -1.0, 7: -1.1, 9: -4.0}, {5: -1.3, 7: -1.2}
    verdict = judge(Difference("p", 1, 5, 7), {5: -1.0, 7: -1.0}, 0.25, *recorded)
    assert verdict.gap_in_plain_run == pytest.approx(0.1)
    assert verdict.gap_in_dflash_run == pytest.approx(0.1)
    without = judge(Difference("p", 1, 5, 7), {5: -1.0, 7: -1.0}, 0.25, {9: -4.0}, None)
    assert (without.gap_in_plain_run, without.gap_in_dflash_run) == (None, None)


def test_epsilon_is_two_units_in_the_last_place_of_a_logit_between_16_and_32():
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        unit = 16 * torch.finfo(dtype).eps
        assert EPSILON[str(dtype).removeprefix("torch.")] == 2 * unit
