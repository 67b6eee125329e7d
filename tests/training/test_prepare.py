"""`vllm-dflash prepare`: what it writes is what training would read, and a refusal writes nothing."""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import tiny_tokenizer

from vllm_dflash.training import prepare
from vllm_dflash.training.data import load_examples

LOOP = [20, 21, 22, 23]
ROWS: list[dict[str, Any]] = [
    {"id": "a", "source": "s", "prompt": "hi", "response": "hello"},
    {"id": "b", "prompt_ids": [7, 8], "response_ids": [9, *LOOP * 20]},
    {"id": "c", "text": "good day hi"},
    {"id": "d", "prompt_ids": [7] * 100, "response_ids": [9]},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def run(folder: Path, *flags: str, output: str = "out.jsonl") -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    target, data = str(folder / "target"), str(folder / "data.jsonl")
    paths = ["--target", target, "--data", data, "--output", str(folder / output)]
    return prepare.run(parser.parse_args([*paths, "--max-length", "90", *flags]))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_and_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    assert read(folder / "out.jsonl") == [
        {"id": "a", "source": "s", "input_ids": [0, 4, 3, 7, 1, 3, 0, 5, 3, 8, 1, 3], "loss_mask": [0] * 9 + [1, 1, 0]},
        {"id": "b", "source": "data", "input_ids": [7, 8, 9, *LOOP * 20], "loss_mask": [0, 0] + [1] * 81},
        {"id": "c", "source": "data", "input_ids": [10, 11, 7], "loss_mask": [0, 1, 1]},
    ]
    output = capsys.readouterr().out
    assert "4 rows read, 3 examples written" in output
    assert "98 tokens, 85 of them supervised" in output
    assert "1 rows dropped: no answer within 90 tokens" in output


def test_training_reads_the_same_from_the_output(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    run(folder, output="new/out.jsonl.xz")
    with lzma.open(folder / "new" / "out.jsonl.xz", "rt") as file:
        assert len(file.readlines()) == 3
    direct = load_examples([str(folder / "data.jsonl")], tokenizer, 90)
    assert load_examples([str(folder / "new")], tokenizer, 90) == direct


def test_loops_are_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "--cut-loops")
    rows = read(folder / "out.jsonl")
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["input_ids"] == [7, 8, 9, *LOOP]
    assert rows[1]["loss_mask"] == [0, 0, 1, 1, 1, 1, 1]
    assert "1 answers end in a loop and were cut, 76 tokens less" in capsys.readouterr().out


def test_loops_are_dropped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "--drop-loops")
    assert [row["id"] for row in read(folder / "out.jsonl")] == ["a", "c"]
    assert "1 answers end in a loop and were dropped, 83 tokens less" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "row"),
    [("hi", "data.jsonl:1 (a)"), ("HI, hello!", "data.jsonl:2 (b)"), ("day hi", "data.jsonl:3 (c)")],
    ids=["chat", "token ids", "text"],
)
def test_benchmark_prompts_are_refused(folder: Path, prompt: str, row: str) -> None:
    """Found in each kind of row; what was there before stays."""
    (folder / "bench.jsonl").write_text(json.dumps({"id": "x", "prompt": prompt}) + "\n")
    (folder / "out.jsonl").write_text("earlier")
    with pytest.raises(ValueError, match="training prompts equal, contain or share") as caught:
        run(folder, "--exclude", str(folder / "bench.jsonl"))
    assert f"{row} and bench.jsonl:1 (x)" in str(caught.value)
    assert (folder / "out.jsonl").read_text() == "earlier"
    assert sorted(file.name for file in folder.iterdir()) == ["bench.jsonl", "data.jsonl", "out.jsonl", "target"]


def test_an_answer_may_contain_a_benchmark_prompt(folder: Path) -> None:
    """'hello' is what row a's answer says, and part of row b's prompt; 'bye' is in row b's answer alone."""
    (folder / "bench.jsonl").write_text('{"prompt": "bye"}\n')
    assert run(folder, "--exclude", str(folder / "bench.jsonl")) == 0
    assert len(read(folder / "out.jsonl")) == 3


def test_a_bad_row_leaves_no_file(folder: Path) -> None:
    with open(folder / "data.jsonl", "a") as file:
        file.write('{"prompt": "hi"}\n')
    with pytest.raises(ValueError, match=r"data.jsonl:5: answers are missing"):
        run(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["data.jsonl", "target"]


def test_nothing_left(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"none of the 4 rows in .* is left: 4 have no answer within 1 tokens"):
        run(folder, "--max-length", "1")
    assert not (folder / "out.jsonl").exists()


def test_wrong_arguments(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*out.txt'; its name must end in .jsonl or .jsonl.xz"):
        run(folder, output="out.txt")
    (folder / "target" / "tokenizer.json").unlink()
    (folder / "target" / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="there is no tokenizer for target"):
        run(folder)
