"""Launches of `block_attention` to compile; see ahead_of_time.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from candidates import candidates

from vllm_dflash.triton_kernels.block_attention_launch import launch_block_attention
from vllm_dflash.triton_kernels.block_attention_plan import configs, gpu
from vllm_dflash.triton_kernels.block_rope import BlockRope


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attend(
    heads: tuple[int, int], head_dim: int, num_query: int, has_rope: bool = False, is_fp8: bool = False, **options: Any
) -> None:
    """A batch of four in vLLM's cache layout, [pages, heads, tokens, 2 * head_dim].

    With RoPE, which takes more registers, every configuration that the tuner may choose is compiled: the first with
    splits and their merge, the others without. Otherwise the first one is.
    """
    num_reqs, page_size = 4, 16
    num_rows = num_reqs * num_query
    sizes = [heads[0], heads[1], heads[1]]
    query, key, value = _empty(num_rows, sum(sizes) * head_dim).unflatten(1, (-1, head_dim)).split(sizes, 1)
    # sm_80 refuses an fp8 cache; there this case compiles what is compiled already.
    is_fp8 = is_fp8 and gpu() != ("cuda", "80")
    cache = _empty(1024, heads[1], page_size, 2 * head_dim, dtype=torch.uint8 if is_fp8 else torch.bfloat16)
    key_cache, value_cache = cache.transpose(1, 2).split(head_dim, -1)
    if is_fp8:
        options |= {name: _empty(1, dtype=torch.float32) for name in ("k_scale", "v_scale")}
    if has_rope:
        positions, cos_sin_cache = _empty(num_rows, dtype=torch.int64), _empty(40960, head_dim)
        options["rope"] = BlockRope(_empty(head_dim), _empty(head_dim), 1e-6, cos_sin_cache, positions)
    possible = configs(num_query * heads[0] // heads[1], head_dim, element_size=2)
    for index, config in enumerate(candidates(possible if has_rope else possible[:1])):
        launch_block_attention(
            query,
            key,
            value,
            key_cache,
            value_cache,
            _empty(num_reqs, 2560, dtype=torch.int32),
            _empty(num_reqs, dtype=torch.int32),
            num_query_per_req=num_query,
            scale=head_dim**-0.5,
            config=config,
            num_splits=1 if index else 8,
            **options,
        )


_gpt_oss = functools.partial(_attend, (64, 8), 64, 16, sinks=_empty(64), sliding_window=128)

LAUNCHES = {
    "Qwen3-8B": functools.partial(_attend, (32, 8), 128, 16),
    "Qwen3-8B, rope": functools.partial(_attend, (32, 8), 128, 16, has_rope=True),
    "Qwen3-8B, fp8 cache": functools.partial(_attend, (32, 8), 128, 16, is_fp8=True),
    "Qwen3-Coder": functools.partial(_attend, (32, 4), 128, 16),
    "Qwen3-Coder, rope": functools.partial(_attend, (32, 4), 128, 16, has_rope=True),
    "SmolLM2": functools.partial(_attend, (9, 3), 64, 8),
    "SmolLM2, rope": functools.partial(_attend, (9, 3), 64, 8, has_rope=True),
    "GPT-OSS": _gpt_oss,
    "GPT-OSS, rope": functools.partial(_gpt_oss, has_rope=True),
}
QUICK = ("Qwen3-8B, rope", "Qwen3-8B, fp8 cache", "SmolLM2")
