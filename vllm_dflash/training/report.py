"""A picture of a run: loss, tau, and acceptance by slot, from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_dflash.training.metrics import read_metrics


def plot_metrics(folder: Path) -> Path | None:
    """Write `folder/metrics.png`; None where matplotlib is not installed or nothing was logged."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'vllm-dflash[train]').")
        return None
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        return None
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4))
    _line(left, rows, "train/loss", "training loss")
    _line(middle, rows, "eval/tau", "tau on held-out examples")
    for slot, points in _by_slot(rows, "eval/position").items():
        right.plot(*zip(*points), label=f"slot {slot}")
    right.set(title="share of cycles that accept the slot", xlabel="step")
    if right.lines:
        right.legend(fontsize="small")
    figure.tight_layout()
    path = folder / "metrics.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _line(axes: Any, rows: list[dict[str, Any]], name: str, title: str) -> None:
    points = [(row["step"], row[name]) for row in rows if name in row]
    axes.plot(*zip(*points)) if points else None
    axes.set(title=title, xlabel="step")


def _by_slot(rows: list[dict[str, Any]], name: str) -> dict[int, list[tuple[int, float]]]:
    slots: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        for slot, value in enumerate(row.get(name, []), 1):
            slots.setdefault(slot, []).append((row["step"], value))
    return slots
