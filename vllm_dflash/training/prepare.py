"""`vllm-dflash prepare`: text with the target's answers becomes token ids with a loss mask, ready for training.

    rows (data.py) -> overlap with benchmarks? (overlap.py) -> loop at the end? (loops.py) -> output

The output is optional: training reads the same rows. It pays where data is checked, cut and looked at once and then
trained on many times.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.atomic import write_atomically
from vllm_dflash.training.chat import load_tokenizer
from vllm_dflash.training.data import Example, to_example
from vllm_dflash.training.loops import cut_loop
from vllm_dflash.training.overlap import BenchmarkPrompts, read_benchmark, refuse_overlaps
from vllm_dflash.training.rows import read_rows


@dataclass
class _Counts:
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    supervised: int = 0
    unanswered: int = 0  # no answer token within the maximum length
    loops: int = 0  # examples that end in a loop, cut or dropped
    loop_tokens: int = 0  # tokens not written because of that
    overlaps: list[tuple[str, str]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--target", required=True, help="target whose tokenizer and chat template are used")
    parser.add_argument(
        "--data", required=True, nargs="+", help="files, folders or Hugging Face data sets with answers"
    )
    parser.add_argument("--output", required=True, help="file to write, .jsonl or .jsonl.xz")
    parser.add_argument(
        "--max-length", "--seq-length", type=int, default=2048, help="longest example, in tokens (default %(default)s)"
    )
    loops = parser.add_mutually_exclusive_group()
    loops.add_argument("--cut-loops", action="store_true", help="keep one round of a loop that an answer ends in")
    loops.add_argument("--drop-loops", action="store_true", help="leave out answers that end in a loop")
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="BENCH",
        help="benchmarks to be measured later: refuse data that repeats their prompts",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the data; returns the exit code.

    Raises:
        ValueError: a row cannot be used, no row is left, or one repeats a benchmark prompt; nothing is written then.
    """
    output = Path(args.output)
    if not output.name.endswith((".jsonl", ".jsonl.xz")):
        raise ValueError(f"--output is '{output}'; its name must end in .jsonl or .jsonl.xz.")
    tokenizer = load_tokenizer(args.target)
    benchmark = BenchmarkPrompts(prompt for path in args.exclude for prompt in read_benchmark(path))
    counts = _Counts()

    def write(temporary: Path) -> None:
        opener = lzma.open if output.suffix == ".xz" else open
        with opener(temporary, "wt", encoding="utf-8") as file:
            for example in _examples(args, tokenizer, benchmark, counts):
                file.write(_line(example))
        refuse_overlaps(counts.overlaps)
        if counts.examples == 0:
            raise ValueError(
                f"none of the {counts.rows} rows in {', '.join(args.data)} is left: {counts.unanswered} have no answer "
                f"within {args.max_length} tokens, {counts.loops} end in a loop. Give other data, or a larger "
                f"--max-length."
            )

    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, write)
    _report(counts, args)
    return 0


def _examples(
    args: argparse.Namespace, tokenizer: Any, benchmark: BenchmarkPrompts, counts: _Counts
) -> Iterator[Example]:
    for where, row in (pair for path in args.data for pair in read_rows(path)):
        counts.rows += 1
        example = to_example(row, where, tokenizer, args.max_length)
        if example is None:
            counts.unanswered += 1
            continue
        cut = cut_loop(example) if args.cut_loops or args.drop_loops else example
        if cut is not example:
            counts.loops += 1
            counts.loop_tokens += len(example.input_ids) - (0 if args.drop_loops else len(cut.input_ids))
            if args.drop_loops:
                continue
        overlap = benchmark.find(_prompt_text(row, example, tokenizer))
        if overlap is not None:
            counts.overlaps.append((f"{where} ({example.id})", overlap))
        counts.examples += 1
        counts.tokens += len(cut.input_ids)
        counts.supervised += sum(cut.loss_mask)
        yield cut


def _prompt_text(row: dict[str, Any], example: Example, tokenizer: Any) -> str:
    """What the target was asked; of running text, all of it."""
    if "text" in row:
        return str(row["text"])
    asked = [token for token, supervised in zip(example.input_ids, example.loss_mask) if not supervised]
    return str(tokenizer.decode(asked, skip_special_tokens=True))


def _line(example: Example) -> str:
    row = {
        "id": example.id,
        "source": example.source,
        "input_ids": example.input_ids,
        "loss_mask": [int(supervised) for supervised in example.loss_mask],
    }
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def _report(counts: _Counts, args: argparse.Namespace) -> None:
    print(f"{counts.rows} rows read, {counts.examples} examples written to '{args.output}'")
    print(f"{counts.tokens} tokens, {counts.supervised} of them supervised")
    print(f"{counts.unanswered} rows dropped: no answer within {args.max_length} tokens")
    if args.cut_loops or args.drop_loops:
        verb = "dropped" if args.drop_loops else "cut"
        print(f"{counts.loops} answers end in a loop and were {verb}, {counts.loop_tokens} tokens less")
    if args.exclude:
        print(f"no prompt repeats one of {', '.join(args.exclude)}")
