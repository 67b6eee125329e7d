"""The safetensors files of a checkpoint: which of them vLLM reads, and what their headers say.

Nothing here can run code: safetensors are a header of JSON and bytes. A file may be a symbolic link to anywhere, as in
snapshots of the Hugging Face cache, because what it leads to is read as safetensors and nothing else; names inside an
index may not lead out of the folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

_INDEX = "model.safetensors.index.json"
#: What the safetensors library reads at most.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header describes it."""

    dtype: str  # as safetensors writes it: "F32", "BF16", "I64", ...
    shape: tuple[int, ...]
    file: Path


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the files that vLLM loads from this folder.

    Raises:
        ValueError: there are none, one is missing, damaged or cannot be opened; says which, and the repair.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors |= _read_header(file)
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that vLLM loads: what the index names, or every *.safetensors file where there is no index."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ValueError(
            f"drafter '{folder}' cannot be read ({error}); give a folder that this user may read."
        ) from None
    stored = [name for name in names if name.endswith(".safetensors")]
    # vLLM prefers this name, of Mistral's own format, to all others.
    consolidated = [name for name in stored if name.startswith("consolidated")]
    if consolidated and consolidated != stored:
        raise ValueError(
            f"drafter '{folder}' has {', '.join(stored)}, of which vLLM would read {', '.join(consolidated)} alone; "
            f"keep one set of files."
        )
    indexed = _names_in_index(folder) if _INDEX in names else None
    if indexed is not None and (missing := sorted(indexed - set(stored))):
        raise ValueError(
            f"drafter '{folder}' lacks {', '.join(missing)}, which its {_INDEX} names; copy or download it again."
        )
    if not stored:
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
        beside = f", only {', '.join(pickled)}" if pickled else ""
        raise ValueError(
            f"drafter '{folder}' has no *.safetensors file{beside}; save it in the safetensors format (pickled weights "
            f"are not read, because loading them can run code)."
        )
    files = [folder / name for name in stored if indexed is None or name in indexed]
    for file in files:
        # A broken link, a folder, or something that never ends, such as a pipe.
        if not file.is_file():
            raise ValueError(f"'{file}' leads to no file; copy or download it again.")
    return files


def _names_in_index(folder: Path) -> set[str]:
    file = folder / _INDEX
    try:
        names = set(json.loads(file.read_bytes())["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise ValueError("not all files have names")
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"'{file}' is damaged ({error}); copy or download it again.") from None
    outside = sorted(name for name in names if "/" in name or "\\" in name)
    if outside:
        raise ValueError(
            f"'{file}' names '{outside[0]}', but weights lie in the drafter's own folder; do not use this checkpoint, "
            f"or re-export it."
        )
    return names


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        header = _parsed_header(file)
        with safe_open(file, "np"):  # checks all else: known types, sizes that fit them, no gap and no overlap
            pass
        return {name: StoredTensor(entry["dtype"], tuple(entry["shape"]), file) for name, entry in header.items()}
    except OSError as error:
        raise ValueError(f"'{file}' cannot be read ({error}); give files that this user may read.") from None
    except (AttributeError, LookupError, RecursionError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"'{file}' is damaged or truncated ({error}); copy or download it again.") from None


def _parsed_header(file: Path) -> dict[str, Any]:
    """The JSON before the data; how much data it announces must be how much there is."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_len = int.from_bytes(stream.read(8), "little")
        if not 0 < header_len <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {header_len} bytes is announced, the file has {size}")
        header = json.loads(stream.read(header_len))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end + 8 + header_len != size:
        raise ValueError(f"{end + 8 + header_len} bytes are announced, {size} are there")
    return header
