"""Time of every kernel against its twin, the compiled twin and what vLLM launches, as a fraction of its floor.

    python bench/bench_kernels.py                          # on a GPU; appends to bench/results/kernels.csv
    python bench/bench_kernels.py --models Qwen3-8B --seconds 200 --output FOLDER
    python bench/bench_kernels.py --smoke                  # tiny shapes in Triton's interpreter; measures nothing

First every kernel is compared with its twin on the very shapes that are timed, on a GPU through a CUDA graph. If one
differs, the script says which and exits with 1: there are no times of wrong kernels. Then pytest-benchmark runs the
function at the end of this file for each implementation; options after `--` are pytest's (`-- --benchmark-json=FILE`).

`median_us` is the time on the device from a cold cache, `wall_us` includes the host's launches: see gpu_timing.py.
Without a GPU the script always does what --smoke does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it at import

import attention_cases  # noqa: E402
import head_cases  # noqa: E402
import projection_cases  # noqa: E402
from floors import MODELS, RESULTS, WORK, Case, Model, cases, fraction_of_floor, gpu_named  # noqa: E402
from gpu_timing import ColdCache, Machine, Tick, captured, measure_machine, rounds_for, wall  # noqa: E402
from implementations import Implementations  # noqa: E402
from setting import REPOSITORY, append_csv, circumstances  # noqa: E402

PREPARE = {
    kernel: getattr(module, kernel)
    for module in (projection_cases, attention_cases, head_cases)
    for kernel in WORK
    if hasattr(module, kernel)
}
TINY = Model("tiny", 64, 4, 2, 32, 300, num_layers=2, num_features=2, num_query_per_req=4)
ROUND_SECONDS = 0.1  # of measuring one implementation


def main(arguments: list[str] | None = None) -> int:
    """0: measured; 1: a kernel is wrong or a measurement failed."""
    bench = Bench(parsed(arguments))
    with bench.tuning():
        problems = bench.gate()
        if problems:
            print("No times are reported, because kernels differ from their twins:", *problems, sep="\n  ")
            return 1
        disable = ["--benchmark-disable"] if bench.options.smoke else ["--benchmark-columns=median,iqr,rounds"]
        if not bench.options.smoke:  # `timeout` ends the measurements, and what they found is still written
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        status = int(pytest.main([__file__, "-q", *disable, *bench.options.pytest], plugins=[bench]))
    if bench.options.smoke:
        print("Nothing was measured: each implementation ran once, on tiny shapes. No CSV was written.")
    else:
        bench.write()
    return min(status, 1)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--kernels", nargs="+", choices=list(PREPARE), default=list(PREPARE))
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--no-tuning", action="store_true", help="take the first configuration of each kernel")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("pytest", nargs="*", help="options of pytest, after --")
    options = parser.parse_args(arguments)
    options.smoke |= not torch.cuda.is_available()
    return options


class Bench:
    """The gate, and a plugin of pytest that hands out what is to be measured and keeps what came out."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # Without its caching allocator (for a memory checker), torch allocates in a way that no graph can hold.
        self.captures = self.device == "cuda" and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
        self.started = time.monotonic()
        models = [TINY] if options.smoke else [model for model in MODELS if model.name in options.models]
        self.cases = cases(options.kernels, models)
        if options.smoke:
            tiny = {kernel: 20 if kernel == "block_attention" else 0 for kernel in options.kernels}
            self.cases = [Case(kernel, TINY, 2, context) for kernel, context in tiny.items()]
        #: Cases that passed the gate -> implementations that ran, and why others did not.
        self.passed: dict[Case, list[str]] = {}
        self.missing: dict[tuple[Case, str], str] = {}
        self.rows: list[dict[str, Any]] = []
        self._prepared: tuple[Case, Implementations] | None = None
        if self.device == "cpu":
            sys.path.append(str(REPOSITORY / "tests"))
            import triton_interpreter

            triton_interpreter.install()
        self.machine: Machine | None = None if options.smoke else measure_machine()
        self.flush = None if options.smoke else ColdCache()

    def tuning(self) -> contextlib.AbstractContextManager[None]:
        """Within it, tile sizes are measured; what was chosen goes to a file beside the results."""
        from vllm_dflash.triton_kernels.tuning import measuring

        if self.options.smoke or self.options.no_tuning:
            return contextlib.nullcontext()
        return measuring(self.options.output / "tuned")

    def gate(self) -> list[str]:
        """What is wrong with which kernel. With a time limit, cases that half of it does not reach are left out."""
        problems = []
        for case in self.cases:
            if time.monotonic() - self.started > self.options.seconds / 2:
                print(f"out of time: {case.name} and what comes after it is neither checked nor timed", flush=True)
                break
            found = self._check(case)
            problems += [f"{case.name}: {problem}" for problem in found]
        return problems

    def _check(self, case: Case) -> list[str]:
        implementations = self.prepared(case)
        self.missing |= {(case, name): reason for name, reason in implementations.missing.items()}
        problems, runs = [], implementations.runs
        for name in [name for name in runs if name.startswith("ours")]:
            expected = runs[name.replace("ours", "twin")]()
            try:
                if self.captures and implementations.is_capturable:
                    graph, actual = captured(runs[name])
                    graph.replay()
                else:
                    actual = runs[name]()
            except Exception as error:  # whatever a kernel raises, it is that kernel which is named
                problems.append(f"{name} raises {type(error).__name__}: {error}")
                continue
            problems += [f"{name}: {difference}" for difference in implementations.differences(actual, expected)]
        others = [
            name for name in runs if name.startswith(("baseline", "torch")) and name not in implementations.missing
        ]
        for name in others:
            try:
                runs[name]()
            except Exception as error:  # a baseline that this machine does not have is no fault of ours
                self.missing[case, name] = f"{type(error).__name__}: {error}"
        self.passed[case] = [name for name in runs if (case, name) not in self.missing]
        return problems

    def prepared(self, case: Case) -> Implementations:
        """Inputs and implementations of a case; only the last one is kept in memory."""
        if self._prepared is None or self._prepared[0] != case:
            self._prepared = None
            if self.device == "cuda":
                torch.cuda.empty_cache()
            torch.manual_seed(0)
            made = PREPARE[case.kernel](case, self.device, self.device == "cpu")
            made.compile_twin("eager" if self.options.smoke else "inductor")
            self._prepared = (case, made)
        return self._prepared[1]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        # torch.compile takes many seconds for each shape, so it comes when all else is measured.
        found = [(case, name) for case, names in self.passed.items() for name in names]
        found.sort(key=lambda one: one[1] == "compiled")
        metafunc.parametrize(("case", "name"), found, ids=[f"{case.name} {name}" for case, name in found])

    @pytest.fixture
    def bench(self) -> Bench:
        return self

    def measure(self, benchmark: Any, case: Case, name: str) -> None:
        """Run one implementation and keep its times."""
        if time.monotonic() - self.started > self.options.seconds:
            pytest.skip("out of time")
        run = self.prepared(case).runs[name]
        if self.options.smoke:
            benchmark.pedantic(run)
            return
        try:
            target, in_graph = run, False
            # Twins read values on the host, which a capture cannot hold.
            if self.captures and self.prepared(case).is_capturable and not name.startswith("twin"):
                with contextlib.suppress(RuntimeError):
                    target, in_graph = captured(run)[0].replay, True
            run()
        except Exception as error:  # torch.compile and baselines raise what they like
            self.missing[case, name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            pytest.skip(self.missing[case, name])
        benchmark.group = case.name
        rounds = rounds_for(target, ROUND_SECONDS)
        benchmark.pedantic(target, setup=self.flush, rounds=rounds, warmup_rounds=2)
        stats = benchmark.stats.stats
        self.rows.append(self._row(case, name) | {
            "median_us": f"{stats.median * 1e6:.2f}",
            "iqr_us": f"{stats.iqr * 1e6:.2f}",
            "rounds": rounds,
            "in_graph": int(in_graph),
            "wall_us": f"{statistics.median(wall(run, min(rounds, 20))) * 1e6:.1f}",
        } | self._ratios(case, stats.median))  # fmt: skip

    def _row(self, case: Case, name: str) -> dict[str, Any]:
        row = {"kernel": case.kernel, "model": case.model.name, "size": case.size, "implementation": name}
        measured = ("median_us", "iqr_us", "rounds", "in_graph", "wall_us")
        ratios = ("gb_per_s", "of_copy_bandwidth", "of_floor", "over_baseline", "note")
        return row | dict.fromkeys(measured + ratios, "")

    def _ratios(self, case: Case, seconds: float) -> dict[str, str]:
        assert self.machine is not None
        work, gpu = case.work, gpu_named(torch.cuda.get_device_name())
        rate = work.num_bytes / seconds
        return {
            "gb_per_s": f"{rate / 1e9:.1f}",
            "of_copy_bandwidth": f"{rate / self.machine.copy_bandwidth:.3f}",
            "of_floor": "" if gpu is None else f"{fraction_of_floor(seconds, work, gpu):.3f}",
        }

    def write(self) -> None:
        """Append all rows to kernels.csv, and print them."""
        assert self.machine is not None
        medians = {(row["kernel"], row["model"], row["size"], row["implementation"]): row for row in self.rows}
        for row in self.rows:
            baseline = "baseline_rope" if row["implementation"].endswith("_rope") else "baseline"
            other = medians.get((row["kernel"], row["model"], row["size"], baseline))
            if other is not None:  # how many times as fast as what vLLM launches
                row["over_baseline"] = f"{float(other['median_us']) / float(row['median_us']):.2f}"
        self.rows += [self._row(case, name) | {"note": why} for (case, name), why in self.missing.items()]
        if not self.rows:
            print("out of time before the first measurement; no CSV was written")
            return
        facts = circumstances() | {
            "triton": version("triton"),
            "tuned": int(not self.options.no_tuning),
            "copy_gb_per_s": f"{self.machine.copy_bandwidth / 1e9:.0f}",
            "launch_us": f"{self.machine.launch_seconds * 1e6:.2f}",
        }
        append_csv("kernels", [row | facts for row in self.rows], self.options.output)
        print_table(self.rows)
        print(facts)


def print_table(rows: list[dict[str, Any]]) -> None:
    shown = ("median_us", "iqr_us", "wall_us", "of_copy_bandwidth", "of_floor", "over_baseline")
    print(f"{'':<74}" + "".join(f"{name:>18}" for name in shown))
    for row in rows:
        label = " ".join(row[name] for name in ("kernel", "model", "size", "implementation"))
        print(f"{label:<74}" + "".join(f"{row[name]:>18}" for name in shown) + f"  {row['note']}")


@pytest.mark.benchmark(timer=Tick)
def test_kernel(benchmark: Any, bench: Bench, case: Case, name: str) -> None:
    """What pytest-benchmark repeats; not a test of the kernels, which the gate compared before."""
    bench.measure(benchmark, case, name)


if __name__ == "__main__":
    raise SystemExit(main())
