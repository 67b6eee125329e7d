"""Throughput of draft length policies against concurrency and context, by simulation.

    python bench/simulate.py                                  # H200 and B200 rooflines, four targets: minutes
    python bench/simulate.py --costs cpu --drafter smollm2    # this machine's stand-in
    python bench/simulate.py --costs FILE.json --trace FILE.jsonl
    python bench/simulate.py --costs "H200 Qwen3-8B" --concurrency 1 32 --context 1024 --steps 500

R requests are always running; one that ends is replaced. Compared, by expected tokens per second:

plain     vLLM without a drafter: no drafts, no draft pass, no context K/V.
fixed K   every request drafts and verifies K tokens in every step. From one acceptance curve for all cells; scaled by
          what the best K of the cell gains on the cell's own text.
table     vLLM's table from batch size to K (`num_speculative_tokens_per_batch_size`), the best there is: for every
          concurrency the K out of 0..K_max with the highest geometric mean over contexts. It cannot know the context.
oracle    knows the true costs; before the draft pass the text's true difficulty at each coming position, of every
          request; after it the true probability that each position of each block is accepted. It knows neither
          outcomes, nor a block's own noise before that block is drafted, nor what follows the next block. In every step
          it takes the requests (best 0, 1/8, ..., 8/8 of them by expected acceptance), then the lengths, with the most
          expected tokens per second of the step.
ours      the served controller: costs from a noisy profile, corrected from noisy times with pauses (1 step in 200 takes
          five times as long); acceptance from miscalibrated confidences, learnt from outcomes. Context K/V of plain
          steps wait as they do in serving. The first steps, in which it learns, are counted for nobody.

With a trace, "oracle" knows outcomes and is a bound that nothing reaches. What is synthetic is said in the output.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from acceptance_process import HOPELESS, QWEN3, SMOLLM2, Process, RecordedText, SyntheticText
from length_policies import Cell, Fixed, Oracle, Ours
from rich.console import Console
from simulation_report import summarise, table_of, write
from step_costs import ARCHITECTURES, MACHINES, Roofline, StepCosts, cpu_stand_in, measured_costs, step_size, timed

from vllm_dflash.draft_length import BACKLOG_ROWS, read_trace

RESULTS = Path(__file__).resolve().parent / "results"
PROCESSES = {"qwen3": QWEN3, "smollm2": SMOLLM2, "hopeless": HOPELESS}
TextMaker = Callable[[int, int], Any]  # requests, seed -> text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", nargs="+", default=["rooflines"], help="rooflines, their names, cpu, or JSON files")
    parser.add_argument("--drafter", choices=PROCESSES, default="qwen3", help="synthetic acceptance process")
    parser.add_argument("--trace", type=Path, help="replay this trace instead")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--context", type=int, nargs="+", default=[1024 * 2**i for i in range(8)])
    parser.add_argument("--steps", type=int, default=0, help="per cell; default 1500 / concurrency, at least 150")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of simulation.csv and the plots")
    options = parser.parse_args()

    process = PROCESSES[options.drafter]
    make_text, acceptance, num_positions = text_source(options.trace, process)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"acceptance: {acceptance}\ntimes: computed, not measured; see bench/step_costs.py")
    rows: list[dict[str, Any]] = []
    curve = accepted_by_length(make_text, num_positions, options.seed)
    for costs in chosen_costs(options.costs):
        found = []
        for context in options.context:
            for concurrency in options.concurrency:
                if costs.fits(concurrency, context):
                    cell = Cell(costs, context, concurrency, num_positions)
                    found.append(run_cell(cell, make_text, curve, options))
        add_table(found, num_positions)
        console.print(table_of(costs.name, found))
        rows += found
    label = options.trace.stem if options.trace else options.drafter
    write(rows, options.output, label, {"acceptance": acceptance, "seed": options.seed})
    summarise(rows, console)


def text_source(trace_file: Path | None, process: Process) -> tuple[TextMaker, str, int]:
    """How to make text, what to call it, K."""
    if trace_file is None:
        return lambda n, seed: SyntheticText(process, n, seed), f"synthetic, {process.name}", process.num_positions
    trace = read_trace(trace_file)
    return lambda n, seed: RecordedText(trace, n, seed), f"trace {trace_file.name}", trace.num_speculative_tokens


def chosen_costs(names: list[str]) -> list[StepCosts]:
    rooflines = {r.name: r for r in (Roofline(machine, model) for machine in MACHINES for model in ARCHITECTURES)}
    chosen: list[StepCosts] = []
    for name in names:
        if name == "rooflines":
            chosen += rooflines.values()
        elif name == "cpu":
            chosen.append(cpu_stand_in())
        elif name in rooflines:
            chosen.append(rooflines[name])
        elif Path(name).is_file():
            chosen.append(measured_costs(Path(name)))
        else:
            raise SystemExit(f"--costs {name!r} is no file and none of: rooflines, cpu, {', '.join(rooflines)}.")
    return chosen


def accepted_by_length(make_text: TextMaker, num_positions: int, seed: int) -> np.ndarray:
    """[K + 1] expected accepted tokens of a step that verifies 0, 1, ..., K; the text goes on at each K's own pace."""
    curve = np.zeros(num_positions + 1)
    for length in range(1, num_positions + 1):
        text, total = make_text(64, seed), 0.0
        for _ in range(300):
            probabilities, _ = text.blocks()
            total += np.cumprod(probabilities, 1)[:, :length].sum()
            text.advance(1 + np.minimum(text.runs(probabilities), length))
        curve[length] = total / (64 * 300)
    return curve


