"""What the doctor prints, and the same as JSON."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.doctor.diagnosis import Diagnosis, Measurement, to_json


@dataclass(frozen=True)
class Circumstances:
    """What an acceptance length depends on, beside the drafter."""

    target: str
    drafter: str
    num_drafted: int | None  # K
    template: str
    thinking: str
    dataset: str
    num_prompts: int
    max_tokens: int
    sampling: str = "greedy (temperature 0)"
    dtype: str = "float32"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """For people."""
        return [
            ("target", self.target),
            ("drafter", self.drafter),
            ("prompts", f"{self.num_prompts} of {self.dataset}, {self.max_tokens} tokens each at most"),
            ("rendered", f"{self.template}; thinking: {self.thinking}"),
            ("sampling", f"{self.sampling}, {self.dtype}"),
            ("K", str(self.num_drafted) if self.num_drafted else "unknown"),
        ]


def print_report(found: Diagnosis, circumstances: Circumstances) -> None:
    """The verdict last: it is what stays on the screen."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    facts = Table.grid(padding=(0, 2))
    for name, value in circumstances.rows:
        facts.add_row(name, escape(value))
    console.print(facts)
    measured = [m for m in (found.served, *found.controls, found.repaired) if m is not None]
    if measured:
        console.print(_acceptance_table(measured))
    if found.num_loops:
        console.print(f"{found.num_loops} answers end in a repeating loop, which flatters every drafter.")
    for finding in found.findings:
        console.print(f"{finding.level} ({finding.name}): {escape(finding.message)}. Repair: {escape(finding.repair)}.")
    console.print(f"\n[bold]{escape(verdict(found))}[/bold]")


def verdict(found: Diagnosis) -> str:
    """The one sentence, with its repair."""
    if found.is_healthy:
        return found.sentence
    return f"{found.name}: {found.sentence}. Repair: {found.repair}{_lifted(found)}."


def _lifted(found: Diagnosis) -> str:
    """What the repair gives; where so few answers do not show it in tau, what they do show."""
    if found.repaired is None or found.served is None:
        return ""
    if found.gain is None or found.repaired.tau > found.served.tau:
        return f" (tau {found.served.text} becomes {found.repaired.text})"
    return (
        f" (tau {found.served.text} is too rough a measure on these answers, but the drafter's distribution comes "
        f"{found.gain.nats:.2f} nats per slot nearer to the target's, t = {found.gain.t:.1f})"
    )


def report_json(found: Diagnosis, circumstances: Circumstances) -> dict[str, Any]:
    """Everything that was found and what it depends on."""
    from vllm_dflash.training.run_record import commit, machine, versions

    return {
        "verdict": verdict(found),
        **to_json(found),
        "circumstances": asdict(circumstances),
        "machine": machine(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(("vllm-dflash", "torch", "transformers")),
    }


def _acceptance_table(measured: list[Measurement]) -> Any:
    from rich.table import Table

    table = Table(title="tokens per cycle (tau)")
    for column in ("drafter", "tau", "95% interval", "cycles", "accepted by slot"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for m in measured:
        interval = f"{m.interval[0]:.2f} to {m.interval[1]:.2f}" if m.interval else ""
        slots = " ".join(f"{share:.0%}" for share in m.by_position)
        table.add_row(m.label, f"{m.tau:.2f}", interval, str(m.cycles), slots)
    return table
