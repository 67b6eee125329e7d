"""Attention of all blocks of a packed row at once, in three implementations of one rule.

The rule (paper, training; z-lab's masks): slot q of the block anchored at row a sees

    context row c    if it is of the same document and c < a                      (features stop before the anchor)
    slot j           of its own block; if causal only j <= q
    and in a layer with a sliding window W only what is less than W positions away.

A dense mask over [blocks, context + blocks] would be mostly empty: no block sees another.

    sdpa       CPU and everywhere: a few neighbouring blocks at a time, against the context up to the last of them
    flex       CUDA: Flex Attention with a block mask, one kernel for all
    xformers   CUDA without Flex: memory-efficient attention, the same pieces as sdpa
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_dflash.training.blocks import Blocks

Backend = Literal["sdpa", "flex", "xformers"]

#: Slots that the sdpa and xformers pieces attend with at a time; their own keys are the part of a piece that is wasted.
_SLOTS_PER_PIECE = 128


@dataclass(frozen=True)
class Visibility:
    """What a layer's slots may see beyond the rule for context."""

    causal: bool
    window: int | None


def block_attention(
    q: Tensor,  # [A, S, heads, head_dim]: the last S slots of each block
    block_kv: tuple[Tensor, Tensor],  # [A, length, kv_heads, head_dim] each
    context_kv: tuple[Tensor, Tensor],  # [T, kv_heads, head_dim] each
    blocks: Blocks,
    visibility: Visibility,
    backend: Backend,
) -> Tensor:  # [A, S, heads, head_dim]
    """Attention output of each slot, in the dtype of the values."""
    # Under autocast the norms give float32 where the projections give bf16, and only sdpa would cast by itself.
    dtype = block_kv[1].dtype
    q = q.to(dtype)
    block_kv, context_kv = ((k.to(dtype), v) for k, v in (block_kv, context_kv))
    if len(blocks.anchors) == 0:  # no document has two supervised tokens in a row
        return q
    if backend == "flex":
        return _flex(q, block_kv, context_kv, blocks, visibility)
    attend = _sdpa_piece if backend == "sdpa" else _xformers_piece
    return _in_pieces(q, block_kv, context_kv, blocks, visibility, attend)


def default_backend(device: torch.device) -> Backend:
    """Flex on CUDA where torch has it, else xformers where installed, else sdpa."""
    if device.type != "cuda":
        return "sdpa"
    if importlib.util.find_spec("torch.nn.attention.flex_attention"):
        return "flex"
    return "xformers" if importlib.util.find_spec("xformers") else "sdpa"


