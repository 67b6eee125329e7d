"""Training checkpoints: a servable drafter with the state that goes on from it, whole or absent.

step-00001200/
  config.json, model.safetensors    the drafter in z-lab's format, float32: evaluate, export or serve it as it is
  optimizer.pt                      state of the optimisers
  state.json                        step, best tau, minutes trained
  settings.yaml, run.json           what made it
best, last                          links to such folders
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.dialects import to_z_lab


@dataclass(frozen=True)
class TrainState:
    """Where a run is."""

    step: int = 0
    best_tau: float = 0.0
    minutes: float = 0.0  # spent in steps


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    config: DFlashConfig
    tensors: dict[str, Tensor]  # the drafter's, by the checkpoint's names
    optimizers: dict[str, Any]  # state of all optimisers, by the names of the drafter's tensors
    state: TrainState
    settings_yaml: str
    record: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, is_best: bool) -> Path:
    """Write `folder/step-N`, link it as `last` and perhaps `best`, and remove all but the latest `keep` and the best.

    Raises:
        RuntimeError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    final = folder / f"step-{checkpoint.state.step:08d}"
    part = folder / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        save_file(checkpoint.tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(to_z_lab(checkpoint.config, "float32"), indent=2))
        torch.save(checkpoint.optimizers, part / "optimizer.pt")
        (part / "state.json").write_text(json.dumps(asdict(checkpoint.state)))
        (part / "settings.yaml").write_text(checkpoint.settings_yaml)
        (part / "run.json").write_text(json.dumps(checkpoint.record, indent=2))
        for file in part.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        shutil.rmtree(part, ignore_errors=True)
        raise RuntimeError(
            f"checkpoint '{final}' could not be written ({error}); earlier ones are untouched."
        ) from error
    for name in ("last", "best") if is_best else ("last",):
        link(folder, name, final.name)
    _remove_old(folder, final, keep)
    return final


def link(folder: Path, name: str, to: str) -> None:
    """Make `folder/name` a link to `to`, replacing an earlier one at once."""
    temporary = folder / f".{name}.part"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(to)
    temporary.replace(folder / name)


def load_last(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], TrainState] | None:
    """Drafter, optimisers and state of the newest checkpoint that can be read; None where there is none."""
    for path in reversed(checkpoints(folder)):
        try:
            tensors = load_file(path / "model.safetensors")
            optimizers = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
            return tensors, optimizers, TrainState(**json.loads((path / "state.json").read_text()))
        except Exception as error:  # a damaged file of any kind: the checkpoint before it will do
            print(f"checkpoint '{path}' cannot be read ({error}); trying the one before it.")
    return None


def settings_of_last(folder: Path) -> str | None:
    """The settings, as YAML, that wrote the newest checkpoint; None where there is none."""
    files = [path / "settings.yaml" for path in checkpoints(folder)]
    return next((file.read_text() for file in reversed(files) if file.is_file()), None)


def checkpoints(folder: Path) -> Sequence[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(folder.glob("step-[0-9]*"))


def _remove_old(folder: Path, newest: Path, keep: int) -> None:
    """Later ones than `newest` could not be read when the run went on from an earlier one; they are written anew."""
    best = (folder / "best").resolve()
    earlier = [path for path in checkpoints(folder) if path <= newest]
    for path in earlier[:-keep]:
        if path.resolve() != best:
            shutil.rmtree(path)
