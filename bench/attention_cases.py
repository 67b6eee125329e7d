"""Attention of a block over paged context, for bench_kernels.py.

Two steps are compared with each other, each with what vLLM launches for it:

    ours, twin, baseline          queries and keys already normalised and rotated, vLLM's block K/V already in the cache
    ours_rope, baseline_rope      raw queries and keys; vLLM normalises, rotates and writes the block to the cache first

`torch_flash` is what torch has for machines without vLLM: no pages, the K/V of each request in one piece.
"""

from __future__ import annotations

from typing import Any

import torch
from floors import KV_BLOCK_SIZE, Case
from implementations import ROUNDED_TWICE, Implementations, Outputs, compared, vllm_ops
from torch.nn import functional

from vllm_dflash.triton_kernels import block_attention as attention
from vllm_dflash.triton_kernels.block_rope import BlockRope

EPS = 1e-6


def block_attention(case: Case, device: str, is_interpreted: bool) -> Implementations:
    model, queries = case.model, case.model.num_query_per_req
    num_rows, page = case.rows * queries, KV_BLOCK_SIZE
    pages_per_req = -(-(case.context + queries) // page)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    qkv = randn(num_rows, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    sizes = [heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)]
    query, key, value = (part.unflatten(1, (-1, model.head_dim)) for part in qkv.split(sizes, 1))
    num_pages = case.rows * pages_per_req
    # As vLLM keeps them in its order NHD: keys and values of a token and head side by side.
    key_cache, value_cache = randn(num_pages, page, model.num_kv_heads, 2 * model.head_dim).chunk(2, -1)
    # Pages of a request lie anywhere, as they do after a while of serving.
    block_table = torch.randperm(num_pages, device=device).int().view(case.rows, pages_per_req)
    context_lens = torch.full((case.rows,), case.context, dtype=torch.int32, device=device)
    positions = case.context + torch.arange(queries, device=device).repeat(case.rows)
    angles = torch.rand(case.context + queries, model.head_dim // 2, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).bfloat16()
    norm = 1 + 0.1 * randn(model.head_dim)
    inputs = (query, key, value, key_cache, value_cache, block_table, context_lens)
    options: dict[str, Any] = {"num_query_per_req": queries, "scale": model.head_dim**-0.5}
    rope = BlockRope(norm, norm, EPS, cos_sin, positions)
    run: Any = attention.launch_block_attention if is_interpreted else attention.block_attention

    by_request = positions.view(case.rows, -1)
    slots = block_table.long().gather(1, by_request // page) * page + by_request % page
    vllm = _VllmAttention(inputs, slots.flatten(), norm, cos_sin, positions, options)
    runs = {
        "ours": lambda: {"out": run(*inputs, **options)},
        "ours_rope": lambda: {"out": run(*inputs, rope=rope, **options)},
        "twin": lambda: {"out": attention.block_attention_torch(*inputs, **options)},
        "torch_flash": _contiguous_attention(inputs, case.context, options),
        "twin_rope": lambda: {"out": attention.block_attention_torch(*inputs, rope=rope, **options)},
    }
    missing = {"compiled": "the twin reads context_lens on the host and loops over requests"}
    reason = vllm.unavailable()
    if reason:
        missing |= {"baseline": reason, "baseline_rope": reason}
    else:
        runs |= {"baseline": vllm.attend, "baseline_rope": vllm.rotate_and_attend}

    def differences(actual: Outputs, expected: Outputs) -> list[str]:
        return compared(actual, expected, {"out": ROUNDED_TWICE})

    return Implementations(runs, differences, missing)


def _contiguous_attention(inputs: tuple[torch.Tensor, ...], context: int, options: dict[str, Any]) -> Any:
    """scaled_dot_product_attention without a mask, the K/V gathered at its first call."""
    query, key, value, key_cache, value_cache, block_table, _ = inputs
    num_reqs = len(block_table)
    gathered: list[torch.Tensor] = []

    def run() -> Outputs:
        if not gathered:
            for cache, block in ((key_cache, key), (value_cache, value)):
                cached = cache[block_table.long()].flatten(1, 2)[:, :context]
                gathered.append(torch.cat([cached, block.unflatten(0, (num_reqs, -1))], 1).transpose(1, 2).contiguous())
        queries = query.unflatten(0, (num_reqs, -1)).transpose(1, 2)
        out = functional.scaled_dot_product_attention(queries, *gathered, scale=options["scale"], enable_gqa=True)
        return {"out": out.transpose(1, 2).flatten(0, 1)}

    return run


class _VllmAttention:
    """FlashAttention as vLLM's backend calls it, and the ops that come before it in a layer."""

    def __init__(
        self,
        inputs: tuple[torch.Tensor, ...],
        slots: torch.Tensor,  # [R * Q], where the block's K/V go
        norm: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        self.query, self.key, self.value, self.key_cache, self.value_cache, self.block_table, context_lens = inputs
        self.slots, self.norm, self.cos_sin, self.positions = slots, norm, cos_sin, positions
        self.scale, self.queries = options["scale"], options["num_query_per_req"]
        self.starts = torch.arange(len(context_lens) + 1, device=slots.device, dtype=torch.int32) * self.queries
        self.seq_lens = context_lens + self.queries
        self.longest = int(self.seq_lens.max())
        self.one = torch.ones(1, device=slots.device)

    def unavailable(self) -> str:
        """Why it cannot run here; empty where it can."""
        if not self.query.is_cuda:
            return "vLLM has FlashAttention for GPUs only"
        try:
            from vllm.v1.attention.backends import fa_utils
        except ImportError as error:
            return f"vLLM is not there: {error}"
        if not fa_utils.is_flash_attn_varlen_func_available():
            return "this vLLM has no FlashAttention"
        self.attention = fa_utils.flash_attn_varlen_func
        self.version = fa_utils.get_flash_attn_version(head_size=self.query.shape[2])
        self._write(self.key)
        return ""

    def attend(self) -> Outputs:
        return self._attend(self.query)

    def rotate_and_attend(self) -> Outputs:
        ops = vllm_ops()
        query, key = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.query, self.key))
        ops.rms_norm(query, self.query, self.norm, EPS)
        ops.rms_norm(key, self.key, self.norm, EPS)
        rows, head_dim = len(query), query.shape[2]
        ops.rotary_embedding(self.positions, query.view(rows, -1), key.view(rows, -1), head_dim, self.cos_sin, True)
        self._write(key)
        return self._attend(query)

    def _attend(self, query: torch.Tensor) -> Outputs:
        out = self.attention(
            q=query,
            k=self.key_cache,
            v=self.value_cache,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.queries,
            seqused_k=self.seq_lens,
            max_seqlen_k=self.longest,
            softmax_scale=self.scale,
            causal=False,
            block_table=self.block_table,
            fa_version=self.version,
        )
        return {"out": out}

    def _write(self, key: torch.Tensor) -> None:
        vllm_ops().reshape_and_cache_flash(
            key, self.value, self.key_cache, self.value_cache, self.slots, "auto", self.one, self.one
        )
