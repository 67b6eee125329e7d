"""Files that are either whole or absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a temporary file beside `path`, then rename it; on failure `path` stays as it was.

    Raises:
        RuntimeError: the disk is full or not writable.
    """
    # Processes that write the same file at once must not write the same temporary one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        temporary.unlink(missing_ok=True)
        raise RuntimeError(f"'{path}' could not be written ({error}); what was there before is untouched.") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
