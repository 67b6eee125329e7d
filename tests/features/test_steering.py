"""Penalties and lists of tokens apply to every verified row, each with its own history."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_drafts import LENGTHS, random_prompts
from tiny_bytes import byte_tokenizer

pytest_plugins = ["engine_pairs"]

PROMPTS = random_prompts(12)
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 40}
PENALTIES = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.9},
    "rewards": {"presence_penalty": -2.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
}


@pytest.fixture(autouse=True, params=LENGTHS)
def lengths(request, pair):
    pair.schedule(LENGTHS[request.param])
    yield
    accepted = [accepted for _, accepted in pair.oracle.patterns.elements()]
    assert accepted.count(0) > 10
    assert len(accepted) - accepted.count(0) > 10


def num_changed(pair, outputs) -> int:
    """Answers that differ from those without steering."""
    free = pair.plain_answers(PROMPTS, ENDLESS)
    return sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(free, outputs))


@pytest.mark.feature("presence_penalty", "strong, alone and with requests that have none; greedy text equals plain's")
@pytest.mark.feature("frequency_penalty", "strong, alone and with requests that have none; greedy text equals plain's")
@pytest.mark.feature("repetition_penalty", "strong, alone and with requests that have none; greedy text equals plain's")
@pytest.mark.case("F14")
@pytest.mark.parametrize("penalties", PENALTIES.values(), ids=PENALTIES)
def test_penalties_count_the_drafts_before_each_row(pair, penalties):
    # Allowed tokens are few enough to come again, or most penalties would change nothing.
    few = ENDLESS | {"allowed_token_ids": list(range(70, 90))}
    outputs = pair.compare(PROMPTS, few | penalties)
    free = pair.plain_answers(PROMPTS, few)
    assert sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(free, outputs)) >= 10


def test_each_request_has_its_own_penalties(pair):
    kinds = [*PENALTIES.values(), {}, {"presence_penalty": 1.0, "repetition_penalty": 1.3}]
    outputs = pair.compare(PROMPTS, [ENDLESS | kinds[i % len(kinds)] for i in range(len(PROMPTS))])
    assert 0 < num_changed(pair, outputs) < len(PROMPTS)


def words_in(text: str) -> list[str]:
    """Pairs of a text's letters that are two tokens each, and one single letter."""
    tokenizer = byte_tokenizer()
    pairs = [first + second for first, second in zip(text, text[1:]) if first.isascii() and second.isascii()]
    pairs = [word for word in pairs if len(tokenizer.encode(word)) == 2 and word.strip() == word]
    return [*pairs[:8], *[letter for letter in text if letter.isalpha() and letter.isascii()][:1]]


@pytest.mark.feature("bad_words", "of one and two tokens, some begun in a draft; greedy text equals plain's")
@pytest.mark.case("F14")
def test_bad_words_are_seen_across_drafts(pair):
    words = [words_in(output.outputs[0].text) for output in pair.plain_answers(PROMPTS, ENDLESS)]
    words[3] = []  # a request without any among the others
    outputs = pair.compare(PROMPTS, [ENDLESS | ({"bad_words": bad} if bad else {}) for bad in words])
    assert num_changed(pair, outputs) >= 8
    tokenizer = byte_tokenizer()
    for output, bad in zip(outputs, words):
        tokens = output.outputs[0].token_ids
        for word in map(tokenizer.encode, bad):
            assert not any(list(tokens[i : i + len(word)]) == word for i in range(len(tokens)))


@pytest.mark.feature("allowed_token_ids", "for some requests of a batch; greedy text equals plain's")
@pytest.mark.case("F14")
def test_allowed_tokens_are_those_of_each_request(pair):
    allowed = [list(range(50 + i, 56 + i)) if i % 3 else None for i in range(len(PROMPTS))]
    outputs = pair.compare(PROMPTS, [ENDLESS | {"allowed_token_ids": few} for few in allowed])
    assert num_changed(pair, outputs) == sum(few is not None for few in allowed)
    for output, few in zip(outputs, allowed):
        assert few is None or set(output.outputs[0].token_ids) <= set(few)
