"""vLLM's V2 runner with our drafter on a CPU: its Triton kernels are interpreted, see fake_triton.py.

The drafter is random and never right, so each step gains one token, and steps of one text stand side by side whatever
their lengths.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_triton import write_fake_triton

TESTS = Path(__file__).resolve().parents[1]
K = 7


@pytest.fixture(scope="module")
def report(tiny_target, tiny_drafter, tmp_path_factory):
    """What v2_job.py saw."""
    folder = write_fake_triton(tmp_path_factory.mktemp("fake"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(TESTS / "v2_job.py"), str(tiny_target), str(tiny_drafter)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_the_v2_runner_with_our_speculator(report):
    assert report["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert report["speculator"] == "DraftSpeculator"
    assert report["table"] == [[1, 1, 0], [2, 2, 1], [3, 3, 3], [4, 4, 7]]
    assert report["chooser"] == "StepLengthController"


@pytest.mark.feature(
    "V2 runner", "greedy text equals plain's; one draft length per step, changing; kernels interpreted"
)
@pytest.mark.parametrize("run", ["whole", "changing", "bounded", "decided"])
def test_greedy_text_is_the_targets(report, run):
    assert report[run]["texts"] == report["plain"]
    assert any(step["k"] for step in report[run]["steps"])


def test_steps_without_drafts_make_no_block_pass(report):
    steps = report["changing"]["steps"]
    assert [step["k"] for step in steps[:5]] == [7, 0, 3, 0, 7]
    assert [step["passes"] for step in steps] == [int(step["k"] > 0) for step in steps]


def test_drafts_behind_steps_without_any_see_all_context(report):
    """Context K/V are written in every step: the same tokens are drafted as if there had been no gap."""
    compared = 0
    for changing, whole in zip(report["changing"]["steps"], report["whole"]["steps"]):
        assert whole["k"] == K
        assert changing["drafts"] == [tokens[: changing["k"]] for tokens in whole["drafts"]]
        compared += changing["k"]
    assert compared >= 7 + 3 + 7


def test_a_request_bounds_its_own_drafts(report):
    """The runner drafts three tokens; one is verified, in the row behind the anchor."""
    rows = [set(step["rows"].values()) for step in report["bounded"]["steps"][1:]]
    assert rows[:-1] == [{2}] * (len(rows) - 1)
    whole = [set(step["rows"].values()) for step in report["whole"]["steps"][1:]]
    assert whole[:-1] == [{1 + K}] * (len(whole) - 1)


def test_the_scheduler_times_and_counts_steps(report):
    # The first step has no predecessor to be timed from.
    assert report["changing"]["counted"] == len(report["changing"]["steps"]) - 1
