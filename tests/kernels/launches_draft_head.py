"""Launches of `draft_head` to compile, with every configuration that may be chosen; see ahead_of_time.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from candidates import candidates

from vllm_dflash.triton_kernels import draft_head
from vllm_dflash.triton_kernels.tuning import Config


def _every_config(kernel: str, shape: Any, configs: Sequence[Config], launch: Callable[[Config], Any]) -> Config:
    for candidate in candidates(configs)[1:]:
        launch(candidate)
    return configs[0]


def _head(vocabulary: int, hidden_size: int, num_rows: int, top_k: int) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    hidden = meta(num_rows, hidden_size)
    scale = meta(vocabulary, dtype=torch.float32)
    with mock.patch.object(draft_head, "best_config", _every_config):
        weight = meta(vocabulary, hidden_size)
        draft_head._launch(hidden, weight, None, None, top_k, vocabulary, 0.0, 1.0, None)
        target = triton.runtime.driver.active.get_current_target()
        if target.backend == "hip" or target.arch >= 89:
            float8 = torch.float8_e4m3fnuz if target.backend == "hip" else torch.float8_e4m3fn
            weight = meta(vocabulary, hidden_size, dtype=float8)
            draft_head._launch(hidden, weight, None, scale, top_k, vocabulary, 0.0, 1.0, None)


#: Hidden sizes of 576 and 2880 are no multiples of the deeper tiles, which only few rows may get.
LAUNCHES = {
    "Qwen3-8B, 15 rows": partial(_head, 151936, 4096, 15, 1),
    "Qwen3-8B, 15 rows, top 8": partial(_head, 151936, 4096, 15, 8),
    "Qwen3-8B, 120 rows": partial(_head, 151936, 4096, 120, 1),
    "Qwen3-8B, 120 rows, top 8": partial(_head, 151936, 4096, 120, 8),
    "SmolLM2 reduced, 15 rows, top 8": partial(_head, 8192, 576, 15, 8),
    "GPT-OSS, 15 rows": partial(_head, 201088, 2880, 15, 1),
}
QUICK = ("Qwen3-8B, 15 rows", "Qwen3-8B, 120 rows, top 8")
