"""`--fix FOLDER`: a copy of the drafter with the repair in its config.json, where that is the whole repair."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_dflash.doctor.hypotheses import Edits


def edited(raw: Mapping[str, Any], edits: Edits) -> dict[str, Any]:
    """The content of config.json with some keys replaced."""
    content = copy.deepcopy(dict(raw))
    for path, value in edits.items():
        section = content
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    return content


def write_repaired(drafter: Path, raw: Mapping[str, Any], edits: Edits, folder: Path) -> None:
    """Copy a drafter's safetensors, and its config.json with `edits`, to a new folder; whole or not at all.

    Raises:
        ValueError: the folder exists.
        RuntimeError: it cannot be written.
    """
    if folder.exists():
        raise ValueError(f"'{folder}' exists already; give --fix a new folder.")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        for file in sorted(drafter.glob("*.safetensors")):
            shutil.copyfile(file, part / file.name)
        (part / "config.json").write_text(json.dumps(edited(raw, edits), indent=2) + "\n")
        part.rename(folder)
    except OSError as problem:
        shutil.rmtree(part, ignore_errors=True)
        raise RuntimeError(f"'{folder}' could not be written ({problem}); nothing was left behind.") from problem
