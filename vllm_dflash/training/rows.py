"""Rows of text data, from files, folders or the Hugging Face hub, each with the place it came from.

What a row may contain is decided in data.py; this file only reads.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

#: How a file of rows is opened, by the end of its name. A .json file is one list, the others have a row per line.
_OPENERS: dict[str, Callable[..., IO[Any]]] = {
    ".jsonl": open,
    ".jsonl.xz": lzma.open,
    ".jsonl.gz": gzip.open,
    ".json": open,
}


def read_rows(path_or_dataset: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a file, of all such files in a folder, or of a Hugging Face data set, with where each one stands.

    Args:
        path_or_dataset: a .jsonl, .jsonl.xz, .jsonl.gz or .json file, a folder of them, or a data set as
            name[:config][@split]; the split is train where none is given.

    Yields:
        ("file.jsonl:17", row), counted from 1.

    Raises:
        ValueError: nothing of that name can be read, or a line is not a JSON object; says which.
    """
    path = Path(path_or_dataset).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _suffix(file))
        if not files:
            raise ValueError(f"folder '{path}' holds no data; it needs files that end in {', '.join(_OPENERS)}.")
        for file in files:
            yield from _read_file(file)
    elif path.exists():
        yield from _read_file(path)
    else:
        yield from _read_dataset(path_or_dataset)


def file_stem(where: str) -> str:
    """Name of the file or data set that `where` points into, without folders and endings: 'a/b.jsonl.xz:3' is 'b'."""
    name = Path(where.rpartition(":")[0] or where).name
    suffix = _suffix(Path(name))
    return name.removesuffix(suffix) if suffix else name


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in _OPENERS if path.name.endswith(suffix)), None)


def _read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    suffix = _suffix(path)
    if suffix is None:
        raise ValueError(f"'{path}' is not a data file; its name must end in {', '.join(_OPENERS)}.")
    try:
        with _OPENERS[suffix](path, "rt", encoding="utf-8") as file:
            if suffix == ".json":
                yield from _numbered(path.name, _json_list(path, file.read()))
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(f"{path.name}:{number}", _parse(f"{path.name}:{number}", line))
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' cannot be read ({error}); it is damaged or not what its name says.") from error


def _read_dataset(specification: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name, _, split = specification.partition("@")
    name, _, config = name.partition(":")
    wanted = f"'{specification}' is neither a file, nor a folder, nor a Hugging Face data set that can be loaded"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{wanted}: the package 'datasets' is missing. Check the path, or install it with "
            f"'pip install \"vllm-dflash[train]\"'."
        ) from error
    try:
        rows = load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the hub's errors have no common class
        raise ValueError(
            f"{wanted} ({type(error).__name__}: {error}). Check the path, or write the data set as "
            f"name[:config][@split]."
        ) from error
    yield from _numbered(specification, rows)


def _numbered(name: str, rows: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows, 1):
        yield _row(f"{name}:{number}", row)


def _json_list(path: Path, text: str) -> list[Any]:
    rows = _parse(path.name, text)
    if not isinstance(rows, list):
        raise ValueError(f"{path.name} holds a {type(rows).__name__}, not a list of rows; name a file of lines .jsonl.")
    return rows


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); was the file cut short while being written?") from error


def _row(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object with named fields.")
    return where, row
