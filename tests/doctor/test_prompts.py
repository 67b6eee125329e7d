"""What the target is asked, how it is rendered, and what is refused as a ground for claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import CHATML, WORDS, tiny_tokenizer

from vllm_dflash.doctor.prompts import (
    BUILT_IN,
    Rendering,
    alternatives,
    questions,
    refuse_random_tokens,
    render,
)


def write(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def test_built_in_questions_are_enough_and_different():
    asked = questions(None, 8)
    assert len(asked) == 8
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 12


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt": "hi"}, "hi"),
    "prompt and response": ({"prompt": "hi", "response": "hello"}, "hi"),
    "messages": ({"messages": [{"role": "user", "content": "hi"}]}, "hi"),
    "answered": (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "bye"}]},
        "hi",
    ),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "bye"}]}, "hi"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_every_shape_ask_the_same(tmp_path, shape):
    row, content = SHAPES[shape]
    (asked,) = questions(write(tmp_path, row), 8)
    assert [message["content"] for message in asked.messages] == [content]
    (ids,) = render([asked], Rendering(), tiny_tokenizer())
    expected = ["<|im_start|>", "user", "\n", "hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    assert [WORDS[i] for i in ids] == expected


def test_token_ids_are_sent_as_they_are(tmp_path):
    (asked,) = questions(write(tmp_path, {"prompt_ids": [0, 4, 3, 7], "response_ids": [8]}), 8)
    assert render([asked], Rendering(), tiny_tokenizer()) == [[0, 4, 3, 7]]


def test_rows_that_ask_nothing_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"prompts.jsonl:2: has \['text'\]; it needs a question"):
        questions(write(tmp_path, {"prompt": "hi"}, {"text": "hi"}), 8)
    with pytest.raises(ValueError, match="no rows"):
        questions(write(tmp_path), 8)


def test_without_a_template_and_with_another_one():
    (asked,) = questions(None, 1)
    asked = type(asked)("a", [{"role": "user", "content": "hi w20"}])
    tokenizer = tiny_tokenizer()
    assert render([asked], Rendering("none"), tokenizer) == [[WORDS.index("hi"), 20]]
    other = Rendering("{% for m in messages %}w30 {{ m.content }} w31{% endfor %}", template_name="other.jinja")
    assert render([asked], other, tokenizer) == [[30, WORDS.index("hi"), 20, 31]]
    assert other.label == "chat template in other.jinja"
    with pytest.raises(ValueError, match="has no chat template; give --chat-template none"):
        render([asked], Rendering(), tiny_tokenizer(None))


@pytest.mark.case("F44b")
def test_thinking_is_switched_where_the_template_knows_it():
    template = CHATML + "{% if enable_thinking is defined and not enable_thinking %}w40{% endif %}"
    tokenizer = tiny_tokenizer(template)
    (asked,) = questions(None, 1)
    asked = type(asked)("a", [{"role": "user", "content": "hi"}])
    on, off = (render([asked], Rendering(thinking=value), tokenizer)[0] for value in (True, False))
    assert off == [*on, 40]
    assert alternatives(Rendering(), tokenizer) == [Rendering(thinking=True), Rendering(thinking=False)]
    assert alternatives(Rendering(thinking=False), tokenizer) == [Rendering(thinking=True)]
    assert alternatives(Rendering(), tiny_tokenizer()) == []
    assert alternatives(Rendering("none"), tiny_tokenizer()) == [Rendering()]
    assert alternatives(Rendering("none"), tiny_tokenizer(None)) == []


@pytest.mark.case("F44b")
def test_random_tokens_are_no_ground_for_claims(smollm2, tmp_path):
    from vllm_dflash.training.chat import load_tokenizer

    with pytest.raises(ValueError, match="acceptance on random tokens says nothing.*--prompts"):
        questions("random", 8)
    tokenizer = load_tokenizer(str(smollm2))
    generator = torch.Generator().manual_seed(0)
    noise = [
        {"prompt_ids": torch.randint(17, 49152, (60,), generator=generator).tolist(), "id": str(i)} for i in range(6)
    ]
    with pytest.raises(ValueError, match="6 of 6 prompts are token ids that no text gives"):
        refuse_random_tokens(questions(write(tmp_path, *noise), 8), tokenizer)
    real = [{"prompt_ids": tokenizer.encode(text)} for text in BUILT_IN[:6]]
    refuse_random_tokens(questions(write(tmp_path, *real), 8), tokenizer)
    templated = [{"prompt_ids": ids} for ids in render(questions(None, 6), Rendering(), tokenizer)]
    refuse_random_tokens(questions(write(tmp_path, *templated), 8), tokenizer)
