"""Where a run's numbers go: metrics.jsonl always, TensorBoard and wandb on request."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_dflash.training.settings import TrainSettings


class MetricsLog:
    """Appends one JSON object per call to metrics.jsonl and mirrors it to the trackers."""

    def __init__(self, folder: Path, settings: TrainSettings, first_step: int) -> None:
        self._path = folder / "metrics.jsonl"
        self._drop_after(first_step)
        self._writer, self._wandb = None, None
        if "tensorboard" in settings.report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(folder / "tensorboard", purge_step=first_step)
        if "wandb" in settings.report_to:
            try:
                import wandb
            except ImportError as error:
                raise ValueError(
                    "--report-to wandb needs the package wandb; install it, or report to tensorboard."
                ) from error
            self._wandb = wandb.init(name=settings.run_name or folder.name, config=asdict(settings))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Numbers, or lists of numbers by slot, after `step` optimiser steps."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step} | values) + "\n")
        flat = dict(_flatten(values))
        if self._writer is not None:
            for name, value in flat.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(flat, step=step)

    def close(self) -> None:
        """Flush the trackers."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _drop_after(self, step: int) -> None:
        """Forget what a killed run wrote after the checkpoint that this one goes on from."""
        if self._path.exists():
            kept = [row for row in read_metrics(self._path) if row["step"] <= step]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _flatten(values: dict[str, Any]) -> list[tuple[str, float]]:
    """Slot k of a list becomes name_k, as trainers of speculators name it."""
    flat: list[tuple[str, float]] = []
    for name, value in values.items():
        items = enumerate(value, 1) if isinstance(value, list) else None
        flat += [(name, value)] if items is None else [(f"{name}_{k}", v) for k, v in items]
    return flat