def _in_pieces(
    q: Tensor,
    block_kv: tuple[Tensor, Tensor],
    context_kv: tuple[Tensor, Tensor],
    blocks: Blocks,
    visibility: Visibility,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    group = q.shape[2] // context_kv[0].shape[1]
    outputs = []
    for piece in _pieces(blocks):
        first = int(blocks.document_start[piece.start])
        context = slice(first, int(blocks.anchors[piece.stop - 1]))
        keys, values = (
            torch.cat([of_context[context], of_block[piece].flatten(0, 1)]).repeat_interleave(group, 1)
            for of_context, of_block in zip(context_kv, block_kv)
        )
        visible = _visible(blocks, piece, context, q.shape[1], visibility)
        outputs.append(attend(q[piece].flatten(0, 1), keys, values, visible).view(-1, *q.shape[1:]))
    return torch.cat(outputs)


def _pieces(blocks: Blocks) -> Iterator[slice]:
    """Runs of neighbouring blocks of one document."""
    per_piece = max(1, _SLOTS_PER_PIECE // blocks.length)
    starts = blocks.document_start.tolist()
    begin = 0
    for end in range(1, len(starts) + 1):
        if end == len(starts) or starts[end] != starts[begin] or end - begin == per_piece:
            yield slice(begin, end)
            begin = end


def _visible(blocks: Blocks, piece: slice, context: slice, num_slots: int, visibility: Visibility) -> Tensor:
    """[slots of the piece, context + slots of the piece] bool."""
    device, length = blocks.anchors.device, blocks.length
    anchors = blocks.anchors[piece]
    slots = torch.arange(length - num_slots, length, device=device)
    positions = blocks.positions[piece]
    # Both index spaces step by one per token, so a row's position is its distance from the document's first row.
    rows = torch.arange(context.start, context.stop, device=device)
    sees_context = (rows < anchors[:, None]).repeat_interleave(num_slots, 0)
    block = torch.arange(len(anchors), device=device)
    same_block = block.repeat_interleave(num_slots)[:, None] == block.repeat_interleave(length)
    query_slot = slots.repeat(len(anchors))[:, None]
    key_slot = torch.arange(length, device=device).repeat(len(anchors))
    sees_slot = same_block & (key_slot <= query_slot) if visibility.causal else same_block
    if visibility.window is not None:
        query_position = positions[:, slots].flatten()[:, None]
        sees_context = sees_context & (query_position - (rows - context.start) < visibility.window)
        sees_slot = sees_slot & ((query_position - positions.flatten()).abs() < visibility.window)
    return torch.cat([sees_context, sees_slot], dim=1)


def _sdpa_piece(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """[rows, heads, head_dim] from q [rows, heads, head_dim], k and v [keys, heads, head_dim]."""
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=visible
    )
    return out[0].transpose(0, 1)


def _xformers_piece(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    from xformers.ops import memory_efficient_attention

    num_rows, num_keys = visible.shape
    # xformers wants the bias' last dimension in memory padded to a multiple of 8.
    padded = torch.full((num_rows, (num_keys + 7) // 8 * 8), float("-inf"), dtype=q.dtype, device=q.device)
    padded[:, :num_keys].masked_fill_(visible, 0.0)
    bias = padded[:, :num_keys].expand(1, q.shape[1], num_rows, num_keys)
    return memory_efficient_attention(q[None], k[None], v[None], attn_bias=bias)[0]


def _flex(
    q: Tensor,
    block_kv: tuple[Tensor, Tensor],
    context_kv: tuple[Tensor, Tensor],
    blocks: Blocks,
    visibility: Visibility,
) -> Tensor:
    num_blocks, num_slots = q.shape[:2]
    keys, values = (
        torch.cat([of_context, of_block.flatten(0, 1)])[None].transpose(1, 2)
        for of_context, of_block in zip(context_kv, block_kv)
    )
    attend, make_mask = _flex_functions(q.device.type)
    rule = _flex_rule(blocks, len(context_kv[0]), num_slots, visibility)
    mask = make_mask(rule, None, None, num_blocks * num_slots, keys.shape[2], device=q.device)
    queries = q.flatten(0, 1)[None].transpose(1, 2)
    out = attend(queries, keys, values, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(q.shape)


def _flex_rule(blocks: Blocks, num_context: int, num_slots: int, visibility: Visibility) -> Any:
    length, skipped = blocks.length, blocks.length - num_slots
    anchors, starts, window = blocks.anchors, blocks.document_start, visibility.window

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // num_slots, query % num_slots + skipped
        is_context = key < num_context
        context_row = torch.where(is_context, key, 0)
        sees_context = is_context & (context_row >= starts[block]) & (context_row < anchors[block])
        own = torch.where(is_context, 0, key - num_context)
        sees_slot = ~is_context & (own // length == block)
        distance = torch.where(is_context, anchors[block] + slot - context_row, slot - own % length)
        if visibility.causal:
            sees_slot = sees_slot & (own % length <= slot)
        sees_any = sees_context | sees_slot
        return sees_any if window is None else sees_any & (distance.abs() < window)

    return sees


@functools.cache
def _flex_functions(device_type: str) -> tuple[Any, Any]:
    """Flex Attention and its mask builder, compiled on CUDA; the eager forms are for checks on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device_type == "cuda":
        return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)
    return flex_attention, create_block_mask
