"""bench/simulate.py runs, and its parts are what they say."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_dflash.draft_length import DraftDecision, StepSize, TimedStep, TraceWriter, read_trace

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench_is_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def bench(module: str) -> Any:
    """A module of bench/, which is a folder of scripts and no package."""
    return importlib.import_module(module)


def write_trace(path: Path, *verified: int) -> Path:
    """Cycles of one request, which verify so many tokens; one number stands for three cycles."""
    verified = verified if len(verified) > 1 else 3 * verified
    with TraceWriter(path, 2) as writer:
        for count, accepted in zip(verified, (2, 0, 1, 2)):
            decision = DraftDecision(("a",), np.array([[0.9, 0.6]]), np.array([count]), np.zeros(1, dtype=bool))
            writer.write(TimedStep(StepSize(1, 3), 0.03), decision, [count], [min(accepted, count)])
    return path


def test_a_trace_is_replayed_and_its_table_written(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl", 2)
    command = [sys.executable, str(BENCH / "simulate.py"), "--costs", "cpu", "--trace", str(trace)]
    command += ["--concurrency", "2", "--context", "128", "--steps", "20", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "times: computed, not measured" in done.stdout
    assert (tmp_path / "simulation_trace_CPU_stand-in.png").stat().st_size > 1000
    (row,) = csv.DictReader((tmp_path / "simulation_trace.csv").open())
    # One accepted token per cycle in the mean of 2, 0 and 1.
    rates = {name: float(row[name]) for name in ("plain", "fixed_2", "oracle", "ours")}
    assert rates["oracle"] >= 0.99 * max(rates.values())
    assert rates["ours"] > 0.9 * rates["plain"]


@pytest.mark.parametrize("verified", [(2, 2, 2), (2, 2, 2, 0)], ids=["whole", "ends with drafts that nobody verified"])
def test_a_record_is_replayed_by_its_token_offsets(tmp_path, verified):
    text = bench("acceptance_process").RecordedText(read_trace(write_trace(tmp_path / "trace.jsonl", *verified)), 1, 0)
    seen = []
    for _ in range(6):
        probabilities, confidences = text.blocks()
        assert confidences.tolist() == [[0.9, 0.6]]
        seen.append(int(text.runs(probabilities)[0]))
        text.advance(np.array([1]))
    assert seen == [2, 2, 2, 0, 1, 1]  # cycles of 3, 1 and 2 tokens, one token at a time


def test_a_trace_with_cut_drafts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="verified 1 of 2 drafts of request a"):
        bench("acceptance_process").RecordedText(read_trace(write_trace(tmp_path / "trace.jsonl", 1)), 1, 0)
    with pytest.raises(ValueError, match="verified 0 of 2 drafts of request a"):
        bench("acceptance_process").RecordedText(read_trace(write_trace(tmp_path / "cut.jsonl", 2, 0, 2)), 1, 0)


def test_a_roofline_is_flat_and_then_rises():
    costs = bench("step_costs")
    h200 = costs.Roofline(costs.MACHINES[0], costs.ARCHITECTURES[1])
    tokens = np.array([1, 32, 512, 1024])
    seconds = h200.target(tokens, 1, 1000, 1000)
    # 15.1 GB of weights (embedding not read) at 0.8 of 4.8 TB/s, and a millisecond.
    assert seconds[0] == pytest.approx(15.1e9 / (0.8 * 4.8e12) + 1e-3, rel=0.05)
    assert seconds[1] < 1.02 * seconds[0]
    assert seconds[3] - seconds[2] == pytest.approx(2 * 512 * 7.57e9 / (0.7 * 989e12), rel=0.05)
    assert not h200.fits(512, 131_072)
