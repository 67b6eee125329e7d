"""No training on the test: finds training prompts that repeat a benchmark's.

A training prompt overlaps a benchmark prompt if it equals it, contains it, or shares 13 consecutive words with it.
Words are runs of letters and digits in lower case; punctuation does not count. Instructions that a whole benchmark
shares are no part of a question: a benchmark's `raw` text is taken where a row has one, and known ones are cut out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from vllm_dflash.training.chat import read_messages
from vllm_dflash.training.rows import read_rows

#: Consecutive words in common that make an overlap, as GPT-3's authors counted contamination.
RUN_LEN = 13

#: Instructions around the questions of benchmarks: of mathematics, and of HumanEval.
BOILERPLATE = (
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Write a solution to the following problem and make sure that it passes the tests:",
)

#: How many overlaps an error names.
_NUM_NAMED = 3


class BenchmarkPrompts:
    """Prompts of benchmarks, indexed by their words.

    Args:
        prompts: (where, text) of each.
    """

    def __init__(self, prompts: Iterable[tuple[str, str]]) -> None:
        self._runs: dict[tuple[str, ...], str] = {}
        # A prompt shorter than a run can only be contained whole; they are looked up by their first word.
        self._short: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for where, text in prompts:
            words = _words(text)
            if 0 < len(words) < RUN_LEN:
                self._short.setdefault(words[0], []).append((words, where))
            for run in _runs(words):
                self._runs.setdefault(run, where)

    def find(self, text: str) -> str | None:
        """Where the first benchmark prompt stands that `text` overlaps; None where it overlaps none."""
        words = _words(text)
        for run in _runs(words):
            if run in self._runs:
                return self._runs[run]
        for i, word in enumerate(words):
            for short, where in self._short.get(word, ()):
                if words[i : i + len(short)] == short:
                    return where
        return None


def check_no_overlap(training_prompts: Iterable[tuple[str, str]], benchmark_prompts: Iterable[tuple[str, str]]) -> None:
    """Refuse training prompts that overlap a benchmark's; both are (where, text).

    Raises:
        ValueError: names the first pairs.
    """
    benchmark = BenchmarkPrompts(benchmark_prompts)
    found = ((where, benchmark.find(text)) for where, text in training_prompts)
    refuse_overlaps([(where, other) for where, other in found if other is not None])


def refuse_overlaps(pairs: list[tuple[str, str]]) -> None:
    """Raise ValueError where there are `pairs` of a training row and the benchmark row that it overlaps."""
    if pairs:
        named = "; ".join(f"{training} and {benchmark}" for training, benchmark in pairs[:_NUM_NAMED])
        more = f" (and {len(pairs) - _NUM_NAMED} more)" if len(pairs) > _NUM_NAMED else ""
        raise ValueError(
            f"{len(pairs)} training prompts equal, contain or share {RUN_LEN} consecutive words with a benchmark "
            f"prompt: {named}{more}. Leave these training rows out, or do not report this benchmark."
        )


def read_benchmark(path_or_dataset: str) -> Iterator[tuple[str, str]]:
    """(where, text) of the prompts in a benchmark: `raw`, else all `turns`, else `prompt`, `question` or messages.

    Raises:
        ValueError: a row has none of them.
    """
    for where, row in read_rows(path_or_dataset):
        named = f"{where} ({row['id']})" if "id" in row else where
        turns = row.get("messages") or row.get("conversations")
        if turns:
            texts = [str(m["content"]) for m in read_messages(turns, where) if m["role"] == "user"]
        elif not row.get("raw") and row.get("turns"):
            texts = [str(turn) for turn in row["turns"]]
        else:
            texts = [str(row[field]) for field in ("raw", "prompt", "question") if row.get(field)][:1]
        if not texts:
            raise ValueError(
                f"{where}: a row with {sorted(row)} is not a benchmark's; it needs 'raw', 'turns', 'prompt', "
                f"'question' or 'messages'."
            )
        yield from ((named, text) for text in texts)


def _words(text: str) -> tuple[str, ...]:
    for boilerplate in BOILERPLATE:
        text = text.replace(boilerplate, " ")
    return tuple(re.findall(r"\w+", text.lower()))


def _runs(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for i in range(len(words) - RUN_LEN + 1):
        yield words[i : i + RUN_LEN]
