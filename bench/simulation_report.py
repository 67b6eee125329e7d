"""Tables, CSV and plots of bench/simulate.py."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_dflash.training.run_record import commit


def table_of(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{name}: tokens per second over plain")
    last = [column for column in rows[0] if column.startswith("fixed_")][-1] if rows else "plain"
    columns = ["context", "requests", "plain tok/s", last.replace("_", " "), "best fixed", "table", "oracle", "ours"]
    for column in [*columns, "ours / oracle", "tau", "off"]:
        table.add_column(column, justify="right")
    for row in rows:
        plain = row["plain"]
        table.add_row(
            str(row["context"]), str(row["concurrency"]), f"{plain:.0f}", f"{row[last] / plain:.2f}",
            f"{row['best_fixed'] / plain:.2f} (K={row['best_fixed_K']})",
            f"{row['table'] / plain:.2f} (K={row['table_K']})",
            f"{row['oracle'] / plain:.3f}", f"{row['ours'] / plain:.3f}", f"{row['ours'] / row['oracle']:.3f}",
            f"{row['ours_tau']:.2f}", f"{100 * row['ours_off']:.0f} %",
        )  # fmt: skip
    return table


def summarise(rows: list[dict[str, Any]], console: Console) -> None:
    for costs in dict.fromkeys(row["costs"] for row in rows):
        here = [row for row in rows if row["costs"] == costs]
        ratios = {name: np.array([row["ours"] / row[name] for row in here]) for name in ("plain", "oracle", "table")}
        console.print(
            f"{costs}, {len(here)} cells: ours over plain at least {ratios['plain'].min():.3f}; over the oracle"
            f" {ratios['oracle'].min():.3f} at worst, {np.median(ratios['oracle']):.3f} in the median; over the table"
            f" {ratios['table'].min():.3f} to {ratios['table'].max():.3f}"
        )


def write(rows: list[dict[str, Any]], folder: Path, label: str, facts: dict[str, Any]) -> None:
    """simulation_<label>.csv, replacing an older one, and a plot per cost table; `facts` stand beside every number."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = facts | {"times": "computed", "commit": commit() or ""}
    with (folder / f"simulation_{label}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], *facts])
        writer.writeheader()
        for row in rows:
            numbers = {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}
            writer.writerow(numbers | facts)
    for costs in dict.fromkeys(row["costs"] for row in rows):
        file_name = f"simulation_{label}_{costs.replace(' ', '_')}.png"
        plot([row for row in rows if row["costs"] == costs], f"{costs}; {facts['acceptance']}", folder / file_name)


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = sorted({row["context"] for row in rows})
    shown = contexts[:: max(len(contexts) // 3, 1)][:4]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4 * len(shown), 3.6), squeeze=False, sharey=True)
    deepest = [column for column in rows[0] if column.startswith("fixed_")][-1]
    styles = {"plain": "k:", deepest: "C3--", "table": "C1-.", "oracle": "C7-", "ours": "C0o-"}
    for axis, context in zip(axes[0], shown):
        here = [row for row in rows if row["context"] == context]
        for name, style in styles.items():
            ratio = [row[name] / row["plain"] for row in here]
            axis.plot([row["concurrency"] for row in here], ratio, style, label=name.replace("_", " "), markersize=3)
        axis.set(title=f"context {context}", xlabel="concurrency", xscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens per second over plain")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(title + " (simulated)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
