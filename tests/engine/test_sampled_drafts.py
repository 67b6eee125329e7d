"""Drawn drafts in a real engine: the text's distribution is the target's, and seeds hold."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from test_cpu_backend import NUM_SAMPLES, SETTINGS, dflash, p_value, plain_texts, sample, write_pair  # noqa: F401  (fixtures)

from vllm_dflash.draft_sampling import DraftSampling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares with the CPU engine's plain texts")


@pytest.fixture(scope="module")
def plain(engine, tmp_path_factory):
    target, _ = write_pair(tmp_path_factory)
    return engine(target, **SETTINGS)


@pytest.fixture
def drawing(dflash, monkeypatch):  # noqa: F811
    """The engine with eight tokens, whose drafts are now drawn."""
    monkeypatch.setattr(dflash.runner.drafter.sampling, "sampling", DraftSampling(is_drawn=True, chooses=False))
    return dflash


@pytest.mark.case("F13")
def test_text_from_drawn_drafts_has_the_plain_distribution(drawing, plain_texts):  # noqa: F811
    texts, num_accepted = sample(drawing)
    assert num_accepted > 200
    assert p_value(plain_texts, texts) > 1e-3


def test_a_wrong_draft_distribution_would_show(drawing, plain_texts, monkeypatch):  # noqa: F811
    right = drawing.runner.drafter.sampling.verified_probs

    def flattened(*arguments):
        probs = right(*arguments)
        return None if probs is None else (probs + 0.2) / (probs + 0.2).sum(-1, keepdim=True)

    monkeypatch.setattr(drawing.runner.drafter.sampling, "verified_probs", flattened)
    assert p_value(plain_texts, sample(drawing)[0]) < 1e-6


@pytest.mark.case("F50")
def test_seeded_text_is_the_same_beside_any_neighbours(drawing):
    settings = {"temperature": 1.0, "max_tokens": 24}
    (alone,) = drawing.token_ids([[3, 5, 7]], seed=11, **settings)
    beside = drawing.token_ids([[1, 2], [3, 5, 7], [6]], seed=11, **settings)
    assert beside[1] == alone
    unseeded = drawing.token_ids([[3, 5, 7]] * 2, **settings)
    assert unseeded[0] != unseeded[1]


@pytest.mark.case("F13")
def test_the_better_way_is_found_while_serving(dflash, plain_texts, monkeypatch):  # noqa: F811
    """A random drafter's distribution is flat: beside the target's peaks, tokens that are taken do better or worse;
    whichever is chosen, what was measured of both says so, and the text's distribution is untouched."""
    choosing = DraftSampling(is_drawn=True, chooses=True)
    monkeypatch.setattr(dflash.runner.drafter.sampling, "sampling", choosing)
    texts, _ = sample(dflash)
    (record,) = choosing._records.values()
    taken, drawn = record.expected_tokens()
    assert taken > 0
    assert drawn > 0
    assert record.draws_better == (drawn > taken) or abs(drawn / taken - 1) < 0.02
    assert p_value(plain_texts, texts) > 1e-3


@pytest.mark.feature("min_p", "distribution of four tokens against plain's, chi-square; rows against the plain sampler")
@pytest.mark.feature(
    "logit_bias", "distribution of four tokens against plain's, chi-square; rows against the plain sampler"
)
@pytest.mark.case("F10")
@pytest.mark.parametrize("is_drawn", [False, True], ids=["taken", "drawn"])
def test_min_p_and_logit_bias_have_the_plain_distribution(dflash, plain, is_drawn, monkeypatch):  # noqa: F811
    monkeypatch.setattr(dflash.runner.drafter.sampling, "sampling", DraftSampling(is_drawn, chooses=False))
    settings = {"temperature": 1.2, "min_p": 0.15, "logit_bias": {2: 1.0, 5: -2.0}, "max_tokens": 4}
    theirs = Counter(map(tuple, plain.token_ids([[3, 5, 7]] * NUM_SAMPLES, **settings)))
    results = dflash.generate([[3, 5, 7]] * NUM_SAMPLES, **settings)
    assert sum(result.num_accepted for result in results) > 200
    assert p_value(theirs, Counter(tuple(result.token_ids) for result in results)) > 1e-3
    without = {**settings, "min_p": 0.0, "logit_bias": None}
    others = Counter(map(tuple, dflash.token_ids([[3, 5, 7]] * NUM_SAMPLES, **without)))
    assert p_value(theirs, others) < 1e-6  # they change the distribution, so the test above can fail


@pytest.mark.feature("draft_sample_method: probabilistic", "distribution of four tokens against plain's, chi-square")
def test_vllms_own_setting_draws(engine, tiny_target, tiny_drafter):
    drawing = engine(
        tiny_target, drafter=tiny_drafter, num_drafted=4, speculative={"draft_sample_method": "probabilistic"}
    )
    sampling = drawing.runner.drafter.sampling.sampling
    assert sampling.is_drawn
    assert sampling.chooses  # "auto" starts with what was asked for
