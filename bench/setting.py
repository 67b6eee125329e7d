"""What all bench scripts share: the questions, the environment, the circumstances beside each number, the CSV files."""

from __future__ import annotations

import csv
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_dflash.demo import ENVIRONMENT
from vllm_dflash.plugin import installed_vllm
from vllm_dflash.training.run_record import commit, machine

REPOSITORY = Path(__file__).resolve().parent.parent
DRAFTER = REPOSITORY / "examples" / "drafters" / "smollm2-135m-instruct-dflash"
QUESTION = (
    "{name} buys {count} boxes with {each} pencils each and gives away {given}. How many pencils does {name} have now?"
    "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")


def set_environment() -> None:
    """Several quiet engines in this process, as in the demo; call it before vLLM is imported."""
    for name, value in (ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}).items():
        os.environ.setdefault(name, value)


def question(round_number: int, index: int) -> str:
    number = 3 + round_number * 11 + index * 2
    return QUESTION.format(name=NAMES[index % len(NAMES)], count=number % 9 + 2, each=number, given=number // 2)


def circumstances() -> dict[str, str]:
    """Machine, versions, commit and date."""
    return {
        "machine": machine(),
        "vllm": _vllm(),
        "torch": version("torch"),
        "commit": commit() or "",
        "date": time.strftime("%Y-%m-%d"),
    }


def _vllm() -> str:
    try:
        return installed_vllm()
    except ModuleNotFoundError:  # the kernels' bench does without
        return "none"


def append_csv(name: str, rows: list[dict[str, Any]], folder: Path = REPOSITORY / "bench" / "results") -> None:
    """Add rows to `name`.csv in `folder`, with a header where the file is new."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.csv"
    is_new = not file.exists()
    with file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
