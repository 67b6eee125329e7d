"""Merge of the partial results of block_attention, where a request's context was split among programs.

Split i of a row leaves its softmax's result o_i, and l_i = log2 of the sum of 2^score that it saw (-inf: it saw
nothing, and wrote no o_i). With w_i = 2^(l_i - max l), the row's result is sum(w_i o_i) / sum(w_i); rows of which no
split saw anything are zero.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

#: Elements of partial results that a program loads at once: 64 registers of each thread of four warps.
_TILE_ELEMENTS = 8192


def merge_splits_torch(
    partial: torch.Tensor,  # [R, n_kv, splits, rows, D] float32; row q * group + h is head h of the group at query q
    log_sums: torch.Tensor,  # [R, n_kv, splits, rows] float32
    out: torch.Tensor,  # [R * Q, n_heads, D]; written
) -> None:
    """The twin of `merge_splits`."""
    num_reqs, num_kv_heads = partial.shape[:2]
    num_query, group = out.shape[0] // num_reqs, out.shape[1] // num_kv_heads
    for request in range(num_reqs):
        for kv_head in range(num_kv_heads):
            for row in range(num_query * group):
                seen = log_sums[request, kv_head, :, row] > float("-inf")
                weights = torch.softmax(log_sums[request, kv_head, seen, row] * torch.tensor(2.0).log(), 0)
                merged = weights @ partial[request, kv_head, seen, row]
                out[request * num_query + row // group, kv_head * group + row % group] = merged.to(out.dtype)


def merge_splits(partial: torch.Tensor, log_sums: torch.Tensor, out: torch.Tensor) -> None:
    """Write `out` from partial results; the kernel. See `merge_splits_torch` for shapes."""
    num_reqs, num_kv_heads, num_splits, _, head_dim = partial.shape
    num_query, group = out.shape[0] // num_reqs, out.shape[1] // num_kv_heads
    all_splits = triton.next_power_of_2(num_splits)
    split_tile = min(all_splits, max(_TILE_ELEMENTS // head_dim, 1))
    row_tile = min(max(_TILE_ELEMENTS // (head_dim * split_tile), 1), triton.next_power_of_2(num_query * group))
    grid = (triton.cdiv(num_query * group, row_tile), num_kv_heads, num_reqs)
    _merge_splits_kernel[grid](
        partial,
        log_sums,
        out,
        (out.stride(0), out.stride(1)),
        num_splits,
        partial.shape[3],
        NUM_QUERY=num_query,
        GROUP=group,
        D=head_dim,
        ALL_SPLITS=all_splits,
        SPLIT_TILE=split_tile,
        ROW_TILE=row_tile,
        num_warps=4,
    )


if triton is not None:

    @triton.jit
    def _merge_splits_kernel(
        partial_ptr,  # [R, n_kv, num_splits, padded_rows, D] float32
        log_sums_ptr,  # [R, n_kv, num_splits, padded_rows] float32
        out_ptr,  # [R * Q, n_heads, D]
        out_strides,  # (row, head)
        num_splits,
        padded_rows,
        NUM_QUERY: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        ALL_SPLITS: tl.constexpr,
        SPLIT_TILE: tl.constexpr,
        ROW_TILE: tl.constexpr,
    ):
        """One program per request, key/value head and ROW_TILE rows of its group."""
        kv_head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
        row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
        exists = row < NUM_QUERY * GROUP
        first = (request * tl.num_programs(1) + kv_head) * num_splits * padded_rows

        split = tl.arange(0, ALL_SPLITS)
        log_sum = tl.load(
            log_sums_ptr + first + split[None, :] * padded_rows + row[:, None],
            mask=exists[:, None] & (split < num_splits)[None, :],
            other=-float("inf"),
        )
        peak = tl.max(log_sum, axis=1)
        peak = tl.where(peak == -float("inf"), 0.0, peak)  # -inf - -inf is no number
        total = tl.sum(tl.exp2(log_sum - peak[:, None]), axis=1)

        dim = tl.arange(0, D)
        merged = tl.zeros((ROW_TILE, D), tl.float32)
        for start in tl.static_range(0, ALL_SPLITS, SPLIT_TILE):
            index = (start + tl.arange(0, SPLIT_TILE))[None, :] * padded_rows + row[:, None]
            is_split = (start + tl.arange(0, SPLIT_TILE) < num_splits)[None, :]
            log_sum = tl.load(log_sums_ptr + first + index, mask=exists[:, None] & is_split, other=-float("inf"))
            # What a split without keys left in memory is never read.
            partial = tl.load(
                partial_ptr + (first + index)[:, :, None] * D + dim[None, None, :],
                mask=(log_sum > -float("inf"))[:, :, None],
                other=0.0,
            )
            merged += tl.sum(partial * tl.exp2(log_sum - peak[:, None])[:, :, None], axis=1)
        merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]

        out_row = request * NUM_QUERY + row // GROUP
        head = kv_head * GROUP + row % GROUP
        out = out_ptr + (out_row * out_strides[0] + head * out_strides[1])[:, None] + dim[None, :]
        tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=exists[:, None])
