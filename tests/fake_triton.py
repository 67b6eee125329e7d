"""A Triton backend called "cpu" that cannot compile: it lets vLLM's V2 runner run on a CPU, kernels interpreted.

vLLM takes that runner where Triton has a backend for the platform. Triton finds backends by entry points, so a package
in a folder of its own, put on the path of one process, is enough; nothing in vLLM or Triton is changed.
"""

from __future__ import annotations

from pathlib import Path

_COMPILER = """
from triton.backends.compiler import BaseBackend


def refuse(self, *args, **kwargs):
    raise RuntimeError("this backend compiles nothing; set TRITON_INTERPRET=1")


class CPUBackend(BaseBackend):
    supports_target = staticmethod(lambda target: target.backend == "cpu")


for name in CPUBackend.__abstractmethods__ - {"supports_target"}:
    setattr(CPUBackend, name, refuse)
CPUBackend.hash = refuse
CPUBackend.__abstractmethods__ = frozenset()
"""

_DRIVER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    is_active = classmethod(lambda cls: True)

    def __init__(self):
        pass

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


for name in CPUDriver.__abstractmethods__:
    setattr(CPUDriver, name, lambda self, *args: None)
CPUDriver.__abstractmethods__ = frozenset()
"""


def write_fake_triton(folder: Path) -> Path:
    """Write the package; a process with this folder in PYTHONPATH and TRITON_INTERPRET=1 has the backend."""
    package, info = folder / "fake_triton_cpu", folder / "fake_triton_cpu-0.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "compiler.py").write_text(_COMPILER)
    (package / "driver.py").write_text(_DRIVER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-triton-cpu\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[triton.backends]\ncpu = fake_triton_cpu\n")
    return folder
