"""Random requests at once: every answer is plain vLLM's, and no step writes where it may not. See soak.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from soak import Report, Soak, difference, malformed, run
from soak_engine import Answer
from soak_requests import MAX_LEN, soak_request

RIGHT = Answer([[5, 6, 7]], [("stop", 7)], [[{5: -0.1}, {6: -0.2}, {7: -0.3}]])


@pytest.fixture(scope="module")
def soak(tmp_path_factory) -> Soak:
    return Soak(tmp_path_factory.mktemp("soak"), check_every=1)


def check(report: Report) -> None:
    """Nothing wrong, and enough of everything to mean something."""
    print(report.text())
    assert report.wrong == []
    assert len(report.ties) <= report.requests / 1000
    assert report.compared > 0.7 * report.requests
    assert report.aborted > 0.04 * report.requests
    assert report.preemptions > 0.02 * report.requests
    # The product's own choice on tiny models is to draft little.
    assert min(report.verified.values()) > 0
    verified, accepted = sum(report.verified.values()), sum(report.accepted.values())
    assert accepted > report.requests
    assert 0.05 * verified < accepted < 0.9 * verified


@pytest.mark.case("F16")
@pytest.mark.feature("all of these at once", "300 random requests with aborts and preemptions; all texts equal plain's")
def test_random_requests_are_answered_like_plain_vllm(soak):
    check(run(soak, 0, 300, seed=1, wave=100))
    assert soak.report.pages_checked > 10_000


def test_the_canary_sees_a_stray_write(soak):
    """A row that belongs to no request, as a padded row with slot 0 would be."""
    layer = next(iter(soak.canary.caches))
    proposer = soak.drafting.runner.drafter
    propose, stray = proposer.propose, soak.canary.caches[layer][0]

    def propose_and_stray(*arguments, **named):
        stray.view(-1)[soak.canary.elements[layer][7]] = 1.0
        return propose(*arguments, **named)

    proposer.propose = propose_and_stray
    try:
        soak.drafting.generate([[3, 5, 7]], max_tokens=2)
    finally:
        del proposer.propose
    assert any(f"layer {layer} wrote slots [7] of page 0" in problem for problem in soak.canary.take_problems())


WRONG = {
    "token": (replace(RIGHT, token_ids=[[5, 9, 7]]), "differs at token 1"),
    "end": (replace(RIGHT, token_ids=[[5, 6]]), "differs at token 2"),
    "reason": (replace(RIGHT, reasons=[("length", None)]), "ends for"),
    "stop token": (replace(RIGHT, reasons=[("stop", 6)]), "ends for"),
    "log-probability": (replace(RIGHT, logprobs=[[{5: -0.1}, {6: -0.202}, {7: -0.3}]]), "log-probabilities at 1"),
    "unwanted": (replace(RIGHT, prompt_logprobs=[{1: 0.0}]), "nobody asked for"),
    "aborted": (replace(RIGHT, token_ids=[[5, 9]], reasons=[(None, None)], was_aborted=True), "differs at token 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_every_difference_is_seen(case):
    answer, message = WRONG[case]
    assert message in (difference(RIGHT, answer) or "")


def test_what_is_no_difference():
    assert difference(RIGHT, RIGHT) is None
    aborted = Answer([[5, 6]], [(None, None)], [None], was_aborted=True)
    assert difference(RIGHT, aborted) is None
    assert difference(RIGHT, replace(RIGHT, logprobs=[[{5: -0.1}, {6: -0.2004}, {7: -0.3}]])) is None


def test_sampled_answers_that_cannot_be():
    request = replace(soak_request("0", False), sampling={"max_tokens": 3, "min_tokens": 2}, bad_words=[[9], [8, 8]])
    assert malformed(request, Answer([[5, 6, 7]], [("length", None)], [None])) is None
    assert "never ended" in (malformed(request, Answer([[5]], [(None, None)], [None])) or "")
    assert "2 tokens" in (malformed(request, Answer([[5, 6]], [("length", None)], [None])) or "")
    assert "before min_tokens" in (malformed(request, Answer([[5, 7]], [("stop", 7)], [None])) or "")
    assert "forbidden" in (malformed(request, Answer([[5, 9, 7]], [("length", None)], [None])) or "")


def test_requests_are_made_from_their_seed_alone_and_are_of_all_kinds():
    requests = [soak_request(f"3-{i}", True) for i in range(1000)]
    assert requests[17] == soak_request("3-17", True)
    assert max(len(r.prompt) + r.sampling["max_tokens"] for r in requests) == MAX_LEN
    kinds = {name for request in requests for name in request.sampling}
    assert kinds >= {"min_p", "logit_bias", "allowed_token_ids", "stop_token_ids", "min_tokens", "prompt_logprobs", "n"}
    assert sum(r.is_greedy for r in requests) > 700
    assert sum(bool(r.bad_words) for r in requests) > 50


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_requests(soak):
    soak.report = Report()
    soak.canary.check_every = 10
    check(run(soak, 0, 10_000, seed=2))
    # What grows at first are caches by number of rows; objects of Python stay as many from the first wave on.
    assert abs(soak.report.slope) < 5.0, "memory grows with requests"
