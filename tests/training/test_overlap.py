"""Training prompts that repeat a benchmark's are found, by words alone; instructions that both share do not count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_dflash.training.overlap import BenchmarkPrompts, check_no_overlap, read_benchmark

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HEADER = "Write a solution to the following problem and make sure that it passes the tests:\n"
#: Twenty words.
LONG = "A train leaves the station at noon with ninety people and stops four times before it comes to the sea"
SHORT = "Sort a list of pancakes."


def overlaps(training: str, benchmark: str) -> bool:
    found = BenchmarkPrompts([("bench:1", benchmark)]).find(training)
    assert found in (None, "bench:1")
    return found is not None


def test_equal_or_contained() -> None:
    assert overlaps(LONG, LONG)
    assert overlaps(SHORT, SHORT)
    assert overlaps(f"You are a cook. {SHORT} Then eat.", SHORT)
    assert not overlaps("Sort a list", SHORT)  # contained in the benchmark, too little to be its question
    assert not overlaps("Sort a list of numbers of pancakes", SHORT)


def test_case_and_punctuation_do_not_count() -> None:
    assert overlaps("please SORT: a 'list'\nof (pancakes)", SHORT)


def test_thirteen_words_in_common() -> None:
    words = LONG.split()
    assert len(words) == 20
    assert overlaps(" ".join(["Once", *words[3:16], "again"]), LONG)
    assert not overlaps(" ".join(["Once", *words[3:15], "again"]), LONG)
    assert not overlaps(" ".join([*words[:12], "and", *words[12:]]), LONG)  # twelve, one more, eight


def test_boundary_between_contained_and_shared() -> None:
    """A prompt of twelve words must be contained whole, one of thirteen is a run itself."""
    for count in (12, 13):
        prompt = " ".join(LONG.split()[:count])
        assert overlaps(f"Now: {prompt}, please", prompt)
        assert not overlaps(f"Now: {prompt.rsplit(' ', 1)[0]} please", prompt)


def test_shared_instructions_do_not_count() -> None:
    """The line has 12 words with 'boxed', so that one equal word beside it would make a run of 13."""
    assert not overlaps("How many eggs are there now?" + INSTRUCTION, "Is it day or night now?" + INSTRUCTION)
    assert not overlaps(HEADER + "def f(): pass", HEADER + "def g(): pass")
    assert overlaps("Count them." + INSTRUCTION, "Count them.")


def test_error_names_the_first_pairs() -> None:
    training = [(f"train:{i}", SHORT) for i in range(5)] + [("train:9", "Something else.")]
    message = (
        r"^5 training prompts .* with a benchmark prompt: train:0 and bench:2; train:1 and bench:2; train:2 and "
        r"bench:2 \(and 2 more\). Leave these training rows out"
    )
    with pytest.raises(ValueError, match=message):
        check_no_overlap(training, [("bench:1", LONG), ("bench:2", SHORT)])
    check_no_overlap(training[5:], [("bench:1", LONG), ("bench:2", SHORT), ("bench:3", "?!")])


def test_benchmark_rows(tmp_path: Path) -> None:
    rows = [
        {"id": "m-1", "prompt": f"Add.{INSTRUCTION}", "raw": "Add."},
        {"id": "mt-1", "prompt": "first", "turns": ["first", "second"]},
        {"question": "why?"},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "who?"}]},
    ]
    file = tmp_path / "bench.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_benchmark(str(file))) == [
        ("bench.jsonl:1 (m-1)", "Add."),
        ("bench.jsonl:2 (mt-1)", "first"),
        ("bench.jsonl:2 (mt-1)", "second"),
        ("bench.jsonl:3", "why?"),
        ("bench.jsonl:4", "who?"),
    ]
    file.write_text('{"id": "x", "answer": "42"}\n')
    with pytest.raises(ValueError, match=r"^bench.jsonl:1: a row with \['answer', 'id'\] is not a benchmark's"):
        list(read_benchmark(str(file)))
