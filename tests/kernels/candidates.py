"""Which configurations of a kernel are compiled ahead of time: all that may be chosen, or the safe one in the tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vllm_dflash.triton_kernels.tuning import Config

#: Set by `ahead_of_time.py --quick`.
QUICK_VARIABLE = "DFLASH_QUICK_COMPILE"


def candidates(configs: Sequence[Config]) -> Sequence[Config]:
    """Configurations to compile, the safe one first."""
    return configs[:1] if os.environ.get(QUICK_VARIABLE) == "1" else configs
