"""Draft length decided in every step, beside plain vLLM, fixed K and vLLM's native DFlash, at several loads.

    python bench/bench_draft_length.py                                     # questions made here
    python bench/bench_draft_length.py --data gsm8k.jsonl mt_bench.jsonl   # rows with 'prompt'; a task per file

All engines are alive at once and answer the same prompts, step by step in turn; tokens per second are counted while all
requests of a batch are decoded (decoding.py). Reported is the median over rounds of each engine's, divided by plain
vLLM's in the same round, with the range; and for ours by the best fixed K of the cell.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rounds import measure, while_decoding
from serving_engines import Kind, start_engines
from setting import DRAFTER, append_csv, circumstances, question, set_environment

AUTO = "ours, auto"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], metavar="JSONL")
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 3, 7], metavar="K")
    parser.add_argument("--most", type=int, default=7, metavar="K", help="of decided lengths")
    parser.add_argument("--native", type=int, default=7, metavar="K", help="vLLM's default: the whole block")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    set_environment()

    kinds = {"plain": Kind(None, enabled=False), "native": Kind(options.native, enabled=False)}
    kinds |= {f"ours, K={k}": Kind(k, draft_length="fixed") for k in options.fixed}
    kinds[AUTO] = Kind(options.most)
    engines = start_engines(kinds, options)
    cells = []
    for task, ask in tasks(options.data).items():
        for concurrency in options.concurrency:
            rates = measure(engines, options, lambda n, ask=ask, c=concurrency: ask(n, c), while_decoding)
            cell = {"task": task, "concurrency": concurrency} | ratios(rates)
            print("  ".join(f"{name} {value}" for name, value in cell.items()), flush=True)
            cells.append(cell)
            facts = {"rounds": options.rounds, "max_tokens": options.max_tokens, "dtype": options.dtype}
            facts |= {"drafter": Path(options.drafter).name} | circumstances()
            append_csv("draft_length", [row | facts for row in rows_of(cell)])
    print("\n" + "\n".join(markdown(cells)))


def rows_of(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell as rows of the CSV, one per engine."""
    return [
        {"task": cell["task"], "concurrency": cell["concurrency"], "engine": name}
        | {"over_plain": cell[name], "range": cell[f"{name} range"]}
        | {"over_best_fixed": cell["auto over best fixed"] if name == AUTO else ""}
        for name in engines_in(cell)
    ]


def engines_in(cell: dict[str, Any]) -> list[str]:
    """Names of the engines that a cell has ratios of."""
    return [name for name in cell if f"{name} range" in cell]


def markdown(cells: list[dict[str, Any]]) -> list[str]:
    """Lines of README's table."""
    names = engines_in(cells[0])
    header = ["task", "concurrency", *names, "range", "over best fixed K"]
    values = [
        [c["task"], c["concurrency"], *(c[name] for name in names), c[f"{AUTO} range"], c["auto over best fixed"]]
        for c in cells
    ]
    return ["| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *values]]


def tasks(files: list[str]) -> dict[str, Callable[[int, int], list[str]]]:
    """Task -> the questions of a round at a concurrency, new ones in every round."""
    if not files:
        return {"arithmetic": lambda round_number, n: [question(round_number, i) for i in range(n)]}
    return {Path(file).stem: _from_file(Path(file)) for file in files}


def _from_file(file: Path) -> Callable[[int, int], list[str]]:
    prompts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    short = [prompt for prompt in prompts if len(prompt) < 1200]  # with the answer within 512 tokens
    return lambda round_number, n: [short[(round_number * n + i) % len(short)] for i in range(n)]


def ratios(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Median and range of each engine over plain, and of ours over the best fixed K of this cell."""
    cell: dict[str, Any] = {}
    for name, mine in rates.items():
        over_plain = [a / b for a, b in zip(mine, rates["plain"])]
        if name != "plain":
            cell[name] = f"{statistics.median(over_plain):.3f}"
            cell[f"{name} range"] = f"{min(over_plain):.2f}-{max(over_plain):.2f}"
    fixed = [name for name in rates if name.startswith("ours, K=")]
    best = max(fixed, key=lambda name: float(cell[name]))
    over_best = [a / b for a, b in zip(rates[AUTO], rates[best])]
    return cell | {"best fixed": best, "auto over best fixed": f"{statistics.median(over_best):.3f}"}


if __name__ == "__main__":
    main()
