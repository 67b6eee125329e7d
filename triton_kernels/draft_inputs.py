"""Rows of a draft step: token ids, positions and cache slots of context and query rows.

A step sees the rows that the target just computed, request after request. With one request whose target rows
stand at positions 10..13, of which the target rejected the last two, and K = 3 drafted tokens:

    target rows     10   11   12   13         context rows: features -> K/V; 12 and 13 get PAD_SLOT_ID
    query rows                12   13   14   15        anchor (the bonus token), mask, mask, mask

The anchor stands where the first rejected row stood. Rejected rows get no slot: the query rows would overwrite
most of what they write, but only while the block is at least as long as the rejected tail.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

PAD_SLOT_ID = -1  # vLLM's: a row with this slot is not written to the cache


class DraftRows(NamedTuple):
    """Rows of one draft step. T context rows, D drafting requests, Q = 1 + K query rows for each of them."""

    context_positions: torch.Tensor  # [T] int64
    context_slots: torch.Tensor  # [T] int64, PAD_SLOT_ID = do not write
    query_ids: torch.Tensor  # [D * Q] int32
    query_positions: torch.Tensor  # [D * Q] int64
    query_slots: torch.Tensor  # [D * Q] int64
    sample_indices: torch.Tensor  # [D * K] int64, query rows that predict a token


def draft_inputs(
    anchor_ids: torch.Tensor,  # [R] int32
    target_positions: torch.Tensor,  # [T] int64
    query_start_loc: torch.Tensor,  # [R + 1] int32, rows of the target pass by request
    num_rejected: torch.Tensor | None,  # [R] int32, rejected rows at the end of each request's rows
    block_table: torch.Tensor,  # [R, max_blocks] int32
    drafting: torch.Tensor,  # [D] int64, increasing: the requests that draft in this step
    kv_block_size: int,
    mask_token_id: int,
    num_query_per_req: int,
    max_position: int,  # rows at or beyond it get no slot: the drafter has no position for them
) -> DraftRows:
    """All rows of a draft step; the kernel on a GPU, the twin elsewhere. See the module docstring."""
    run = _launch if triton is not None and target_positions.is_cuda else draft_inputs_torch
    return run(
        anchor_ids,
        target_positions,
        query_start_loc,
        num_rejected,
        block_table,
        drafting,
        kv_block_size,
        mask_token_id,
        num_query_per_req,
        max_position,
    )


def context_only(positions: torch.Tensor, slots: torch.Tensor) -> DraftRows:
    """Rows of a step in which nothing was rejected and nobody drafts: the target's own positions and slots [T]."""
    longs = positions.new_empty(0)
    return DraftRows(positions, slots, positions.new_empty(0, dtype=torch.int32), longs, longs, longs)


