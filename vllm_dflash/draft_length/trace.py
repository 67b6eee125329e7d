"""Traces of serving, as JSON lines: what the simulator replays and a user can plot.

    {"kind": "start", "version": 1, "num_speculative_tokens": 7, "facts": {"target": ..., "machine": ...}}
    {"kind": "step", "size": {...}, "seconds": 0.031, "draft_seconds": ..., "context_seconds": ...,
     "cycles": [{"id": "7", "p_max": [0.91, 0.4, ...], "verified": 3, "accepted": 1}, ...]}

One line per step: its counts and times (steps.py), and the drafts whose verification it was. `p_max` has one entry per
drafted position. A trace that is to be replayed with other lengths is recorded with draft length "fixed", because what
became of drafts that were not verified is not known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from vllm_dflash.draft_length.decision import DraftDecision
from vllm_dflash.draft_length.steps import TimedStep

_VERSION = 1
#: Lines that a killed process loses at most; more of them make fewer writes.
_LINES_AT_ONCE = 64
_DIGITS = 4  # of probabilities


@dataclass(frozen=True)
class TracedCycle:
    """A request's drafts and what became of them."""

    id: str
    p_max: tuple[float, ...]
    verified: int
    accepted: int

    @property
    def drafted(self) -> int:
        """Positions that the drafter predicted."""
        return len(self.p_max)


@dataclass(frozen=True)
class TracedStep:
    """One line."""

    step: TimedStep
    cycles: tuple[TracedCycle, ...]


@dataclass(frozen=True)
class Trace:
    """A whole file."""

    num_speculative_tokens: int
    facts: dict[str, Any] = field(default_factory=dict)
    steps: tuple[TracedStep, ...] = ()


class TraceWriter:
    """Writes a trace; whole lines reach the file at once, so a killed process leaves no broken one.

    Args:
        path: a new file, or one to replace.
        num_speculative_tokens: K.
        facts: circumstances of the run, JSON values.
    """

    def __init__(self, path: str | Path, num_speculative_tokens: int, facts: dict[str, Any] | None = None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._lines: list[str] = []
        start = {"kind": "start", "version": _VERSION, "num_speculative_tokens": num_speculative_tokens}
        self._add(start | {"facts": facts or {}})
        self.flush()

    def write(
        self,
        step: TimedStep,
        decision: DraftDecision | None = None,  # whose drafts the step verified
        verified: Sequence[int] | np.ndarray = (),  # [D]
        accepted: Sequence[int] | np.ndarray = (),  # [D]
    ) -> None:
        """Add a step; the arguments of DraftLengthController.observe."""
        cycles = []
        if decision is not None:
            rounded = np.round(np.nan_to_num(decision.confidences.astype(float)), _DIGITS).tolist()
            for row, request_id in enumerate(decision.request_ids):
                counts = {"verified": int(verified[row]), "accepted": int(accepted[row])}
                cycles.append({"id": request_id, "p_max": rounded[row]} | counts)
        self._add({"kind": "step"} | step.to_json() | {"cycles": cycles})
        if len(self._lines) >= _LINES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting.

        Raises:
            OSError: the disk is full; the file then ends with the last whole line, and waiting lines are dropped.
        """
        data = "".join(self._lines).encode()
        self._lines.clear()
        size = os.fstat(self._file).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        """Write the rest and close the file; a second call does nothing."""
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, values: dict[str, Any]) -> None:
        self._lines.append(json.dumps(values) + "\n")


def read_trace(path: str | Path) -> Trace:
    """Read a whole trace.

    Raises:
        ValueError: a line is not what it should be; file and line are named.
        OSError: the file cannot be read.
    """
    lines = _json_lines(Path(path))
    _, start = next(lines, (0, {}))
    if start.get("kind") != "start" or start.get("version") != _VERSION:
        raise ValueError(
            f"{path} does not begin as a trace of version {_VERSION}, but with {json.dumps(start)[:80]};"
            ' write one with {"dflash": {"trace": FILE}}.'
        )
    steps = []
    for number, values in lines:
        try:
            steps.append(_step(values, start["num_speculative_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return Trace(start["num_speculative_tokens"], start["facts"], tuple(steps))


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}; cut the file there.") from error
            if not isinstance(values, dict):
                raise ValueError(f"{path}, line {number} is not an object.")
            yield number, values


def _step(values: dict[str, Any], num_positions: int) -> TracedStep:
    if values.get("kind") != "step":
        raise ValueError(f'"kind" must be "step", but it is {values.get("kind")!r}.')
    cycles = []
    for cycle in values["cycles"]:
        drafted = TracedCycle(cycle["id"], tuple(cycle["p_max"]), cycle["verified"], cycle["accepted"])
        if not 0 <= drafted.accepted <= drafted.verified <= drafted.drafted <= num_positions:
            raise ValueError(
                f"request {drafted.id}: 0 <= accepted <= verified <= drafted <= {num_positions}, but they are"
                f" {drafted.accepted}, {drafted.verified} and {drafted.drafted}."
            )
        cycles.append(drafted)
    timed = {name: value for name, value in values.items() if name not in ("kind", "cycles")}
    return TracedStep(TimedStep.from_json(timed), tuple(cycles))
