"""Throughput of plain vLLM, its native DFlash and this plugin, interleaved in one process.

    python bench/bench_serving.py                       # what README's table comes from
    python bench/bench_serving.py --concurrency 1 --rounds 2

All engines are alive at once and answer the same prompts in turn, round after round, so that whatever else the machine
does falls on all alike. Reported is the median over rounds of each engine's tokens per second, divided by another
engine's in the same round; absolute times are in the CSV for context only. Greedy, float32: texts are checked to be the
same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from rounds import Answered, measure
from serving_engines import Kind, start_engines
from setting import DRAFTER, append_csv, circumstances, question, set_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[3, 7], metavar="K")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    set_environment()

    kinds = {"plain": Kind(None, enabled=False)}
    for num_drafted in options.num_speculative_tokens:
        kinds[f"native K={num_drafted}"] = Kind(num_drafted, enabled=False)
        kinds[f"ours K={num_drafted}"] = Kind(num_drafted, draft_length="fixed")
    engines = start_engines(kinds, options)
    rows = []
    for concurrency in options.concurrency:
        rates = measure(engines, options, lambda n, c=concurrency: [question(n, i) for i in range(c)], one_by_one)
        rows += summarise(rates, concurrency, options)
    append_csv("serving", rows)
    print_table(rows)


def one_by_one(engines: dict[str, Any], questions: list[str], max_tokens: int) -> dict[str, Answered]:
    """For `measure`: tokens per second from the first prompt to the last answer."""
    return {name: _answer_as_one_batch(llm, questions, max_tokens) for name, llm in engines.items()}


def _answer_as_one_batch(llm: Any, questions: list[str], max_tokens: int) -> Answered:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": text}] for text in questions], sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    return Answered(len(questions) * max_tokens / seconds, [list(output.outputs[0].token_ids) for output in outputs])


def summarise(rates: dict[str, list[float]], concurrency: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, mine in rates.items():
        native = rates.get(name.replace("ours", "native"), mine)
        over_plain = [a / b for a, b in zip(mine, rates["plain"])]
        over_native = [a / b for a, b in zip(mine, native)]
        rows.append(
            {
                "engine": name,
                "concurrency": concurrency,
                "over_plain": f"{statistics.median(over_plain):.3f}",
                "over_plain_range": f"{min(over_plain):.2f}-{max(over_plain):.2f}",
                "over_native": f"{statistics.median(over_native):.3f}" if name.startswith("ours") else "",
                "over_native_range": f"{min(over_native):.2f}-{max(over_native):.2f}"
                if name.startswith("ours")
                else "",
                "tokens_per_second": f"{statistics.median(mine):.1f}",
                "rounds": options.rounds,
                "max_tokens": options.max_tokens,
                "dtype": options.dtype,
                "drafter": Path(options.drafter).name,
                **circumstances(),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    shown = ("engine", "concurrency", "over_plain", "over_plain_range", "over_native", "over_native_range")
    print("  ".join(f"{name:>17}" for name in shown))
    for row in rows:
        print("  ".join(f"{row[name]!s:>17}" for name in shown))


if __name__ == "__main__":
    main()
