"""What a check found: its name, both sides, and the repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (error), or worth knowing (warning)."""

    name: str  # of the check, as in the report and in --json
    level: Literal["error", "warning"]
    message: str  # one sentence that names both sides
    repair: str  # what to do, in the imperative


def error(name: str, message: str, repair: str) -> Finding:
    """Something that keeps the drafter from working."""
    return Finding(name, "error", message, repair)


def warning(name: str, message: str, repair: str) -> Finding:
    """Something that the user should know, though the drafter works."""
    return Finding(name, "warning", message, repair)
