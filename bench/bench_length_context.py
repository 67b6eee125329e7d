"""Draft length of one request that grows from some 60 tokens to 8,000, and of a short one after it, beside plain vLLM.

    python bench/bench_length_context.py

Text is sampled at temperature 0.8, for greedy text of a small model repeats itself over such lengths. Each engine
answers alone, one after the other; a ratio of two ranges of 512 tokens and more is what can be told from one run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_length_extremes import CHAOTIC, THINGS, K
from decoding import as_tokens
from serving_engines import Kind, flush_trace, start_engines
from setting import DRAFTER, append_csv, circumstances, question, set_environment

#: Ranges of lengths begin here.
STARTS = (0, 512, 1024, 2048, 4096, 6144)
SHORT = "short again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=7800, help="of the request that grows")
    parser.add_argument("--short-tokens", type=int, default=128, help="of the short one")
    options = parser.parse_args()
    options.drafter, options.dtype, options.concurrency = str(DRAFTER), "float32", [1]
    set_environment()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        kinds = {"plain": Kind(None, enabled=False), "auto": Kind(K, trace=str(trace))}
        engines = start_engines(kinds, options, max_model_len=8192)
        seconds = {name: seconds_by_length(engine, options) for name, engine in engines.items()}
        flush_trace(engines["auto"])
        verified = verified_by_length(trace)
    rows = []
    for start in (*STARTS, SHORT):
        if start in verified and start in seconds["plain"]:
            ratio = f"{seconds['plain'][start] / seconds['auto'][start]:.3f}"
            row = {"context from": start, "verified per step": f"{verified[start]:.2f}", "plain over ours": ratio}
            rows.append(row | circumstances())
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    append_csv("length_context", rows)


def seconds_by_length(llm: Any, options: argparse.Namespace) -> dict[int | str, float]:
    """Start of a range of lengths -> seconds per token of the growing request in it; and of the short one."""
    from vllm import SamplingParams

    growing = SamplingParams(temperature=0.8, max_tokens=options.max_tokens, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=options.short_tokens, ignore_eos=True)
    found: dict[int | str, float] = dict(_seconds_by_length(llm, CHAOTIC.format(thing=THINGS[0]), growing))
    return found | {SHORT: _seconds_by_length(llm, question(1, 1), short)[0]}


def _seconds_by_length(llm: Any, text: str, sampling: Any) -> dict[int, float]:
    engine = llm.llm_engine
    [prompt] = as_tokens(llm, [text])
    engine.add_request(text, {"prompt_token_ids": prompt}, sampling)
    spent: dict[int, list[float]] = {}
    known, last = 0, time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            now, count = time.perf_counter(), len(output.outputs[0].token_ids)
            if known:  # the first token took the prompt
                entry = spent.setdefault(_range(len(prompt) + known), [0.0, 0.0])
                entry[0], entry[1] = entry[0] + now - last, entry[1] + count - known
            known, last = count, now
    return {start: total / tokens for start, (total, tokens) in spent.items()}


def verified_by_length(trace: Path) -> dict[int | str, float]:
    """Mean tokens verified per step by range of context, steps without drafts included."""
    from vllm_dflash.draft_length import read_trace

    found: dict[int | str, list[int]] = {}
    longest = 0
    for step in read_trace(trace).steps:
        length = step.step.size.context_tokens
        longest = max(longest, length)
        found.setdefault(SHORT if length < longest / 2 else _range(length), []).append(step.step.size.num_verified)
    return {start: statistics.mean(counts) for start, counts in found.items()}


def _range(length: int) -> int:
    return max(start for start in STARTS if start <= length)


if __name__ == "__main__":
    main()
