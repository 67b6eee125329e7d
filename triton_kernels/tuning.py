"""Which tile sizes a kernel runs with: measured once per GPU, triton version and shape, then read from a file.

    with measuring(folder):              # at start-up
        launcher(...)                    # every shape that will be served

    config = best_config("context_kv", shape, CONFIGS, lambda config: _kernel[grid](..., **config.options))

Only within `measuring` is anything timed, so no request pays for it; elsewhere a shape without an entry gets the first
of its configurations, which is therefore the safe one. While a CUDA graph is captured nothing is timed either.
A launch that is measured runs many times: it has to give the same result every time.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Config(NamedTuple):
    """Tile sizes of a kernel by the names of its constexprs, warps and pipeline stages."""

    tiles: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of the launch."""
        return dict(self.tiles) | {"num_warps": self.num_warps, "num_stages": self.num_stages}


def config(num_warps: int, num_stages: int, **tiles: int) -> Config:
    """A configuration, tiles by name."""
    return Config(tuple(sorted(tiles.items())), num_warps, num_stages)


_chosen: dict[tuple[str, Hashable], Config] = {}
_table: _Table | None = None


def best_config(
    kernel: str, shape: tuple[int | str, ...], configs: Sequence[Config], launch: Callable[[Config], Any]
) -> Config:
    """The configuration to launch `kernel` with for `shape`.

    Args:
        kernel: name in the file.
        shape: what the choice depends on, as the caller buckets it (powers of two of row counts, head size, dtype).
        configs: candidates, the safe one first.
        launch: runs the kernel with a configuration; called only within `measuring`.
    """
    known = _chosen.get((kernel, shape))
    if known is not None and known in configs:
        return known
    if _table is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return configs[0]
    found = _table.read(kernel, shape)
    if found is None or found not in configs:
        found = _fastest(configs, launch)
        _table.write(kernel, shape, found)
    _chosen[kernel, shape] = found
    return found


@contextlib.contextmanager
def measuring(folder: Path) -> Iterator[None]:
    """Within it, shapes without an entry are measured and written to a file in `folder`; for start-up, on a GPU."""
    global _table
    before, _table = _table, _Table(folder / f"{_machine()}.json")
    try:
        yield
    finally:
        _table = before


def power_of_two(rows: int) -> int:
    """The bucket of a row count: the next power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def _fastest(configs: Sequence[Config], launch: Callable[[Config], Any]) -> Config:
    """The configuration with the least median time; one that the GPU cannot run (too much shared memory) loses."""
    import triton
    from triton.runtime.errors import OutOfResources

    times: dict[Config, float] = {}
    for candidate in configs:
        with contextlib.suppress(OutOfResources):
            times[candidate] = triton.testing.do_bench(
                lambda one=candidate: launch(one), warmup=5, rep=20, return_mode="median"
            )
    return min(times, key=times.__getitem__) if times else configs[0]


def _machine() -> str:
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{name.replace(' ', '-').replace('/', '-')}-triton-{triton.__version__}"


class _Table:
    """Choices in a JSON file. Each write replaces the whole file, so that a killed process leaves no half."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, kernel: str, shape: tuple[int | str, ...]) -> Config | None:
        entry = self._all().get(self._key(kernel, shape))
        if entry is None:
            return None
        return config(entry["num_warps"], entry["num_stages"], **entry["tiles"])

    def write(self, kernel: str, shape: tuple[int | str, ...], chosen: Config) -> None:
        # Several workers may write at once; each reads first, and the loser of the race measures again some day.
        entries = self._all()
        entries[self._key(kernel, shape)] = {
            "tiles": dict(chosen.tiles),
            "num_warps": chosen.num_warps,
            "num_stages": chosen.num_stages,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(entries, file, indent=1, sort_keys=True)
        os.replace(temporary, self.path)

    def _all(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    @staticmethod
    def _key(kernel: str, shape: tuple[int | str, ...]) -> str:
        return " ".join([kernel, *map(str, shape)])
