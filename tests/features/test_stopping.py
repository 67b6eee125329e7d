"""Where an answer ends does not depend on the block in which its last token was drafted."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_drafts import LENGTHS, K, random_prompts
from tiny_bytes import EOS

pytest_plugins = ["engine_pairs"]

PROMPTS = random_prompts(16)
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 48}
#: Among so few tokens the random target chooses the end of the text about every tenth time.
FEW = [EOS, *range(70, 80)]


@pytest.fixture(autouse=True, params=LENGTHS)
def lengths(request, pair):
    pair.schedule(LENGTHS[request.param])


def test_every_pattern_of_a_block_occurs(pair):
    """What the other tests of this folder stand on."""
    pair.compare(PROMPTS, ENDLESS)
    assert {accepted for drafted, accepted in pair.oracle.patterns if drafted == K} == set(range(K + 1))


@pytest.mark.feature("max_tokens", "1 to 16, so at every place of a block; text and finish reason equal plain's")
def test_max_tokens_ends_inside_a_block(pair):
    sampling = [{"ignore_eos": True, "max_tokens": budget} for budget in range(1, 17)]
    outputs = pair.compare(PROMPTS, sampling, beyond=ENDLESS)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 17))
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


@pytest.mark.feature("stop_token_ids", "at every place of a block; text, finish and stop reason equal plain's")
def test_stop_token_ends_inside_a_block(pair):
    endless = pair.plain_answers(PROMPTS, ENDLESS)
    stops = [output.outputs[0].token_ids[10 + i] for i, output in enumerate(endless)]
    outputs = pair.compare(PROMPTS, [ENDLESS | {"stop_token_ids": [stop]} for stop in stops], beyond=ENDLESS)
    assert [output.outputs[0].stop_reason for output in outputs] == stops
    assert max(len(output.outputs[0].token_ids) for output in outputs) > K


@pytest.mark.feature("ignore_eos", "ends of text inside blocks, heeded and ignored; text equals plain's")
def test_end_of_text_inside_a_block(pair):
    endless = {"allowed_token_ids": FEW, **ENDLESS}
    ended = pair.compare(PROMPTS, {"allowed_token_ids": FEW, "max_tokens": 48}, beyond=endless)
    assert sum(output.outputs[0].finish_reason == "stop" for output in ended) > 8
    ignored = pair.compare(PROMPTS, endless)
    assert all(len(output.outputs[0].token_ids) == 48 for output in ignored)
    assert sum(EOS in output.outputs[0].token_ids[:-1] for output in ignored) > 8


@pytest.mark.feature("min_tokens", "ends of text inside and behind blocks that cross the minimum; text equals plain's")
@pytest.mark.case("F14")
@pytest.mark.parametrize("min_tokens", [1, 3, 8, 12])
def test_min_tokens_is_crossed_inside_a_block(pair, min_tokens):
    sampling = {"allowed_token_ids": FEW, "min_tokens": min_tokens, "max_tokens": 48}
    outputs = pair.compare(PROMPTS, sampling, beyond={"allowed_token_ids": FEW, **ENDLESS})
    ended = [len(output.outputs[0].token_ids) for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(ended) > 8
    assert min(ended) > min_tokens  # the minimum does not count the end of the text itself


def test_min_tokens_does_not_bind_the_bonus_token(pair):
    """A block begins below the minimum and is accepted whole; the token behind it may end the text."""
    pair.set_right(1.0)
    prompts = random_prompts(64, lengths=[5], seed=1)
    few = {"allowed_token_ids": FEW, "max_tokens": 12}
    outputs = pair.compare(prompts, few | {"min_tokens": 4}, beyond=few | {"ignore_eos": True})
    # One token from the prompt, K drafts, and the end.
    assert any(len(output.outputs[0].token_ids) == K + 2 for output in outputs)


def stop_strings(outputs, place: int) -> list[list[str]]:
    """Two pieces of each text, the one that comes first being the second of the list."""
    texts = [output.outputs[0].text for output in outputs]
    return [[text[i + 4 :][:2], text[i:][:3]] for i, text in enumerate(texts, place)]


@pytest.mark.feature("stop", "strings inside blocks, with and without them in the text; all equal plain's")
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_inside_a_block(pair, include):
    stops = stop_strings(pair.plain_answers(PROMPTS, ENDLESS), place=6)
    sampling = [ENDLESS | {"stop": stop, "include_stop_str_in_output": include} for stop in stops]
    outputs = pair.compare(PROMPTS, sampling, beyond=ENDLESS)
    for output, stop in zip(outputs, stops):
        [completion] = output.outputs
        assert completion.stop_reason in stop
        assert completion.text.endswith(completion.stop_reason) or not include


def test_stop_string_waits_for_min_tokens(pair):
    stops = stop_strings(pair.plain_answers(PROMPTS, ENDLESS), place=2)
    sampling = [ENDLESS | {"stop": stop, "min_tokens": 12} for stop in stops]
    outputs = pair.compare(PROMPTS, sampling, beyond=ENDLESS)
    assert min(len(output.outputs[0].token_ids) for output in outputs) > 12


@pytest.mark.feature("max_model_len", "from K + 3 tokens short of it to one; text equals plain's")
@pytest.mark.case("F41")
def test_answers_end_at_the_maximum_length(pair):
    max_len = pair.plain.llm.model_config.max_model_len
    prompts = random_prompts(10, lengths=[max_len - 1 - i for i in range(K + 3)])
    outputs = pair.compare(prompts, {"ignore_eos": True, "max_tokens": None})
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, K + 4))