def draft_inputs_torch(
    anchor_ids: torch.Tensor,
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor | None,
    block_table: torch.Tensor,
    drafting: torch.Tensor,
    kv_block_size: int,
    mask_token_id: int,
    num_query_per_req: int,
    max_position: int,
) -> DraftRows:
    """The twin of the kernel, and what runs on a CPU.

    It works with numpy on the tensors' own memory: a step has few rows, and torch takes five times as long for them.
    """
    anchors, positions, starts = anchor_ids.numpy(), target_positions.numpy(), query_start_loc.numpy()
    table, chosen = block_table.numpy(), drafting.numpy()
    valid_ends = starts[1:] if num_rejected is None else starts[1:] - num_rejected.numpy()

    def slots_of(requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
        pages = table[requests, positions // kv_block_size].astype(np.int64)
        return pages * kv_block_size + positions % kv_block_size

    request = np.repeat(np.arange(len(anchors)), np.diff(starts))
    is_written = (np.arange(len(positions)) < valid_ends[request]) & (positions < max_position)
    context_positions = np.where(is_written, positions, 0)
    context_slots = np.where(is_written, slots_of(request, context_positions), PAD_SLOT_ID)

    last_positions = positions[valid_ends[chosen] - 1]
    query_positions = last_positions[:, None] + np.arange(1, 1 + num_query_per_req)  # [D, Q]
    query_ids = np.full(query_positions.shape, mask_token_id, dtype=np.int32)
    query_ids[:, 0] = anchors[chosen]
    query_slots = slots_of(chosen[:, None], query_positions)
    sample_indices = np.arange(query_ids.size).reshape(query_ids.shape)[:, 1:]
    fields = (context_positions, context_slots, query_ids, query_positions, query_slots, sample_indices)
    return DraftRows(*(torch.from_numpy(field.reshape(-1)) for field in fields))


def _launch(
    anchor_ids: torch.Tensor,
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor | None,
    block_table: torch.Tensor,
    drafting: torch.Tensor,
    kv_block_size: int,
    mask_token_id: int,
    num_query_per_req: int,
    max_position: int,
) -> DraftRows:
    num_rows, num_reqs, num_drafting = target_positions.shape[0], anchor_ids.shape[0], drafting.shape[0]
    num_queries = num_drafting * num_query_per_req
    query_index = torch.full_like(anchor_ids, -1)
    query_index[drafting] = torch.arange(num_drafting, dtype=query_index.dtype, device=query_index.device)
    longs = target_positions.new_empty
    rows = DraftRows(
        context_positions=longs(num_rows),
        context_slots=longs(num_rows),
        query_ids=anchor_ids.new_empty(num_queries),
        query_positions=longs(num_queries),
        query_slots=longs(num_queries),
        sample_indices=longs(num_queries - num_drafting),
    )
    if num_reqs == 0:
        return rows
    _draft_inputs_kernel[(num_reqs,)](
        anchor_ids,
        target_positions,
        query_start_loc,
        anchor_ids if num_rejected is None else num_rejected,
        block_table,
        query_index,
        *rows,
        block_table.stride(0),
        kv_block_size,
        mask_token_id,
        max_position,
        NUM_QUERY=num_query_per_req,
        QUERY_TILE=triton.next_power_of_2(num_query_per_req),
        ROW_TILE=256,
        HAS_REJECTED=num_rejected is not None,
    )
    return rows


if triton is not None:

    @triton.jit
    def _draft_inputs_kernel(
        anchor_ids_ptr,  # [R] int32
        target_positions_ptr,  # [T] int64
        query_start_loc_ptr,  # [R + 1] int32
        num_rejected_ptr,  # [R] int32, read only if HAS_REJECTED
        block_table_ptr,  # [R, max_blocks] int32
        query_index_ptr,  # [R] int32, which drafting request this is; -1 = it does not draft
        context_positions_ptr,
        context_slots_ptr,
        query_ids_ptr,
        query_positions_ptr,
        query_slots_ptr,
        sample_indices_ptr,
        block_table_stride,
        kv_block_size,
        mask_token_id,
        max_position,
        NUM_QUERY: tl.constexpr,
        QUERY_TILE: tl.constexpr,
        ROW_TILE: tl.constexpr,
        HAS_REJECTED: tl.constexpr,
    ):
        """One program per request."""
        request = tl.program_id(0)
        table_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
        start = tl.load(query_start_loc_ptr + request)
        end = tl.load(query_start_loc_ptr + request + 1)
        valid_end = end
        if HAS_REJECTED:
            valid_end = end - tl.load(num_rejected_ptr + request)

        for first in tl.range(start, end, ROW_TILE):
            row = first + tl.arange(0, ROW_TILE)
            exists = row < end
            position = tl.load(target_positions_ptr + row, mask=exists, other=0)
            is_written = (row < valid_end) & (position < max_position)
            position = tl.where(is_written, position, 0)
            page = tl.load(table_ptr + position // kv_block_size, mask=exists, other=0).to(tl.int64)
            slot = tl.where(is_written, page * kv_block_size + position % kv_block_size, -1)
            tl.store(context_positions_ptr + row, position, mask=exists)
            tl.store(context_slots_ptr + row, slot, mask=exists)

        index = tl.load(query_index_ptr + request)
        if index >= 0:
            offset = tl.arange(0, QUERY_TILE)
            in_block = offset < NUM_QUERY
            position = tl.load(target_positions_ptr + valid_end - 1) + 1 + offset
            page = tl.load(table_ptr + position // kv_block_size, mask=in_block, other=0).to(tl.int64)
            row = index * NUM_QUERY + offset
            anchor = tl.load(anchor_ids_ptr + request)
            tl.store(query_ids_ptr + row, tl.where(offset == 0, anchor, mask_token_id), mask=in_block)
            tl.store(query_positions_ptr + row, position, mask=in_block)
            tl.store(query_slots_ptr + row, page * kv_block_size + position % kv_block_size, mask=in_block)
            predicts = in_block & (offset > 0)
            sample = index * (NUM_QUERY - 1) + offset - 1
            tl.store(sample_indices_ptr + sample, row.to(tl.int64), mask=predicts)
