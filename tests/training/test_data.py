"""Rows to examples: what is supervised, and what is refused. Token ids are literals of the tiny tokenizer's words."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_chat import CHATML, tiny_tokenizer

from vllm_dflash.training.data import Example, data_hash, load_examples, read_rows, to_example

HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
BYE = {"role": "user", "content": "bye"}
GOOD_DAY = {"role": "assistant", "content": "good day"}

HI_IDS = [0, 4, 3, 7, 1, 3, 0, 5, 3]  # <|im_start|> user \n hi <|im_end|> \n <|im_start|> assistant \n
BYE_IDS = [0, 4, 3, 9, 1, 3, 0, 5, 3]

#: Two short answers as the embedded target wrote them, in the format of vllm-dflash regenerate.
SYSTEM_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
ANSWERED = [
    {
        "id": "oasst2-502324793303",
        "prompt": "Hi there! This is my first prompt here. Who are you?",
        "response": "Hello there! I'm here to help with any kind of creative writing project. What brings you here "
        "today?",
        "prompt_ids": [*SYSTEM_IDS, 2, 198, 1, 4093, 198, 26843, 665, 17, 669, 314, 957, 808, 6011, 1535, 30, 6244, 359]
        + [346, 47, 2, 198, 1, 520, 9531, 198],
        "response_ids": [19556, 665, 17, 339, 5248, 1535, 288, 724, 351, 750, 1942, 282, 4833, 2385, 1391, 30, 1812]
        + [6633, 346, 1535, 1834, 47, 2],
    },
    {
        "id": "gpteacher-code-1190",
        "prompt": "How do I implement a shell script that takes a user input and echoes it back?\n\nInput:\nHello!",
        "response": '#!/bin/bash\necho "Hello!',
        "prompt_ids": [*SYSTEM_IDS, 2, 198, 1, 4093, 198, 2020, 536, 339, 2666, 253, 6528, 6048, 338, 2933, 253, 2914]
        + [3007, 284, 27105, 357, 1056, 47, 198, 198, 10219, 42, 198, 19556, 17, 2, 198, 1, 520, 9531, 198],
        "response_ids": [16441, 7089, 31, 44029, 198, 31321, 476, 19556, 17, 2],
    },
]


def example(row: dict[str, Any], tokenizer: Any = None, max_length: int = 100) -> Example:
    found = to_example(row, "rows.jsonl:1", tokenizer or tiny_tokenizer(), max_length)
    assert found is not None
    return found


def supervised(found: Example) -> list[int]:
    return [token for token, is_supervised in zip(found.input_ids, found.loss_mask) if is_supervised]


def test_answer_and_end_of_turn_are_supervised_but_not_the_newline_behind() -> None:
    found = example({"id": "a", "source": "s", "messages": [HI, HELLO]})
    assert found == Example("a", "s", [*HI_IDS, 8, 1, 3], [False] * 9 + [True, True, False])


def test_every_answer_of_a_conversation_is_supervised() -> None:
    found = example({"messages": [HI, HELLO, BYE, GOOD_DAY]})
    assert found.input_ids == [*HI_IDS, 8, 1, 3, *BYE_IDS, 10, 11, 1, 3]
    assert found.loss_mask == [False] * 9 + [True] * 2 + [False] * 10 + [True] * 3 + [False]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"conversations": [HI, HELLO]},
        {"prompt": "hi", "response": "hello"},
        {"messages": [GOOD_DAY, HI, HELLO]},  # answers no one
        {"messages": [HI, HELLO, BYE]},  # a question without answer
    ],
)
def test_shapes_that_mean_the_same(row: dict[str, Any]) -> None:
    assert example(row).input_ids == [*HI_IDS, 8, 1, 3]
    assert supervised(example(row)) == [8, 1]


def test_end_of_turn_that_is_not_the_end_of_sequence_token() -> None:
    """Gemma: <end_of_turn> closes a turn, and the tokenizer's eos is another token."""
    template = CHATML.replace("<|im_end|>", "w20")
    found = example({"messages": [HI, HELLO]}, tiny_tokenizer(template, special=("<|im_start|>", "w20")))
    assert supervised(found) == [8, 20]


def test_end_of_sequence_behind_the_whole_conversation_is_not_supervised() -> None:
    """Phi-3: without generation prompt, the template closes with one more token, which the target never writes."""
    template = CHATML.replace("{% endif %}", "{% else %}w20{% endif %}")
    tokenizer = tiny_tokenizer(template, special=("<|im_start|>", "w20"))
    found = example({"messages": [HI, HELLO, BYE, GOOD_DAY]}, tokenizer)
    assert found.input_ids == [*HI_IDS, 8, 1, 3, *BYE_IDS, 10, 11, 1, 3, 20]
    assert supervised(found) == [8, 1, 10, 11, 1]


