"""Structured output: drafts are cut where the grammar ends or forbids them, and every answer is valid."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from oracle_drafts import LENGTHS, ask, random_prompts
from tiny_bytes import byte_tokenizer

pytest_plugins = ["engine_pairs"]

PROMPTS = random_prompts(8, ascii_only=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "kind": {"enum": ["small", "smaller", "smallest"]},
        "open": {"type": "boolean"},
    },
    "required": ["name", "sizes", "kind", "open"],
    "additionalProperties": False,
}
REGEX = r"(ab|a)[0-9]{3,12}\.(xy){2}"
CHOICES = ["red", "reddish", "blue and green", "1"]
#: Balanced brackets, so a grammar that no regular expression gives.
GRAMMAR = 'root ::= "(" list ")"\nlist ::= item | item "," item\nitem ::= [a-f] [a-f] | root | "A"'


def is_balanced(text: str) -> bool:
    """Replace innermost lists by x until nothing is left to replace."""
    while (shorter := re.sub(r"\((?:[a-f]{2}|A|x)(?:,(?:[a-f]{2}|A|x))?\)", "x", text)) != text:
        text = shorter
    return text == "x"


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CONSTRAINTS = {
    "json": (SCHEMA, is_json),
    "regex": (REGEX, lambda text: re.fullmatch(REGEX, text)),
    "choice": (CHOICES, lambda text: text in CHOICES),
    "grammar": (GRAMMAR, is_balanced),
}


@pytest.fixture(params=LENGTHS)
def lengths(request, pair):
    pair.schedule(LENGTHS[request.param])


@pytest.fixture
def no_errors():
    """vLLM logs none."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logging.getLogger("vllm").addHandler(handler)
    yield
    logging.getLogger("vllm").removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def constrained(**constraint):
    """Sampling parameters; new for every request, because vLLM notes its choice of a backend in them."""
    from vllm.sampling_params import StructuredOutputsParams

    return {"max_tokens": 120, "structured_outputs": StructuredOutputsParams(**constraint)}


def compare(pair, prompts, sampling):
    """Answers of both engines are equal, and drafts are made of what the target says without a grammar as well."""
    free = {"max_tokens": 8, "ignore_eos": True}
    pair.learn(pair.plain_answers(prompts, free))
    return [output.outputs[0] for output in pair.compare(prompts, sampling)]


@pytest.mark.feature("structured outputs: json schema", "greedy text equals plain's and is valid")
@pytest.mark.feature("structured outputs: regex", "greedy text equals plain's and matches")
@pytest.mark.feature("structured outputs: choice", "greedy text equals plain's and is one of them")
@pytest.mark.feature("structured outputs: grammar", "greedy text equals plain's and parses")
@pytest.mark.case("F11")
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_answers_obey_and_equal_plains(pair, lengths, kind, no_errors):
    constraint, is_valid = CONSTRAINTS[kind]
    answers = compare(pair, PROMPTS, constrained(**{kind: constraint}))
    finished = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(finished) > 4
    assert all(is_valid(answer.text) for answer in finished)


def test_constrained_and_free_requests_in_one_batch(pair, lengths, no_errors):
    kinds = [constrained(**{kind: constraint}) for kind, (constraint, _) in CONSTRAINTS.items()]
    kinds += [{"ignore_eos": True}, constrained(regex=REGEX) | {"repetition_penalty": 1.5}]
    kinds += [constrained(choice=CHOICES) | {"logprobs": 2, "min_tokens": 2}, {"presence_penalty": 2.0}]
    compare(pair, PROMPTS, kinds)


@pytest.mark.feature("structured outputs: json object", "greedy text equals plain's, up to the token budget")
def test_json_object(pair, lengths):
    for answer in compare(pair, PROMPTS, constrained(json_object=True)):
        assert answer.text.lstrip().startswith("{")


def test_one_token_prompts_with_grammars_join_running_requests(pair):
    """The scheduler pads them with placeholders, and with masks for these; each must get its own."""
    from vllm import SamplingParams

    assert byte_tokenizer().encode("A") == [0]  # what a placeholder might be taken for
    sampling = {name: constrained(regex=f"{name}{{2}}[xyz]{{6}}") for name in "ABC"}
    expected = {name: ask(pair.plain, [[9]], one)[0].outputs[0].text for name, one in sampling.items()}
    llm_engine = pair.dflash.llm.llm_engine
    answers: dict[str, Any] = {}
    llm_engine.add_request("long", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=40))
    llm_engine.step()
    for name, one in sampling.items():
        llm_engine.add_request(name, {"prompt_token_ids": [9]}, SamplingParams(temperature=0, **one))
    while llm_engine.has_unfinished_requests():
        answers |= {output.request_id: output.outputs[0] for output in llm_engine.step() if output.finished}
    assert {name: answers[name].text for name in sampling} == expected


@pytest.mark.case("F11")
def test_a_hundred_sampled_answers_are_valid(pair, no_errors):
    """Sampled, so a hundred different ones; drafts are what was sampled without speculation."""
    prompts = random_prompts(100, lengths=[4, 7], ascii_only=True)
    sampling = constrained(json=SCHEMA) | {"temperature": 1.0, "seed": 1, "max_tokens": 200}
    for output in ask(pair.plain, prompts, sampling):
        pair.oracle.learn(output.prompt_token_ids, output.outputs[0].token_ids)
    outputs = [output.outputs[0] for output in ask(pair.dflash, prompts, sampling)]
    assert len({output.text for output in outputs}) > 90
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert all(is_json(output.text) for output in outputs)
    assert sum(accepted > 0 for _, accepted in pair.oracle.patterns.elements()) > 100
