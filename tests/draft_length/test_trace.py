"""Traces survive what processes do, and say what is wrong with a bad one."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from vllm_dflash.draft_length import DraftDecision, StepSize, TimedStep, TraceWriter, read_trace

STEP = TimedStep(StepSize(2, 6, num_verified=4, context_tokens=30), 0.03, 0.004, 0.001)
DECISION = DraftDecision(
    ("a", "b"), np.array([[0.91239, 0.5, 0.1], [0.2, np.nan, 0.3]]), np.array([3, 1]), np.zeros(2, dtype=bool)
)


def write(path, num_steps: int = 2) -> None:
    with TraceWriter(path, 3, {"target": "tiny"}) as writer:
        for _ in range(num_steps):
            writer.write(STEP, DECISION, np.array([3, 1]), np.array([2, 0]))
        writer.write(TimedStep(StepSize(1, 1), 0.02))


def test_round_trip(tmp_path):
    write(tmp_path / "trace.jsonl")
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.num_speculative_tokens == 3
    assert trace.facts == {"target": "tiny"}
    assert [line.step for line in trace.steps] == [STEP, STEP, TimedStep(StepSize(1, 1), 0.02)]
    first, second = trace.steps[0].cycles
    assert (first.id, first.p_max, first.drafted, first.verified, first.accepted) == ("a", (0.9124, 0.5, 0.1), 3, 3, 2)
    assert (second.p_max, second.verified, second.accepted) == ((0.2, 0.0, 0.3), 1, 0)
    assert trace.steps[2].cycles == ()


def test_a_killed_process_leaves_whole_lines(tmp_path):
    program = (
        "import os, sys\n"
        "from vllm_dflash.draft_length import StepSize, TimedStep, TraceWriter\n"
        "writer = TraceWriter(sys.argv[1], 3)\n"
        "for _ in range(1000): writer.write(TimedStep(StepSize(1, 1), 0.02))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "trace.jsonl"
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -9
    assert path.read_bytes().endswith(b"\n")
    assert 1000 - 64 <= len(read_trace(path).steps) <= 1000


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, 3)
    writer.write(STEP)
    import os

    real, calls = os.write, []

    def fills_up(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(file, data[:20])

    monkeypatch.setattr("vllm_dflash.draft_length.trace.os.write", fills_up)
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    monkeypatch.undo()
    writer.write(STEP)
    writer.close()
    writer.close()
    assert len(read_trace(path).steps) == 1


def test_writing_starts_a_new_file(tmp_path):
    for _ in range(2):
        write(tmp_path / "trace.jsonl")
    assert len(read_trace(tmp_path / "trace.jsonl").steps) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.replace('"accepted": 2', '"accepted": 9'), r"line 2: request a: .*9, 3 and 3"),
        (lambda line: line.replace('"step"', '"stop"'), r"line 2: \"kind\" must be \"step\""),
        (lambda line: line.replace('"num_tokens"', '"tokens"'), r"line 2: not a timed step"),
        (lambda line: line.replace('"cycles"', '"cycle"'), r"line 2: 'cycles'"),
        (lambda line: line[:40], r"line 2 is not JSON"),
        (lambda line: "[1]", r"line 2 is not an object"),
    ],
)
def test_bad_lines_are_named(tmp_path, change, message):
    path = tmp_path / "trace.jsonl"
    write(path)
    lines = path.read_text().splitlines()
    lines[1] = change(lines[1])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        read_trace(path)


@pytest.mark.parametrize("text", ["", "{}\n", json.dumps({"kind": "start", "version": 99}) + "\n"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match="does not begin as a trace of version 1"):
        read_trace(tmp_path / "file")


def test_impossible_steps_are_refused():
    with pytest.raises(ValueError, match="2 requests and 1 tokens"):
        StepSize(2, 1)
    with pytest.raises(ValueError, match="not negative, but head_rows is"):
        StepSize(1, 1, head_rows=-1)
