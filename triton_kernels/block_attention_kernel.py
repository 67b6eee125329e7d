"""The kernel of block_attention, whose module docstring says what it computes and how it is cut.

A program keeps the softmax of its rows in base 2 as (peak, total, output): the greatest score so far, the sum of
2^(score - peak), and the values weighted by that. Split 0 begins with the sinks and the block's own keys, then keys of
the context change it tile after tile. (With the block last, ptxas for sm_80 spills.) The value scale of an fp8 cache is
one product at the end, for which the block's part is divided by it first.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton on this platform: nothing to launch
    triton = None

if triton is not None:
    from .block_rope import normed_and_rotated

    @triton.jit
    def block_attention_kernel(
        query_ptr,  # [R * Q, n_heads, D]
        key_ptr,  # [R * Q, n_kv, D]
        value_ptr,  # [R * Q, n_kv, D]
        key_cache_ptr,  # [num_pages, PAGE_SIZE, n_kv, D], uint8 if FP8_TYPE
        value_cache_ptr,
        block_table_ptr,  # [R, max_pages] int32
        context_lens_ptr,  # [R] int32
        sinks_ptr,  # [n_heads] or None
        k_scale_ptr,  # one float32 or None
        v_scale_ptr,
        rope_ptrs,  # (q_norm_weight, k_norm_weight, cos_sin_cache, positions), read if ROTARY_DIM
        eps,
        out_ptr,  # [R * Q, n_heads, D]
        partial_ptr,  # [R, n_kv, splits, padded rows, D] float32, or None: there is one split and it writes out
        log_sums_ptr,  # [R, n_kv, splits, padded rows] float32 or None
        strides,  # (row, head) of query, key, value, out
        cache_strides,  # (page, token, head) of the key cache, of the value cache; row of the block table
        score_scale,  # the model's, times log2(e)
        NUM_QUERY: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        WINDOW: tl.constexpr,
        CAUSAL: tl.constexpr,
        FP8_TYPE: tl.constexpr,
        ROTARY_DIM: tl.constexpr,
        IS_NEOX: tl.constexpr,
        LEAST_TILES: tl.constexpr,
        PRECISION: tl.constexpr,
        ROW_TILE: tl.constexpr,
        KEY_TILE: tl.constexpr,
        SLOT_TILE: tl.constexpr,
    ):
        """One program per split, key/value head and tile of rows, and request."""
        ROW_TILES: tl.constexpr = (NUM_QUERY * GROUP + ROW_TILE - 1) // ROW_TILE
        split, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
        kv_head, first_row = tl.program_id(1) // ROW_TILES, tl.program_id(1) % ROW_TILES * ROW_TILE
        row = first_row + tl.arange(0, ROW_TILE)
        exists = row < NUM_QUERY * GROUP
        query_index, head = row // GROUP, kv_head * GROUP + row % GROUP
        query_row = request * NUM_QUERY + query_index
        dim = tl.arange(0, D)
        context_len = tl.load(context_lens_ptr + request)

        first, end = _part_of_split(context_len, split, tl.num_programs(0), WINDOW, KEY_TILE, LEAST_TILES)
        partial_row = (request * (tl.num_programs(1) // ROW_TILES) + kv_head) * tl.num_programs(0) + split
        partial_row = partial_row * (ROW_TILES * ROW_TILE) + row
        out_row = query_row * strides[3][0] + head * strides[3][1]

        if (context_len < 0) | ((split > 0) & (first >= end)):
            if log_sums_ptr is None:
                nothing = tl.zeros((ROW_TILE, D), out_ptr.dtype.element_ty)
                tl.store(out_ptr + out_row[:, None] + dim[None, :], nothing, mask=exists[:, None])
            else:
                tl.store(log_sums_ptr + partial_row, tl.full((ROW_TILE,), -float("inf"), tl.float32))
            return

        query = _rows_of(query_ptr, strides[0], query_row, head, exists, D)
        if ROTARY_DIM > 0:
            position = tl.load(rope_ptrs[3] + query_row, mask=exists, other=0)
            query = normed_and_rotated(query, rope_ptrs[0], eps, rope_ptrs[2], position, ROTARY_DIM, IS_NEOX)

        peak = tl.full((ROW_TILE,), -float("inf"), tl.float32)
        total = tl.zeros((ROW_TILE,), tl.float32)
        output = tl.zeros((ROW_TILE, D), tl.float32)
        if split == 0:
            if sinks_ptr is not None:
                sink = tl.load(sinks_ptr + head, mask=exists, other=0.0).to(tl.float32) * 1.4426950408889634
                peak, total = sink, tl.full((ROW_TILE,), 1.0, tl.float32)
            slot = tl.arange(0, SLOT_TILE)
            slot_row = request * NUM_QUERY + slot
            slot_keys = _rows_of(key_ptr, strides[1], slot_row, kv_head, slot < NUM_QUERY, D)
            slot_values = _rows_of(value_ptr, strides[2], slot_row, kv_head, slot < NUM_QUERY, D)
            if ROTARY_DIM > 0:
                at = tl.load(rope_ptrs[3] + slot_row, mask=slot < NUM_QUERY, other=0)
                slot_keys = normed_and_rotated(slot_keys, rope_ptrs[1], eps, rope_ptrs[2], at, ROTARY_DIM, IS_NEOX)
            slot_scores = tl.dot(query, slot_keys.T, input_precision=PRECISION) * score_scale
            sees_slot = _sees_slot(query_index, slot, NUM_QUERY, CAUSAL, WINDOW)
            peak, total, output = _attend(slot_scores, sees_slot, slot_values, peak, total, output, PRECISION)
            if v_scale_ptr is not None:
                output = output / tl.load(v_scale_ptr)

        key_scale = score_scale
        if k_scale_ptr is not None:
            key_scale = key_scale * tl.load(k_scale_ptr)
        for start in tl.range(first, end, KEY_TILE):
            token = start + tl.arange(0, KEY_TILE)
            is_context = token < end
            page = tl.load(block_table_ptr + request * cache_strides[2] + token // PAGE_SIZE, mask=is_context, other=0)
            keys = _from_cache(key_cache_ptr, cache_strides[0], page, token, kv_head, is_context, D, PAGE_SIZE)
            values = _from_cache(value_cache_ptr, cache_strides[1], page, token, kv_head, is_context, D, PAGE_SIZE)
            if FP8_TYPE is not None:
                keys = keys.to(FP8_TYPE, bitcast=True).to(tl.float32).to(query.dtype)
                values = values.to(FP8_TYPE, bitcast=True).to(tl.float32).to(query.dtype)
            scores = tl.dot(query, keys.T, input_precision=PRECISION) * key_scale
            is_seen = is_context[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (context_len + query_index[:, None] - token[None, :] < WINDOW)
            peak, total, output = _attend(scores, is_seen, values, peak, total, output, PRECISION)

        output = output / tl.where(total == 0.0, 1.0, total)[:, None]
        if v_scale_ptr is not None:
            output = output * tl.load(v_scale_ptr)
        if log_sums_ptr is None:
            tl.store(
                out_ptr + out_row[:, None] + dim[None, :], output.to(out_ptr.dtype.element_ty), mask=exists[:, None]
            )
        else:
            tl.store(log_sums_ptr + partial_row, peak + tl.log2(total))
            tl.store(partial_ptr + partial_row[:, None] * D + dim[None, :], output)

    @triton.jit
    def _part_of_split(context_len, split, num_splits, WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr):
        """First context token of a split, and the one after its last."""
        low = 0
        if WINDOW > 0:  # what query 0 sees: the others see less
            low = tl.maximum(context_len + 1 - WINDOW, 0) // TILE * TILE
        tiles = tl.maximum(tl.cdiv(tl.cdiv(context_len - low, TILE), num_splits), LEAST)
        first = low + split * tiles * TILE
        return first, tl.minimum(first + tiles * TILE, context_len)

    @triton.jit
    def _rows_of(ptr, strides, row, head, exists, D: tl.constexpr):
        """[rows, D] of one head, or of one head per row; zeros where no row exists."""
        offset = row * strides[0] + head * strides[1]
        return tl.load(ptr + offset[:, None] + tl.arange(0, D)[None, :], mask=exists[:, None], other=0.0)

    @triton.jit
    def _sees_slot(query, slot, NUM_QUERY: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
        """[rows, slots]: which slot of its own block a query sees."""
        distance = query[:, None] - slot[None, :]
        is_seen = (slot < NUM_QUERY)[None, :]
        if CAUSAL:
            is_seen = is_seen & (distance >= 0)
        if WINDOW > 0:
            is_seen = is_seen & (distance < WINDOW) & (distance > -WINDOW)
        return is_seen

    @triton.jit
    def _from_cache(cache_ptr, strides, page, token, kv_head, exists, D: tl.constexpr, PAGE_SIZE: tl.constexpr):
        """[tokens, D] of a cache; zeros where no token exists, as what is there may be NaN."""
        offset = page.to(tl.int64) * strides[0] + (token % PAGE_SIZE) * strides[1] + kv_head * strides[2]
        return tl.load(cache_ptr + offset[:, None] + tl.arange(0, D)[None, :], mask=exists[:, None], other=0)

    @triton.jit
    def _attend(scores, is_seen, values, peak, total, output, PRECISION: tl.constexpr):
        """(peak, total, output) after more keys. A row that has seen none yet keeps (-inf, 0, 0)."""
        scores = tl.where(is_seen, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is no number
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(peak - finite)
        output = tl.dot(weights.to(values.dtype), values, output * shrink[:, None], input_precision=PRECISION)
        return higher, total * shrink + tl.sum(weights, axis=1), output
