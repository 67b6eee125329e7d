"""Two processes train what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import TinyTask, write_tiny_task

from vllm_dflash.training.checkpoint import load_last
from vllm_dflash.training.metrics import read_metrics
from vllm_dflash.training.settings import to_yaml
from vllm_dflash.training.train import train

TESTS = Path(__file__).resolve().parent.parent

#: The processes' gradients are added in another order than one process' accumulated ones.
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Runs of one process, of two with DDP, and of two that go on from DDP's step 2 with FSDP2; and what two print."""
    folder = tmp_path_factory.mktemp("runs")
    task = write_tiny_task(folder)
    changes: dict[str, Any] = {"max_steps": 3, "eval_steps": 3}
    printed = _torchrun(folder, task, changes | {"features": str(folder / "features")})
    train(task.settings(folder / "one", **changes, accumulation_steps=2))
    return folder, printed


def _torchrun(folder: Path, task: TinyTask, changes: dict[str, Any]) -> str:
    files = []
    for name in ("ddp", "fsdp"):
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(to_yaml(task.settings(folder / name, **changes)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(TESTS / "two_processes.py"), *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_equal_one_with_as_many_rows(trained: tuple[Path, str], name: str) -> None:
    folder, _ = trained
    one, two = load_last(folder / "one"), load_last(folder / name)
    assert one is not None
    assert two is not None
    assert two[2].step == one[2].step == 3
    torch.testing.assert_close(two[0], one[0], rtol=ROUNDING, atol=1e-5)
    torch.testing.assert_close(two[1]["state"], one[1]["state"], rtol=ROUNDING, atol=1e-5)


def test_one_of_two_processes_writes_about_both(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    alone, together = (read_metrics(folder / name / "metrics.jsonl") for name in ("one", "ddp"))
    assert [row["step"] for row in together] == [row["step"] for row in alone] == [1, 2, 3, 3]
    for mine, its in zip(together, alone, strict=True):
        assert mine.keys() == its.keys()
        for name in its.keys() - {"train/minutes"}:
            torch.testing.assert_close(torch.tensor(mine[name]), torch.tensor(its[name]), rtol=0.01, atol=2e-4)
    assert printed.count("3 steps, ") == 1
    assert printed.count("going on from step 2 in") == 1
    assert json.loads((folder / "ddp" / "last" / "run.json").read_text())["num_examples"] == 28
