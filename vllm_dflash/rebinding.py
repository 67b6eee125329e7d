"""How a name in vLLM is replaced: once, and where its module is not imported yet, right after its first import."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: On a rebound function: it is ours already; on a speculative config: this plugin serves it.
MARK = "_vllm_dflash"


def rebind(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method by `replacement(original, self, ...)`, once."""
    original = getattr(owner, name)
    if getattr(original, MARK, False):
        return

    @functools.wraps(original)
    def rebound(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(rebound, MARK, True)
    setattr(owner, name, rebound)


def when_imported(module_name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action` on a module now if it is imported, else right after its first import.

    The runner pulls in models and kernels; importing it here would cost every front end seconds.
    """
    if module_name in sys.modules:
        action(sys.modules[module_name])
    elif not any(isinstance(finder, _ImportHook) and finder.module_name == module_name for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook(module_name, action))


class _ImportHook(importlib.abc.MetaPathFinder):
    def __init__(self, module_name: str, action: Callable[[ModuleType], None]) -> None:
        self.module_name, self.action = module_name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name:
            return None
        # Looking a module up is not importing it, so the hook stays until the module has run.
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.action(module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec
