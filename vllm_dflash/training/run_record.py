"""What made a checkpoint: command, commit, versions, data, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_dflash import __version__
from vllm_dflash.training.data import Example, data_hash
from vllm_dflash.training.settings import TrainSettings

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


def run_record(settings: TrainSettings, examples: Sequence[Example]) -> dict[str, Any]:
    """Record of a run that is about to start; `metrics` and `minutes` are added as it goes."""
    return {
        "target": settings.target,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": {"vllm-dflash": __version__, "python": platform.python_version()} | versions(_PACKAGES),
        "machine": machine(),
        "seed": settings.seed,
        "data": list(settings.data),
        "data_hash": data_hash(examples),
        "num_examples": len(examples),
        "num_tokens": sum(sum(e.loss_mask) for e in examples),
        "settings": asdict(settings),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """The accelerator, or processor and number of cores."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{os.cpu_count()}x {names[0] if names else platform.processor()}"


def commit() -> str | None:
    """Commit of the checkout this file is in, with "+" where something is not committed; None outside of one."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=here, capture_output=True)
    except OSError:
        return None
    return commit.stdout.strip() + "+" * (changed.returncode == 1) if commit.returncode == 0 else None
