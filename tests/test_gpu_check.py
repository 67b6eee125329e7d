"""bench/gpu_check.sh: says in one line that there is no GPU, and lets no stage's failure stop the others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

SCRIPT = REPOSITORY / "bench" / "gpu_check.sh"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would run the real check")


def check(path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """The script with programs of `path` before all others."""
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "OUT": str(out)}
    return subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300)


def write_program(file: Path, text: str) -> None:
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path):
    write_program(tmp_path / "python3", "exit 1")
    finished = check(tmp_path, tmp_path / "out")
    assert finished.returncode == 2
    [line] = finished.stdout.splitlines()
    assert "no GPU" in line
    assert not (tmp_path / "out").exists()


def test_failed_stage_does_not_stop_the_others(tmp_path: Path):
    """A Python that claims a GPU, fails the kernel tests and has no vLLM; a checker that refuses the device."""
    out = tmp_path / "out"
    write_program(tmp_path / "compute-sanitizer", "exit 1")
    write_program(
        tmp_path / "python3",
        'case "$*" in *"-m pytest"*) echo one test failed; exit 3 ;; *vllm.platforms*) exit 1 ;; esac; echo "ran $*"',
    )
    finished = check(tmp_path, out)
    assert finished.returncode == 1, finished.stderr
    summary = finished.stdout[finished.stdout.index("== summary") :].splitlines()[1:]
    assert [line.split(",")[0] for line in summary] == [
        "FAILED   tests",
        "skipped  memcheck: compute-sanitizer does not support this device",
        "passed   bench",
        "skipped  equality: there is no vLLM for this GPU",
    ]
    assert "one test failed" in finished.stdout
    assert f"--output {out}" in (out / "bench.log").read_text()
