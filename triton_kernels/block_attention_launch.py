"""Launch of the block_attention kernel: what it refuses, its tiles and splits, its buffers."""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

from . import block_attention_plan as plan
from .block_attention_merge import merge_splits
from .block_rope import BlockRope
from .tuning import Config, best_config, power_of_two

if triton is not None:
    from .block_attention_kernel import block_attention_kernel

_FP8 = (torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def check_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    num_query_per_req: int,
    rope: BlockRope | None,
) -> None:
    """Refuse what neither kernel nor twin computes; see `block_attention` for errors."""
    num_rows, num_heads, head_dim = query.shape
    if not 2 <= num_query_per_req <= 16 or num_rows != len(block_table) * num_query_per_req:
        raise ValueError(
            f"query has {num_rows} rows, but {len(block_table)} requests of {num_query_per_req} queries (2 to 16 are "
            f"supported) need {len(block_table) * num_query_per_req}; pad or cut the batch."
        )
    if head_dim not in (16, 32, 64, 128, 256) or num_heads % key.shape[1]:
        raise ValueError(
            f"query has {num_heads} heads of {head_dim} and key {key.shape[1]}; block_attention needs a power of two "
            f"from 16 to 256 and a multiple of key's heads. Use vLLM's attention for this drafter."
        )
    per_row, per_token = (num_rows, key.shape[1], head_dim), (key.shape[1], head_dim)
    if key.shape != per_row or value.shape != per_row or key_cache.shape[2:] != per_token:
        raise ValueError(
            f"key {tuple(key.shape)} or key_cache {tuple(key_cache.shape)} does not fit query {query.shape}"
        )
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (query.dtype, *_FP8):
        raise ValueError(f"the cache holds {key_cache.dtype}; it has to hold {query.dtype} as the queries do, or fp8.")
    if any(x.stride(-1) != 1 for x in (query, key, value, key_cache, value_cache)):
        raise ValueError(
            "the last dimension of every input must be contiguous; call .contiguous() on the one that is not."
        )
    if rope is not None:
        rope.check(head_dim)


def launch_block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_query_per_req: int,
    scale: float,
    causal: bool = False,
    sliding_window: int = 0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rope: BlockRope | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,  # instead of the measured one
    num_splits: int | None = None,  # instead of what the plan says
) -> torch.Tensor:
    """`block_attention` by the kernel, whatever the device."""
    check_inputs(query, key, value, key_cache, value_cache, block_table, num_query_per_req, rope)
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    (num_reqs, max_pages), (_, page_size, num_kv_heads, head_dim) = block_table.shape, key_cache.shape
    if num_reqs == 0:
        return out
    rows = num_query_per_req * (query.shape[1] // num_kv_heads)
    fp8_type = plan.fp8_type(key_cache.dtype) if key_cache.dtype in _FP8 else None
    if fp8_type is not None:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    bound = max_pages * page_size
    bound = min(bound, sliding_window) if sliding_window else bound

    rope_tensors = (None,) * 4 if rope is None else rope.tensors

    def run(chosen: Config) -> None:
        row_tile, key_tile = chosen.options["ROW_TILE"], chosen.options["KEY_TILE"]
        row_tiles = triton.cdiv(rows, row_tile)
        splits = num_splits or plan.number_of_splits(
            num_reqs * num_kv_heads * row_tiles, bound, row_tile, plan.multiprocessors(query.device)
        )
        partial, log_sums = None, None
        if splits > 1:
            log_sums = query.new_empty((num_reqs, num_kv_heads, splits, row_tiles * row_tile), dtype=torch.float32)
            partial = query.new_empty((*log_sums.shape, head_dim), dtype=torch.float32)
        block_attention_kernel[splits, num_kv_heads * row_tiles, num_reqs](
            query,
            key,
            value,
            key_cache,
            value_cache,
            block_table,
            context_lens,
            sinks,
            k_scale,
            v_scale,
            rope_tensors,
            0.0 if rope is None else rope.eps,
            out,
            partial,
            log_sums,
            tuple(tuple(x.stride()[:2]) for x in (query, key, value, out)),
            (tuple(key_cache.stride()[:3]), tuple(value_cache.stride()[:3]), block_table.stride(0)),
            scale * 1.4426950408889634,
            NUM_QUERY=num_query_per_req,
            GROUP=query.shape[1] // num_kv_heads,
            D=head_dim,
            PAGE_SIZE=page_size,
            WINDOW=sliding_window,
            CAUSAL=causal,
            FP8_TYPE=fp8_type,
            ROTARY_DIM=0 if rope is None else rope.cos_sin_cache.shape[1],
            IS_NEOX=rope is not None and rope.is_neox_style,
            LEAST_TILES=triton.cdiv(plan.least_tokens(row_tile), key_tile),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            SLOT_TILE=16,
            **chosen.options,
        )
        if partial is not None and log_sums is not None:
            merge_splits(partial, log_sums, out)

    run(config or _config_for(query, key_cache, num_reqs, rows, bound, rope is not None, run))
    return out


def _config_for(query: Any, key_cache: Any, num_reqs: int, rows: int, bound: int, has_rope: bool, run: Any) -> Config:
    shape = (power_of_two(num_reqs), key_cache.shape[2], rows, query.shape[2], power_of_two(bound))
    dtypes = (str(query.dtype), str(key_cache.dtype), "rope" if has_rope else "rotated")
    candidates = plan.configs(rows, query.shape[2], query.element_size())
    return best_config("block_attention", shape + dtypes, candidates, run)