def test_template_without_end_of_turn_does_not_supervise_the_next_turn() -> None:
    """The special token that follows the next role is no end of turn."""
    template = (
        "{% for m in messages %}{{ m.role + ' <|im_start|> ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant <|im_start|> {% endif %}"
    )
    found = example({"messages": [HI, HELLO, BYE, GOOD_DAY]}, tiny_tokenizer(template))
    assert found.input_ids == [4, 0, 7, 5, 0, 8, 4, 0, 9, 5, 0, 10, 11]
    assert supervised(found) == [8, 10, 11]


def test_template_that_drops_earlier_thoughts() -> None:
    """Qwen3 shows the thoughts of the last answer only; the visible part of an earlier one is supervised."""
    template = CHATML.replace("m.content", "(m.content if loop.last else m.content.split(' w30 ')[-1])")
    thoughtful = {"role": "assistant", "content": "w29 w30 hello"}
    found = example({"messages": [HI, thoughtful, BYE, GOOD_DAY]}, tiny_tokenizer(template))
    assert found.input_ids == [*HI_IDS, 8, 1, 3, *BYE_IDS, 10, 11, 1, 3]
    assert supervised(found) == [8, 1, 10, 11, 1]


def test_template_that_renders_the_prompt_differently_is_refused() -> None:
    """DeepSeek-R1 opens a thought in the generation prompt that is missing once there is an answer."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\nw30 {% endif %}")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template of 'tiny' renders the 1 messages .*'w30 '"):
        example({"messages": [HI, HELLO]}, tiny_tokenizer(template))


def test_template_that_refuses_the_roles() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .* refuses messages of roles user, assistant: roles must alt"):
        example({"messages": [HI, HELLO]}, tiny_tokenizer(template))


def test_tokenizer_without_chat_template() -> None:
    tokenizer = tiny_tokenizer(None)
    with pytest.raises(ValueError, match="the tokenizer of 'tiny' has no chat template.*instruction-tuned"):
        example({"prompt": "hi", "response": "hello"}, tokenizer)
    assert example({"text": "hi hello"}, tokenizer).input_ids == [7, 8]


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row["id"])
def test_smollm2_text_gives_the_tokens_that_it_wrote(row: dict[str, Any], smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    from_ids = example(row, tokenizer)
    from_text = example({"prompt": row["prompt"], "response": row["response"]}, tokenizer)
    assert from_ids.input_ids == row["prompt_ids"] + row["response_ids"]
    assert from_text.input_ids == [*from_ids.input_ids, 198]  # the newline that the template puts behind <|im_end|>
    assert from_text.loss_mask == [*from_ids.loss_mask, False]
    assert supervised(from_ids) == row["response_ids"]


def test_answer_never_shares_a_token_with_the_prompt(smollm2: Path) -> None:
    """SmolLM2 writes three line breaks as one token, and its prompt ends with a line break (198)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    found = example({"prompt": "Hi", "response": "\n\nOk"}, tokenizer)
    start = found.loss_mask.index(True)
    assert found.input_ids[start - 4 : start] == [1, 520, 9531, 198]
    assert tokenizer.decode(supervised(found)) == "\n\nOk<|im_end|>"


def test_token_ids_are_used_as_they_are() -> None:
    given = {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 0], "text": "ignored"}
    assert example(given) == Example("rows.jsonl:1", "rows", [7, 8, 9], [False, True, False])
    pair = {"id": 5, "prompt_ids": [7, 8], "response_ids": [9], "prompt": "other", "response": "words"}
    assert example(pair) == Example("5", "rows", [7, 8, 9], [False, False, True])


def test_text_is_supervised_from_its_second_token() -> None:
    assert example({"text": "hi good day"}).loss_mask == [False, True, True]


def test_truncation() -> None:
    row = {"messages": [HI, HELLO]}
    assert example(row, max_length=10).input_ids == [*HI_IDS, 8]
    assert example(row, max_length=10).loss_mask == [False] * 9 + [True]
    assert to_example(row, "rows.jsonl:1", tiny_tokenizer(), 9) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi"}, "answers are missing: run vllm-dflash regenerate first"),
        ({"messages": [HI]}, "answers are missing: run vllm-dflash regenerate first"),
        ({"messages": []}, "the conversation is empty"),
        ({"messages": [{"role": "user"}]}, r"a message has \['role'\]; it needs 'role' and 'content'"),
        (
            {"question": "hi", "answer": "x"},
            r"a row with \['answer', 'question'\] is not training data; it needs 'input_",
        ),
        ({"input_ids": [7, 8], "loss_mask": [1]}, "'input_ids' has 2 entries, but 'loss_mask' has 1"),
        ({"input_ids": "7 8", "loss_mask": [1]}, "'input_ids' is not a list of whole numbers"),
        ({"input_ids": [7, 64], "loss_mask": [0, 1]}, r"token id 64 is outside the vocabulary of 'tiny' \(0 to 63\)"),
        ({"input_ids": [7, -1], "loss_mask": [0, 1]}, "token id -1 is outside the vocabulary"),
        ({"prompt": "hi", "response": ["hello"]}, "'response' is a list, not a string"),
    ],
)
def test_what_cannot_be_used_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^rows.jsonl:1: {message}"):
        example(row)


