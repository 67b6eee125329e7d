"""The bench of the kernels refuses to report a wrong kernel, and its smoke form runs everything and writes nothing."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import REPOSITORY

BENCH = REPOSITORY / "bench"


@pytest.fixture(scope="module")
def bench_kernels() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("bench_kernels")
    finally:
        sys.path.remove(str(BENCH))


def test_wrong_kernel_stops_the_report(bench_kernels, monkeypatch, capsys, tmp_path: Path):
    """Values that are off by two percent; the kernel that is right is not named, and pytest-benchmark never starts."""
    fusion = bench_kernels.projection_cases.fusion
    right = fusion._launch

    def wrong(*arguments, **options):
        fused = right(*arguments, **options)
        return fused._replace(values=fused.values * 1.02)

    monkeypatch.setattr(fusion, "_launch" if not torch.cuda.is_available() else "feature_fusion", wrong)
    monkeypatch.setattr(bench_kernels.pytest, "main", lambda *_, **__: pytest.fail("timed a wrong kernel"))
    arguments = ["--smoke", "--kernels", "draft_inputs", "feature_fusion", "--output", str(tmp_path)]
    assert bench_kernels.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "feature_fusion tiny M=2: ours: values: largest error" in printed
    assert "draft_inputs" not in printed
    assert list(tmp_path.iterdir()) == []


def test_kernel_that_raises_is_named(bench_kernels, monkeypatch, capsys):
    inputs = bench_kernels.projection_cases.inputs

    def broken(*_):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(inputs, "_launch", broken)
    monkeypatch.setattr(inputs, "draft_inputs", broken)
    assert bench_kernels.main(["--smoke", "--kernels", "draft_inputs"]) == 1
    assert "draft_inputs tiny M=2: ours raises RuntimeError: out of shared memory" in capsys.readouterr().out


class InstantEvent:
    """Stands for a CUDA event: its time is the host's."""

    def __init__(self, **_):
        self.seconds = 0.0

    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return (later.seconds - self.seconds) * 1e3


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the GPU")
def test_report_has_times_ratios_and_reasons(bench_kernels, monkeypatch, tmp_path: Path):
    """A run as on an H200, on tiny shapes and with the host's clock: the file that floors.py reads."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # pytest-benchmark measures nothing beside other tests
    floors = importlib.import_module("floors")
    monkeypatch.setattr(torch.cuda, "Event", InstantEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(
        bench_kernels, "cases", lambda kernels, _: [floors.Case(one, bench_kernels.TINY, 2) for one in kernels]
    )
    monkeypatch.setattr(bench_kernels, "measure_machine", lambda: bench_kernels.Machine(4e12, 2e-6))
    monkeypatch.setattr(bench_kernels, "ColdCache", lambda: lambda: None)
    monkeypatch.setattr(bench_kernels, "captured", lambda run: pytest.fail("captures on a CPU"))
    monkeypatch.setattr(bench_kernels, "circumstances", lambda: {"machine": "1x NVIDIA H200"})
    monkeypatch.setattr(bench_kernels.Implementations, "compile_twin", does_not_compile)
    options = bench_kernels.parsed(
        ["--kernels", "draft_inputs", "draft_head", "--no-tuning", "--output", str(tmp_path)]
    )
    options.smoke = False
    monkeypatch.setattr(bench_kernels, "parsed", lambda _: options)
    assert bench_kernels.main() == 0
    rows = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    found = {(row["kernel"], row["implementation"]): row for row in rows}
    assert set(found) == {
        (kernel, name) for kernel in options.kernels for name in ("ours", "twin", "baseline", "compiled")
    }
    ours = found["draft_head", "ours"]
    assert float(ours["median_us"]) > 0
    assert int(ours["rounds"]) >= 10
    ratio = float(found["draft_head", "baseline"]["median_us"]) / float(ours["median_us"])
    assert float(ours["over_baseline"]) == pytest.approx(ratio, abs=0.01)
    assert float(ours["copy_gb_per_s"]) == 4000
    assert found["draft_head", "compiled"]["note"] == "RuntimeError: no compiler"
    assert found["draft_inputs", "twin"]["note"] == "works on a CPU's memory"
    times = floors.measured(tmp_path / "kernels.csv")
    assert times["H200", "draft_head", "tiny", "M=2"] == pytest.approx(float(ours["median_us"]) * 1e-6)


def does_not_compile(implementations, backend):
    def raises():
        raise RuntimeError("no compiler")

    if "compiled" not in implementations.missing:
        implementations.runs["compiled"] = raises


@pytest.mark.parametrize(
    ("actual", "is_found"),
    [([1.0, 2.0, 4.0], False), ([1.0, 2.0, 4.1], True), ([1.0, float("nan"), 4.0], True), ([1.0, 2.0], True)],
)
def test_difference_is_found(bench_kernels, actual, is_found):
    """NaN is a difference, and so is another shape; 0.1 of 4 is more than a step of bfloat16."""
    compared = bench_kernels.projection_cases.compared
    tolerance = bench_kernels.projection_cases.ROUNDED
    found = compared({"x": torch.tensor(actual)}, {"x": torch.tensor([1.0, 2.0, 4.0])}, {"x": tolerance})
    assert bool(found) == is_found


def test_every_kernel_with_a_floor_is_timed(bench_kernels):
    assert set(bench_kernels.PREPARE) == set(bench_kernels.WORK)


def test_smoke_run_measures_nothing(tmp_path: Path):
    """All kernels, in a process of its own as a user starts it."""
    command = [sys.executable, str(BENCH / "bench_kernels.py"), "--smoke", "--output", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    assert finished.stdout.splitlines()[-1].startswith("Nothing was measured")
    assert list(tmp_path.iterdir()) == []
