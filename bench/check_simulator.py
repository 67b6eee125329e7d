"""Does the simulator say what serving measures? Settings that it was fitted to neither by cost nor by text.

    python bench/check_simulator.py

One engine is traced at concurrency 1 and 8, with requests that draft and verify K tokens in every step and with some
that never draft: its timed steps are the cost table, its outcomes the text. Then settings that are not in the trace are
simulated from both and measured in the same process: other fixed lengths, lengths decided in every step, other
concurrencies. Tokens per second are counted as the simulator does, see decoding.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from decoding import decode, greedy
from length_policies import Cell, Fixed, Ours
from serving_engines import Kind, flush_trace, start_engines
from setting import DRAFTER, append_csv, circumstances, question, set_environment
from simulate import simulate
from step_costs import MeasuredCosts

K = 7
FITTED = (1, 8)  # concurrencies
#: Fixed length, or None for lengths decided in every step; concurrency.
HELD_OUT: tuple[tuple[int | None, int], ...] = ((3, 4), (1, 16), (None, 2), (None, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=32, help="answered in every setting")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=400, help="simulated")
    parser.add_argument("--seeds", type=int, default=5, help="of simulations, the mean of which is compared")
    options = parser.parse_args()
    options.drafter, options.dtype, options.concurrency = str(DRAFTER), "float32", [max(c for _, c in HELD_OUT)]
    set_environment()
    from vllm_dflash.draft_length import CostModel, read_trace

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        kinds = {K: Kind(K, draft_length="fixed", trace=str(file)), None: Kind(K)}
        kinds |= {k: Kind(k, draft_length="fixed") for k, _ in HELD_OUT if k is not None}
        engines = start_engines(kinds, options)  # type: ignore[arg-type]
        for concurrency in FITTED:
            for drafts in (False, True):
                tokens_per_second(engines[K], concurrency, options, drafts)
        flush_trace(engines[K])
        trace = read_trace(file)
    costs = MeasuredCosts("this machine", CostModel.from_profile(decoding_steps(trace)))
    rows = []
    for length, concurrency in HELD_OUT:
        measured, num_prompt = tokens_per_second(engines[length], concurrency, options)
        cell = Cell(costs, num_prompt, concurrency, K, is_causal=True)
        rates = [simulated(cell, length, trace, seed, options.steps) for seed in range(options.seeds)]
        row = {"setting": "decided" if length is None else f"K={length}", "concurrency": concurrency}
        row |= {"measured": f"{measured:.1f}", "simulated": f"{statistics.mean(rates):.1f}"}
        row |= {"simulated over measured": f"{statistics.mean(rates) / measured:.3f}"}
        row |= {"range over seeds": f"{min(rates) / measured:.2f}-{max(rates) / measured:.2f}"}
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row | {"questions": options.questions, "max_tokens": options.max_tokens} | circumstances())
    append_csv("simulator_check", rows)


def simulated(cell: Cell, length: int | None, trace: Any, seed: int, steps: int) -> float:
    """Tokens per second of one simulation."""
    from acceptance_process import RecordedText

    policy = Ours(cell, seed) if length is None else Fixed(cell, length)
    return simulate(cell, RecordedText(trace, cell.concurrency, seed), policy, steps)["rate"]


def decoding_steps(trace: Any) -> list[Any]:
    """Timed steps without prompts, whose rows the simulator does not have."""
    steps = [traced.step for traced in trace.steps]
    return [step for step in steps if step.size.num_tokens <= (K + 1) * step.size.num_requests]


def tokens_per_second(
    llm: Any, concurrency: int, options: argparse.Namespace, drafts: bool = True
) -> tuple[float, int]:
    """Of all questions in batches of `concurrency`, while whole batches are decoded; and the mean prompt's tokens."""
    tokens, seconds, prompts = 0, 0.0, []
    for first in range(0, options.questions - concurrency + 1, concurrency):
        texts = [question(index // 8, index % 8) for index in range(first, first + concurrency)]
        requests = greedy(llm, texts, options.max_tokens, drafts)
        decoded = decode(llm, requests)
        tokens, seconds = tokens + decoded.tokens, seconds + decoded.seconds
        prompts += [len(prompt) for prompt, _ in requests]
    return tokens / seconds, round(statistics.mean(prompts))


if __name__ == "__main__":
    main()