def run_cell(cell: Cell, make_text: TextMaker, curve: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of all policies but the table, which needs the other contexts."""
    steps = options.steps or max(1500 // cell.concurrency, 150)
    lengths = cell.context + 256
    rates = [fixed_rate(cell, length, lengths, curve) for length in range(cell.num_positions + 1)]
    row: dict[str, Any] = {
        "costs": cell.costs.name, "context": cell.context, "concurrency": cell.concurrency, "plain": rates[0],
    }  # fmt: skip
    best = int(np.argmax(rates[1:])) + 1
    fixed = simulate(cell, make_text(cell.concurrency, options.seed), Fixed(cell, best), steps)["rate"]
    # A few requests are not the mean of all, and the others below see these few.
    row |= {f"fixed_{length}": rates[length] * fixed / rates[best] for length in range(1, cell.num_positions + 1)}
    row["oracle"] = simulate(cell, make_text(cell.concurrency, options.seed), Oracle(cell), steps)["rate"]
    ours = simulate(cell, make_text(cell.concurrency, options.seed), Ours(cell, options.seed), steps)
    row["ours"], row["ours_tau"], row["ours_off"] = ours["rate"], ours["tau"], ours["off"]
    return row


def fixed_rate(cell: Cell, length: int, context: float, curve: np.ndarray) -> float:
    """Tokens per second where every request always verifies `length` tokens."""
    n, costs = cell.concurrency, cell.costs
    tokens = n * (1 + length)
    seconds = costs.target(tokens, n, n * context, tokens * context)
    if length:
        seconds = seconds + costs.context(tokens) + costs.draft(n, length, cell.block_size(length), n * context)
    return float(n * (1 + curve[length]) / seconds)


def simulate(cell: Cell, text: Any, policy: Any, steps: int) -> dict[str, float]:
    """Expected tokens per second, tokens per step and request, and share of steps without a draft pass."""
    warm_up = max(steps // 4, 50)
    tokens = seconds = off = 0.0
    waiting = 0  # context rows
    for step in range(warm_up + steps):
        probabilities, confidences = text.blocks()
        context_lens = cell.context + text.offset
        drafting, num_positions, lengths = policy.decide(text, context_lens, probabilities, confidences)
        block_size = cell.block_size(num_positions)
        size = step_size(cell.concurrency, lengths, context_lens, drafting, num_positions, block_size)
        can_wait = not size.num_drafting and not size.num_verified and waiting + cell.concurrency <= BACKLOG_ROWS
        size = dataclasses.replace(size, context_rows=0 if can_wait else waiting + size.context_rows)
        waiting = waiting + cell.concurrency if can_wait else 0
        accepted = np.minimum(text.runs(probabilities), lengths)
        if step >= warm_up:
            survival = np.cumprod(probabilities, 1)
            is_verified = np.arange(cell.num_positions) < lengths[:, None]
            # Expected tokens, not drawn ones: half of the noise for nothing.
            tokens += cell.concurrency + float((survival * is_verified).sum())
            seconds += timed(cell.costs, size, np.zeros(3)).seconds
            off += size.num_drafting == 0
        policy.observe(drafting, lengths, accepted, size, text.advance(1 + accepted))
    return {"rate": tokens / seconds, "tau": tokens / steps / cell.concurrency, "off": off / steps}


def add_table(rows: list[dict[str, Any]], num_positions: int) -> None:
    """Add to each cell the rate of the table's K for its concurrency, and the best fixed K of the cell."""
    names = ["plain", *(f"fixed_{length}" for length in range(1, num_positions + 1))]
    for row in rows:
        same = [other for other in rows if other["concurrency"] == row["concurrency"]]
        length = int(np.argmax([sum(np.log(other[name]) for other in same) for name in names]))
        row["table"], row["table_K"] = row[names[length]], length
        row["best_fixed_K"] = int(np.argmax([row[name] for name in names]))
        row["best_fixed"] = row[names[row["best_fixed_K"]]]


if __name__ == "__main__":
    main()
