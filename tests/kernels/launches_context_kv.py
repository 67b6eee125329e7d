"""Launches of `context_kv` to compile; see ahead_of_time.py."""

from __future__ import annotations

import functools

import torch
import triton
from candidates import candidates

from vllm_dflash.triton_kernels.cache_table import CacheTable
from vllm_dflash.triton_kernels.context_kv import _configs, _launch

#: Drafter -> (hidden size, layers, key/value heads, head size). Hidden sizes are no constants of the kernel and 128
#: divides 2560 as it divides 4096: Qwen3-4B's drafter runs the code of Qwen3-8B's.
DRAFTERS = {"Qwen3-8B": (4096, 5, 8, 128), "SmolLM2": (576, 2, 3, 64)}


def _compile(
    hidden_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    num_rows: int,
    cache: str = "bf16",
    has_sums: bool = True,
    num_configs: int | None = None,
) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype = torch.bfloat16 if cache == "bf16" else _fp8()
    packed = [empty(64, num_kv_heads, 16, 2 * head_size, dtype=dtype) for _ in range(num_layers)]
    keys, values = zip(*(one.transpose(1, 2).split(head_size, dim=-1) for one in packed))
    scales = empty(num_layers, dtype=torch.float32) if dtype.itemsize == 1 else None
    caches = CacheTable(keys, values, None, scales, scales)
    num_outputs = num_layers * 2 * num_kv_heads * head_size
    arguments = (
        empty(num_rows, hidden_size),
        empty(num_rows, 32, dtype=torch.float32) if has_sums else None,
        empty(num_outputs, hidden_size),
        None,
        empty(num_layers, head_size),
        empty(40960, head_size, dtype=torch.float32),
        empty(num_rows, dtype=torch.int64),
        empty(num_rows, dtype=torch.int64),
        caches,
        1e-6,
        1e-6,
        True,
    )
    configs = _configs(num_rows, hidden_size, caches, torch.bfloat16)
    for config in candidates(configs if num_configs is None else configs[:num_configs]):
        _launch(*arguments, config)


def _fp8() -> torch.dtype:
    """The fp8 of the target that is compiled for; sm_80 has none and compiles for float16."""
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn if target.arch >= 89 else torch.float16


EIGHT_B = DRAFTERS["Qwen3-8B"]
LAUNCHES = {
    f"{name}, {num_rows} rows": functools.partial(_compile, *sizes, num_rows)
    for name, sizes in DRAFTERS.items()
    for num_rows in (8, 2048)
} | {
    # With few rows the first two configurations, whole and split, have the tile of all.
    "Qwen3-8B, 8 rows, fp8 cache": functools.partial(_compile, *EIGHT_B, 8, "fp8", num_configs=2),
    "Qwen3-8B, 2048 rows, fp8 cache": functools.partial(_compile, *EIGHT_B, 2048, "fp8"),
    "Qwen3-8B, 8 rows, own statistics": functools.partial(_compile, *EIGHT_B, 8, has_sums=False, num_configs=1),
    "Qwen3-8B, 2048 rows, own statistics": functools.partial(_compile, *EIGHT_B, 2048, has_sums=False),
}
QUICK = ("Qwen3-8B, 8 rows", "Qwen3-8B, 2048 rows, fp8 cache", "SmolLM2, 8 rows")
