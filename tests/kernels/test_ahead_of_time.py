"""Every kernel compiles for GPUs that are not here, without spilling, and its products run on tensor cores.

Here with its safe configuration on some shapes; `make kernel-report` compiles all that may be chosen.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
KERNELS = sorted(path.stem.removeprefix("launches_") for path in HERE.glob("launches_*.py"))
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]

#: Kernels without a matrix product.
WITHOUT_PRODUCT = {
    "_context_kv_merge_kernel",
    "_draft_head_merge_kernel",
    "_draft_inputs_kernel",
    "_draft_loss_kernel",
    "_feature_fusion_merge_kernel",
    "_merge_splits_kernel",
}
#: (kernel, target) -> most bytes (registers on AMD) that it may spill, with the reason beside it. 0 where not named.
ALLOWED_SPILLS: dict[tuple[str, str], int] = {}


@functools.cache
def compiled(kernel: str) -> list[dict[str, Any]]:
    """Reports of one kernel file on all targets; a process of its own, because triton reads its mode at import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "ahead_of_time.py"), kernel, "--quick"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads(line) for line in finished.stdout.splitlines()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_compiles_without_spilling_and_uses_tensor_cores(kernel, target):
    reports = [one for one in compiled(kernel) if one["target"] == target]
    assert reports
    for one in reports:
        allowed = ALLOWED_SPILLS.get((one["kernel"], target), 0)
        assert one["spills"] <= allowed, one
        assert one["shared_fits"], one
        if one["kernel"] not in WITHOUT_PRODUCT:
            assert one["tensor_core"], one