def test_load_examples_counts_what_it_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": "hi hello"}, {"text": "hi"}, {"prompt": "hi", "response": "hello"}, {"text": "good day hi"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_examples([str(tmp_path)], tiny_tokenizer(), 9)
    assert [e.id for e in found] == ["a.jsonl:1", "a.jsonl:4"]
    assert "data: 2 examples, 5 tokens, 3 of them supervised; 2 rows dropped" in capsys.readouterr().out
    assert [e.id for e in load_examples([str(tmp_path)], tiny_tokenizer(), 9, max_examples=1)] == ["a.jsonl:1"]


def test_load_examples_refuses_to_return_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"there are no rows in '.*a.jsonl'; give data with"):
        load_examples([str(tmp_path / "a.jsonl")], tiny_tokenizer(), 9)
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi", "response": "hello"}\n')
    with pytest.raises(ValueError, match=r"none of the 1 rows in .* has an answer token among its first 9 tokens"):
        load_examples([str(tmp_path / "a.jsonl")], tiny_tokenizer(), 9)


def test_data_hash_depends_on_tokens_masks_and_borders_only() -> None:
    def digest(*examples: tuple[list[int], list[bool]], name: str = "") -> str:
        return data_hash([Example(name, name, ids, mask) for ids, mask in examples])

    base = digest(([7, 8], [False, True]), ([9], [True]))
    assert base == digest(([7, 8], [False, True]), ([9], [True]), name="other")
    others = [
        digest(([7, 8], [True, True]), ([9], [True])),
        digest(([7], [False]), ([8, 9], [True, True])),
        digest(([9], [True]), ([7, 8], [False, True])),
        digest(([7, 10], [False, True]), ([9], [True])),
    ]
    assert len({base, *others}) == 5
    # 2049 = 1 + 8 * 256: the same bytes, if lengths were not among them.
    assert digest(([7], [True]), ([8], [True])) != digest(([7, 2049], [False, True]))


def test_read_rows_of_all_kinds_of_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"n": 1}\n\n{"n": 2}\n')
    with lzma.open(tmp_path / "a.jsonl.xz", "wt") as file:
        file.write('{"n": 3}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"n": 4}')
    (tmp_path / "d.json").write_text('[{"n": 5}, {"n": 6}]')
    (tmp_path / "README.md").write_text("not data")
    assert list(read_rows(str(tmp_path))) == [
        ("a.jsonl.xz:1", {"n": 3}),
        ("b.jsonl:1", {"n": 1}),
        ("b.jsonl:3", {"n": 2}),
        ("c.jsonl.gz:1", {"n": 4}),
        ("d.json:1", {"n": 5}),
        ("d.json:2", {"n": 6}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"n": 1}\n{"n": ', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1 is a list, not an object"),
        ("a.json", b'{"n": 1}', "a.json holds a dict, not a list of rows"),
        ("a.jsonl.xz", b"no xz", "cannot be read"),
        ("a.jsonl.xz", lzma.compress(b'{"n": 1}\n' * 1000)[:-20], "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"n": 1}\n' * 1000, mtime=0)[:-20], "cannot be read"),
        ("a.parquet", b"", r"'.*a.parquet' is not a data file; its name must end in .jsonl, .jsonl.xz, "),
    ],
)
def test_read_rows_names_what_is_broken(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(str(tmp_path / name)))


def test_read_rows_of_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, int]]:
        calls.append((name, config, split))
        if name == "missing":
            raise FileNotFoundError("no such data set")
        return [{"n": 1}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_rows("some/data:main@test[:5]")) == [("some/data:main@test[:5]:1", {"n": 1})]
    assert list(read_rows("some/data")) == [("some/data:1", {"n": 1})]
    assert calls == [("some/data", "main", "test[:5]"), ("some/data", None, "train")]
    with pytest.raises(ValueError, match="'missing' is neither a file, nor a folder, nor .*no such data set"):
        list(read_rows("missing"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="'missing' is neither .*the package 'datasets' is missing"):
        list(read_rows("missing"))
