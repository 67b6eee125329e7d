"""Launches of `feature_fusion` to compile; see ahead_of_time.py."""

from __future__ import annotations

import functools

import torch
from candidates import candidates

from vllm_dflash.triton_kernels.feature_fusion import _configs, _launch

#: Drafter -> (hidden size, features). Sizes are no constants of the kernel and 128 divides 2560 as it divides 4096:
#: Qwen3-4B's drafter runs the code of Qwen3-8B's.
DRAFTERS = {"Qwen3-8B": (4096, 5), "SmolLM2": (576, 5)}


def _every_configuration(hidden_size: int, num_features: int, num_rows: int) -> None:
    rows = torch.empty((num_rows, num_features * hidden_size), dtype=torch.bfloat16, device="meta")
    weight = torch.empty((hidden_size, num_features * hidden_size), dtype=torch.bfloat16, device="meta")
    configs = _configs(num_rows, hidden_size, num_features, hidden_size, torch.bfloat16)
    # How many programs share a sum, if several do, changes a constant of the code, not the code.
    by_code = {str(one.options | {"SPLIT_K": one.options["SPLIT_K"] > 1}): one for one in configs}
    for config in candidates(list(by_code.values())):
        _launch(rows.chunk(num_features, dim=1), weight, None, config)


LAUNCHES = {
    f"{name}, {num_rows} rows": functools.partial(_every_configuration, *sizes, num_rows)
    for name, sizes in DRAFTERS.items()
    for num_rows in (8, 2048)
}
QUICK = ("Qwen3-8B, 8 rows", "SmolLM2, 2048 rows")
