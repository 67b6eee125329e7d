"""`vllm-dflash demo` and `vllm-dflash target`, as a newcomer runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

COMMAND = Path(sys.executable).parent / "vllm-dflash"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TRITON_"))}
    return subprocess.run(
        [str(COMMAND), *arguments], capture_output=True, text=True, env=clean | environment, cwd="/", timeout=600
    )


@pytest.fixture(scope="module")
def demo(smollm2) -> subprocess.CompletedProcess[str]:
    return run("demo", "--max-tokens", "32")


def test_demo_shows_the_same_text_in_fewer_cycles(demo):
    assert demo.returncode == 0, demo.stdout + demo.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in demo.stdout.splitlines() if "│" in line]
    questions = [row for row in rows if row and row[0].isdigit()]
    assert [row[0] for row in questions] == ["1", "2", "3", "4"]
    assert all(row[-1] == "yes" for row in questions)
    assert all(int(row[2]) < int(row[1]) for row in questions)  # cycles, tokens
    [total] = [row for row in rows if row and row[0] == "all"]
    assert float(total[3]) > 1.3  # tau


def test_demo_says_why_and_advises(demo):
    assert "checks them in one pass" in " ".join(demo.stdout.split())
    assert len(re.findall(r"^Advice: ", demo.stdout, re.MULTILINE)) == 1


def test_demo_reports_when_each_engine_gave_its_first_token(demo):
    assert len(re.findall(r"first token after \d+ s", demo.stdout)) == 2


def test_demo_keeps_vllms_log_out_of_the_way(demo):
    assert "INFO" not in demo.stdout
    [log] = re.findall(r"vLLM's log: (\S+)", demo.stdout)
    assert "vllm-dflash" in Path(log).read_text()


def test_target_prints_only_the_folder(smollm2):
    result = run("target", "smollm2")
    assert result.stdout == f"{smollm2}\n"


def test_unknown_target_is_named():
    result = run("target", "smollm3")
    assert result.returncode == 1
    assert result.stderr == "vllm-dflash: there is no demo target 'smollm3'; known: smollm2.\n"


def test_offline_example_runs(smollm2):
    script = REPOSITORY / "examples" / "offline_generate.py"
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    [acceptance] = re.findall(r"Acceptance length: (\d\.\d+|none) tokens per cycle", result.stdout)
    assert acceptance == "none" or float(acceptance) > 1.1  # beside other tests drafts may not pay
