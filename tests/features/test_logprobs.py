"""Log-probabilities of accepted, corrected and bonus tokens are the target's, and so are those of prompts."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_drafts import LENGTHS, K, ask, random_prompts

pytest_plugins = ["engine_pairs"]

PROMPTS = random_prompts(8)
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 40}
TOLERANCE = 1e-3  # the sums behind them run in another order


@pytest.fixture(autouse=True, params=LENGTHS)
def lengths(request, pair):
    pair.schedule(LENGTHS[request.param])


def assert_equal(ours, plain) -> int:
    """Compare the log-probabilities of two lists of positions; returns how many positions there are."""
    assert (ours is None) == (plain is None)
    assert len(ours or []) == len(plain or [])
    for mine, its in zip(ours or [], plain or []):
        assert (mine is None) == (its is None)  # the first token of a prompt has none
        for token in its or {}:
            assert mine[token].rank == its[token].rank
            assert mine[token].decoded_token == its[token].decoded_token
            assert mine[token].logprob == pytest.approx(its[token].logprob, abs=TOLERANCE)
        assert mine is None or mine.keys() == its.keys()
    return len(ours or [])


def compare(pair, prompts, sampling, beyond=None) -> list[int]:
    """As `Pair.compare`, log-probabilities included; returns how many positions each answer has them for."""
    outputs = pair.compare(prompts, sampling, beyond)
    counts = []
    for output, plain in zip(outputs, pair.plain_answers(prompts, sampling)):
        assert_equal(output.prompt_logprobs, plain.prompt_logprobs)
        counts.append(assert_equal(output.outputs[0].logprobs, plain.outputs[0].logprobs))
        difference = (output.outputs[0].cumulative_logprob or 0) - (plain.outputs[0].cumulative_logprob or 0)
        assert abs(difference) < 40 * TOLERANCE
    return counts


@pytest.mark.feature("logprobs", "of every position, values within 1e-3 of plain's, ranks equal")
def test_logprobs_of_every_position(pair):
    assert compare(pair, PROMPTS, ENDLESS | {"logprobs": 5}) == [40] * len(PROMPTS)
    assert any(0 < accepted < K for _, accepted in pair.oracle.patterns)


def test_each_request_gets_as_many_as_it_asks_for(pair):
    sampling = [ENDLESS | {"logprobs": [None, 0, 1, 20][i % 4], "max_tokens": 9 + i} for i in range(len(PROMPTS))]
    counts = compare(pair, PROMPTS, sampling, beyond=ENDLESS)
    assert counts == [0 if i % 4 == 0 else 9 + i for i in range(len(PROMPTS))]


def test_logprobs_are_raw_under_penalties_and_end_with_the_text(pair):
    endless = ENDLESS | {"logprobs": 2, "presence_penalty": 2.0, "repetition_penalty": 1.5}
    stops = [output.outputs[0].token_ids[11 + i] for i, output in enumerate(pair.plain_answers(PROMPTS, endless))]
    counts = compare(pair, PROMPTS, [endless | {"stop_token_ids": [stop]} for stop in stops], beyond=endless)
    assert max(counts) < 40


@pytest.mark.feature("prompt_logprobs", "values within 1e-3 of plain's, ranks equal")
def test_prompt_logprobs_beside_running_requests(pair):
    sampling = [ENDLESS | ({"prompt_logprobs": i % 3} if i % 2 else {}) for i in range(len(PROMPTS))]
    compare(pair, PROMPTS, sampling)


@pytest.mark.feature("logprob_token_ids", "of every position, beside requests with logprobs; values equal plain's")
def test_logprobs_of_given_tokens(pair):
    kinds: list[dict[str, Any]] = [{"logprob_token_ids": [7, 99, 250]}, {"logprobs": 2, "logprob_token_ids": [3, 4]}]
    assert compare(pair, PROMPTS, [ENDLESS | kinds[i % 2] for i in range(len(PROMPTS))]) == [40] * len(PROMPTS)


def test_logprobs_of_given_tokens_beside_others(pair):
    sampling = [ENDLESS | kind for kind in ({"logprobs": 2}, {"logprob_token_ids": [7, 99, 250]}, {})]
    outputs = ask(pair.dflash, PROMPTS[:3], sampling)
    alone = pair.plain_answers(PROMPTS[1:2], sampling[1:2])
    assert_equal(outputs[1].outputs[0].logprobs, alone[0].outputs[0].logprobs)
