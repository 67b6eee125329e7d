"""Draft length decided in every step where it has most to lose: drafters that know nothing or all, unlike requests.

    python bench/bench_length_extremes.py hopeless    # random weights: what is lost beside plain vLLM
    python bench/bench_length_extremes.py perfect     # every draft is right: what is lost beside always the whole block
    python bench/bench_length_extremes.py mixed       # a predictable and a chaotic request in one batch

All engines are alive at once and answer the same requests, step by step in turn (decoding.py); reported are medians
over rounds and the range. Drafts that are all right are the known answer in place of what the shipped drafter says,
which costs what it always costs. Lengths of single requests come from the trace that the proposer writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from decoding import as_tokens, decode_in_turn
from rounds import measure, while_decoding
from serving_engines import Kind, flush_trace, runner_of, start_engines
from setting import DRAFTER, REPOSITORY, append_csv, circumstances, question, set_environment

K = 7
PREDICTABLE = "Count from 1 to 200, separated by commas. Begin like this: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
CHAOTIC = "Invent a strange story about a {thing}. Surprise me in every sentence."
THINGS = ("kettle", "lighthouse", "violin", "comet", "beetle", "bridge", "letter", "garden")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["hopeless", "perfect", "mixed"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=None, help="of hopeless and perfect")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    options.drafter, options.dtype = str(DRAFTER), "float32"
    set_environment()
    rows = {"hopeless": hopeless, "perfect": perfect, "mixed": mixed}[options.case](options)
    facts = {"rounds": options.rounds, "max_tokens": options.max_tokens}
    rows = [{"case": options.case} | row | facts | circumstances() for row in rows]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    append_csv(f"length_extremes_{options.case}", rows)


def hopeless(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours with a drafter of random weights over plain."""
    options.concurrency = options.concurrency or [1, 4, 16]
    with tempfile.TemporaryDirectory() as folder:
        options.drafter = str(write_random_drafter(Path(folder)))
        engines = start_engines({"plain": Kind(None, enabled=False), "auto": Kind(K)}, options)
        return [
            {"concurrency": c} | over(measure(engines, options, asks(c), while_decoding), "auto", "plain")
            for c in options.concurrency
        ]


def perfect(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours over always K, where every draft is right."""
    options.concurrency = options.concurrency or [1, 4]
    kinds = {"plain": Kind(None, enabled=False), "fixed": Kind(K, draft_length="fixed"), "auto": Kind(K)}
    engines = start_engines(kinds, options)
    rows = []
    for concurrency in options.concurrency:
        know_answers(engines, ("fixed", "auto"), concurrency, options)
        rates = measure(engines, options, asks(concurrency), while_decoding)
        row = {"concurrency": concurrency} | over(rates, "auto", "fixed") | over(rates, "fixed", "plain")
        rows.append(row | over(rates, "auto", "plain"))
    return rows


def mixed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of each of two requests in one batch, fixed lengths over ours; and how much of each was verified."""
    from vllm import SamplingParams

    options.concurrency = [2]
    kinds = {"plain": Kind(None, enabled=False)} | {f"K={k}": Kind(k, draft_length="fixed") for k in (1, 3, K)}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        engines = start_engines(kinds | {"auto": Kind(K, trace=str(trace))}, options)
        greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
        wild = SamplingParams(temperature=1.3, max_tokens=options.max_tokens, ignore_eos=True)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for number in range(options.rounds + 1):  # the first one warms up
            texts = (PREDICTABLE, CHAOTIC.format(thing=THINGS[number % len(THINGS)]))
            requests = list(zip(as_tokens(engines["auto"], texts), (greedy, wild)))
            decoded = decode_in_turn(engines, requests)
            for name, one in decoded.items() if number else ():
                times = [end - begin for begin, end in zip(one.began, one.ended)]
                seconds[name].append((times[0], times[1]))
        flush_trace(engines["auto"])
        lengths = _verified_by_request(trace, skipped=2)
    rows = []
    for place, label in enumerate(("predictable", "chaotic")):
        mine = [times[place] for times in seconds["auto"]]
        row: dict[str, Any] = {"request": label, "verified per step": f"{statistics.mean(lengths[place::2]):.2f}"}
        for name in kinds:
            ratios = [theirs[place] / ours for theirs, ours in zip(seconds[name], mine)]
            row |= spread(f"{name}: seconds over ours", ratios)
        rows.append(row)
    return rows


def _verified_by_request(trace: Path, skipped: int) -> list[float]:
    """Mean tokens verified per step of each request in the order of their arrival, without the first few."""
    from vllm_dflash.draft_length import read_trace

    cycles: dict[str, list[int]] = {}
    for step in read_trace(trace).steps:
        for cycle in step.cycles:
            cycles.setdefault(cycle.id, []).append(cycle.verified)
    return [statistics.mean(found) for found in list(cycles.values())[skipped:]]


def write_random_drafter(folder: Path) -> Path:
    """The shipped drafter with every matrix drawn anew, at its own scale; `folder`."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = load_file(DRAFTER / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            tensors[name] = (torch.randn(tensor.shape) * tensor.float().std()).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((DRAFTER / "config.json").read_text())
    config.pop("acceptance_rates", None)  # they are those of the trained one
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def know_answers(engines: dict[str, Any], taught: Sequence[str], concurrency: int, options: argparse.Namespace) -> None:
    """Drafts of the taught engines become what the plain one answers to the questions of all rounds."""
    from vllm import SamplingParams

    sys.path.append(str(REPOSITORY / "tests"))
    from oracle_drafts import OracleDrafts

    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    texts = [text for number in range(options.rounds + 1) for text in asks(concurrency)(number)]
    outputs = engines["plain"].chat([[{"role": "user", "content": text}] for text in texts], sampling, use_tqdm=False)
    for name in taught:
        runner = runner_of(engines[name])
        oracle = OracleDrafts(SimpleNamespace(runner=runner), right=1.0)  # type: ignore[arg-type]
        runner.take_draft_token_ids = oracle.take_draft_token_ids
        for output in outputs:
            oracle.learn(output.prompt_token_ids, output.outputs[0].token_ids)


def asks(concurrency: int) -> Any:
    """The questions of a round."""
    return lambda number: [question(number, i) for i in range(concurrency)]


def over(rates: dict[str, list[float]], name: str, other: str) -> dict[str, str]:
    return spread(f"{name} over {other}", [a / b for a, b in zip(rates[name], rates[other])])


def spread(name: str, ratios: list[float]) -> dict[str, str]:
    return {name: f"{statistics.median(ratios):.3f}", f"{name}, range": f"{min(ratios):.2f}-{max(ratios):.2f}"}


if __name__ == "__main__":
    main()
