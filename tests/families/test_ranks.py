"""Several ranks answer as one does, with drafts in every worker, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ANSWER

PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]
SCRIPT = Path(__file__).parent / "ranks.py"


def start(tmp_path: Path, job: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """A process that serves; functions are sent to its workers, and step costs are measured afresh."""
    environment = {
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "DFLASH_CACHE": str(tmp_path),
        **environment,
    }
    command = [sys.executable, str(SCRIPT), json.dumps(job)]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str], seconds: float = 300) -> dict[str, Any]:
    """What it prints in the end; it is killed when it takes longer."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    lines = [line for line in output.splitlines() if line.startswith(ANSWER)]
    assert len(lines) == 1, output[-4000:]
    return json.loads(lines[0].removeprefix(ANSWER))


@pytest.mark.case("F47")
@pytest.mark.feature("tensor parallel 2", "greedy text of one rank; drafts and their lengths alike in both workers")
def test_two_tensor_parallel_ranks_answer_as_one(engine, tiny_target, tiny_drafter, tmp_path):
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    job = {"target": str(tiny_target), "drafter": str(tiny_drafter), "prompts": PROMPTS, "max_tokens": 40}
    result = answer(start(tmp_path, job | {"settings": settings}))
    assert result["texts"] == engine(tiny_target).token_ids(PROMPTS, max_tokens=40)
    assert result["drafted"] > 0, "how many depends on the clock: a random drafter is soon switched off"
    first, second = result["workers"]
    assert first["proposer"] == "vllm_dflash.proposer"
    assert first["model"] == "vllm_dflash.drafter"
    assert first["decides"] == "DraftLengthController"
    assert 0 < first["counters"]["steps_off"] < first["counters"]["steps"], "lengths by the clock of the first rank"
    assert second == first
