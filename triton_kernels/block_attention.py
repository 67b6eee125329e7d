"""Attention of a block's queries over a request's paged context and over the block itself.

    query i of a request sees    context token j (in the cache)       if n + i - j < W
                                 slot j of its own block (inputs)     if |i - j| < W, and if causal only j <= i

n is the request's context length. W is the sliding window, tokens a query sees back, itself included; in a layer that
is not causal it sees as many ahead, as in z-lab's model and in vLLM (0.32: FlashAttention gets (W - 1, W - 1), the
Triton backend masks |distance| < W). W = 0: no window. A sink is one more logit in the softmax of a head, of no value.

The block's keys and values come from the inputs: the cache is only read, and only within the context.

    grid      (splits of the context, key/value heads * tiles of rows, requests)
    tile      row q * group + h is head h of the group at query q: 16 queries and 4 heads per key/value head fill the
              64 rows of a tensor-core product, and a key is loaded once for all of them
    splits    even parts of the request's own context, split 0 attends to the block as well; block_attention_merge.py
              puts them together. Their number follows from shapes alone, so a CUDA graph can hold the launch.
"""

from __future__ import annotations

import torch

try:
    import triton
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

from .block_attention_launch import check_inputs, launch_block_attention
from .block_rope import BlockRope, block_rope_torch


def block_attention(
    query: torch.Tensor,  # [R * Q, n_heads, D] bf16, fp16 or float32
    key: torch.Tensor,  # [R * Q, n_kv, D]
    value: torch.Tensor,  # [R * Q, n_kv, D]
    key_cache: torch.Tensor,  # [num_pages, page_size, n_kv, D], the queries' dtype or fp8 (e4m3, also as uint8)
    value_cache: torch.Tensor,  # the same
    block_table: torch.Tensor,  # [R, max_pages] int32
    context_lens: torch.Tensor,  # [R] int32, tokens in the cache without the block; negative = padded request
    *,
    num_query_per_req: int,
    scale: float,
    causal: bool = False,
    sliding_window: int = 0,
    sinks: torch.Tensor | None = None,  # [n_heads]
    k_scale: torch.Tensor | None = None,  # one float32: what an fp8 key of the cache is multiplied by
    v_scale: torch.Tensor | None = None,
    rope: BlockRope | None = None,  # then query and key are raw
    out: torch.Tensor | None = None,  # [R * Q, n_heads, D]
) -> torch.Tensor:
    """Attention output of each query, [R * Q, n_heads, D]; the kernel on a GPU, the twin elsewhere.

    Inputs may have any strides but 1 in the last dimension, so views of a fused projection and of both cache layouts
    (NHD, HND) do. Padded requests get zeros and their pages, which may be garbage, are not read.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
        NotImplementedError: an fp8 cache on a GPU without fp8 conversions.
    """
    run = launch_block_attention if triton is not None and query.is_cuda else block_attention_torch
    return run(
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        num_query_per_req=num_query_per_req,
        scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        rope=rope,
        out=out,
    )


def block_attention_torch(
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
) -> torch.Tensor:
    """The twin of the kernel: request by request, softmax in float32."""
    check_inputs(query, key, value, key_cache, value_cache, block_table, num_query_per_req, rope)
    out = torch.empty_like(query) if out is None else out
    if rope is not None:
        query = block_rope_torch(query, rope.q_norm_weight, rope)
        key = block_rope_torch(key, rope.k_norm_weight, rope)
    group = query.shape[1] // key.shape[1]
    for request, length in enumerate(context_lens.tolist()):
        rows = slice(request * num_query_per_req, (request + 1) * num_query_per_req)
        if length < 0:
            out[rows] = 0
            continue
        keys = torch.cat([_gather(key_cache, block_table[request], length, k_scale), key[rows].float()])
        values = torch.cat([_gather(value_cache, block_table[request], length, v_scale), value[rows].float()])
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale

        positions = torch.arange(length + num_query_per_req, device=query.device)
        distance = positions[length:, None] - positions  # [Q, length + Q]
        if causal:
            scores.masked_fill_(distance < 0, float("-inf"))
        if sliding_window:
            scores.masked_fill_(distance.abs() >= sliding_window, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, num_query_per_req, 1)], -1)
        weights = torch.softmax(scores, -1)[..., : len(positions)]
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out


def _gather(cache: torch.Tensor, pages: torch.Tensor, length: int, scale: torch.Tensor | None) -> torch.Tensor:
    """The first tokens of a request, [length, n_kv, D] float32."""
    page_size = cache.shape[1]
    used = pages[: -(-length // page_size)].long()
    cache = cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache
    tokens = cache[used].flatten(0, 1)[:length].float()
    return tokens if scale is None else tokens * scale
