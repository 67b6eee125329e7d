"""Compiles kernels for GPUs that are not here, through their real launchers, and reports what came out.

    python tests/kernels/ahead_of_time.py context_kv [--targets sm_90 gfx942] [--csv FILE]

Each `launches_<kernel>.py` beside this file gives `LAUNCHES`: name -> function that calls a launcher of
`vllm_dflash.triton_kernels` with tensors on the meta device. A driver without a device answers for the GPU, and a
launch only compiles; so arguments get the very specialisation (alignment, buffer size) that they get on a GPU.
One JSON object per compiled kernel goes to standard output, or with --csv a table of all to a file. It needs a process
of its own, without TRITON_INTERPRET.

`Meta` tensors have address 0, which counts as aligned to 16 bytes, as torch's own allocations are.
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # the default turns in triton 3.10

import argparse  # noqa: E402
import contextlib  # noqa: E402
import csv  # noqa: E402
import importlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import triton  # noqa: E402
from candidates import QUICK_VARIABLE  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Shared memory of one thread block, bytes.
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

_TENSOR_CORE = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma_sync": r"mma\.sync"}
_NVIDIA_MEMORY = {
    "cp_async_16": r"cp\.async\.cg[^;]*0x10",
    "load_128": r"ld\.global[^;]*\.v4\.b32",
    "store_128": r"st\.global[^;]*\.v4\.b32",
    "load_16": r"ld\.global\S*\.b16",
    "store_16": r"st\.global\S*\.b16",
}
_AMD_MEMORY = {
    "load_128": r"(?:global|buffer)_load_dwordx4",
    "store_128": r"(?:global|buffer)_store_dwordx4",
    "load_16": r"(?:global|buffer)_load_\S*short",
    "store_16": r"(?:global|buffer)_store_short",
}


class _DriverWithoutDevice:
    """What triton asks a driver for before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[list[dict[str, Any]]]:
    """Within it every launch compiles for the target and runs nothing; the list fills with one report per kernel."""
    driver.set_active(_DriverWithoutDevice(TARGETS[name]))
    reports: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            self.device_caches.clear()
            compiled = run(self, *args, grid=grid, warmup=True, **options)
        tiles = {key: value for key, value in options.items() if key.endswith("_TILE") or key in ("TILE", "SPLIT_K")}
        launched = {"kernel": self.fn.__name__, "target": name, "tiles": tiles}
        reports.append(launched | report(compiled, log.getvalue(), name))
        return compiled

    JITFunction.run = compile_only
    always, dump = triton.knobs.compilation.always_compile, triton.knobs.nvidia.dump_ptxas_log
    triton.knobs.compilation.always_compile = True  # a kernel from the cache has no ptxas log
    triton.knobs.nvidia.dump_ptxas_log = True
    try:
        yield reports
    finally:
        JITFunction.run = run
        triton.knobs.compilation.always_compile, triton.knobs.nvidia.dump_ptxas_log = always, dump


def report(compiled: Any, log: str, target: str) -> dict[str, Any]:
    """Registers, spilled bytes (registers on AMD), shared memory and instructions of a compiled kernel."""
    metadata = compiled.metadata
    result = {"warps": metadata.num_warps, "stages": metadata.num_stages, "shared": metadata.shared}
    result["shared_fits"] = metadata.shared <= SHARED_MEMORY[target]
    if TARGETS[target].backend == "cuda":
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        used = re.search(r"Used (\d+) registers", log)
        if spilled is None or used is None:
            raise RuntimeError(f"ptxas said nothing about registers: {log!r}")
        text = compiled.asm["ptx"]
        result |= {"registers": int(used[1]), "spills": int(spilled[1]) + int(spilled[2])}
        result |= {"tensor_core": _count(_TENSOR_CORE, text), "memory": _count(_NVIDIA_MEMORY, text)}
    else:
        text = compiled.asm["amdgcn"]
        numbers = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
        result |= {"registers": numbers["vgpr_count"]}
        result |= {"spills": numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]}
        result |= {"tensor_core": _count({"mfma": r"v_mfma_"}, text), "memory": _count(_AMD_MEMORY, text)}
    return result


def _count(patterns: dict[str, str], text: str) -> dict[str, int]:
    counts = {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
    return {name: count for name, count in counts.items() if count}


def compile_all(kernel: str, targets: list[str]) -> Iterator[dict[str, Any]]:
    """Reports of every launch of a kernel file on every target."""
    module = importlib.import_module(f"launches_{kernel}")
    cases = getattr(module, "QUICK", module.LAUNCHES) if os.environ.get(QUICK_VARIABLE) == "1" else module.LAUNCHES
    for target in targets:
        for case in cases:
            launch = module.LAUNCHES[case]
            with compiling_for(target) as reports:
                launch()
            assert reports, f"{kernel} {case}: nothing was launched"
            for one in reports:
                yield {"file": kernel, "case": case} | one


def write_csv(file: Path, reports: Iterable[dict[str, Any]]) -> None:
    """The table of compiled kernels, in place of what was there; a row is written as soon as it is known."""
    file.parent.mkdir(parents=True, exist_ok=True)
    seen: set[tuple[Any, ...]] = set()  # a case may launch the same merge for each of its configurations
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        for one in reports:
            counted = ("tiles", "tensor_core", "memory")
            texts = {name: " ".join(f"{key}={n}" for key, n in one[name].items()) for name in counted}
            row = one | texts | {"triton": triton.__version__}
            values = tuple(row.values())
            if not seen:
                writer.writerow(row)
            if values not in seen:
                seen.add(values)
                writer.writerow(values)
                stream.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="default: all that have launches here")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--quick", action="store_true", help="some cases, and only the safe configuration of each")
    parser.add_argument("--csv", type=Path, help="write a table instead")
    options = parser.parse_args()
    if options.quick:
        os.environ[QUICK_VARIABLE] = "1"
    here = Path(__file__).parent
    kernels = options.kernels or sorted(path.stem.removeprefix("launches_") for path in here.glob("launches_*.py"))
    sys.path.insert(0, str(here))
    reports = (one for kernel in kernels for one in compile_all(kernel, options.targets))
    if options.csv is not None:
        write_csv(options.csv, reports)
        return
    for one in reports:
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
