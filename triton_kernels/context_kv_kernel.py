"""The kernels of `context_kv`: the product with what follows it, and what follows it if the product was split."""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl

    from .product_tiles import tile_of_program
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

if triton is not None:
    DTYPES = {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.float8_e4m3fnuz: tl.float8e4b8,
    }

    # Not specialised: other numbers of rows would compile in the middle of serving.
    @triton.jit(
        do_not_specialize=["num_rows", "slots_stride"],
        do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
    )
    def _context_kv_kernel(
        features_ptr,  # [T, H]
        sums_ptr,  # [T, NUM_SUMS] float32, partial sums of squares; or None
        positions_ptr,  # [T] int64
        slots_ptr,  # [T] or [L, T] int64
        layers,  # _Layers
        caches,  # DeviceCacheTable
        partials_ptr,  # [SPLIT_K, T, N] float32, or None if SPLIT_K is 1
        num_rows,
        num_inputs,
        row_stride,
        slots_stride,  # from layer to layer; 0 = one row of slots for all
        NUM_SUMS: tl.constexpr,
        COMPUTES_SUMS: tl.constexpr,  # whether sums are computed here, and written if SPLIT_K > 1; else read
        EVEN_K: tl.constexpr,  # whether K_TILE divides H
        PRECISION: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr,
        HEAD_SIZE: tl.constexpr,
        ROTARY_SIZE: tl.constexpr,
        IS_NEOX: tl.constexpr,
        CACHE_DTYPE: tl.constexpr,
        FP8_MAX: tl.constexpr,  # 0 = no fp8
        ALIGNMENT: tl.constexpr,
        ROW_TILE: tl.constexpr,
        K_TILE: tl.constexpr,
        SPLIT_K: tl.constexpr,
    ):
        """One program per head of a layer's keys or values, tile of rows and share of the sum over H."""
        num_row_tiles = tl.cdiv(num_rows, ROW_TILE)
        row_tile, head = tile_of_program(tl.program_id(0), num_row_tiles, tl.num_programs(0) // num_row_tiles)
        split = tl.program_id(1)
        row = (row_tile * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
        has_row = row < num_rows
        place = tl.arange(0, HEAD_SIZE)
        element = _element(place % (HEAD_SIZE // 2), place // (HEAD_SIZE // 2), HEAD_SIZE, ROTARY_SIZE, IS_NEOX)
        weight_ptrs = layers.weight + (head * HEAD_SIZE + element).to(tl.int64)[:, None] * num_inputs
        feature_ptrs = features_ptr + row[None, :] * row_stride

        share = tl.cdiv(tl.cdiv(num_inputs, K_TILE), SPLIT_K) * K_TILE
        product = tl.zeros((HEAD_SIZE, ROW_TILE), tl.float32)
        squares = tl.zeros((ROW_TILE,), tl.float32)
        for start in range(split * share, min((split + 1) * share, num_inputs), K_TILE):
            k = start + tl.arange(0, K_TILE)
            if EVEN_K:
                x = tl.load(feature_ptrs + k[:, None], mask=has_row[None, :], other=0.0)
                weight = tl.load(weight_ptrs + k[None, :])
            else:
                has_k = k < num_inputs
                x = tl.load(feature_ptrs + k[:, None], mask=has_row[None, :] & has_k[:, None], other=0.0)
                weight = tl.load(weight_ptrs + k[None, :], mask=has_k[None, :], other=0.0)
            product = tl.dot(weight, x, product, input_precision=PRECISION)
            if COMPUTES_SUMS:
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, axis=0)

        if SPLIT_K > 1:
            num_outputs = tl.num_programs(0) // num_row_tiles * HEAD_SIZE
            out = (split * num_rows.to(tl.int64) + row)[:, None] * num_outputs + head * HEAD_SIZE + place[None, :]
            tl.store(partials_ptr + out, tl.trans(product), mask=has_row[:, None])
            if COMPUTES_SUMS:
                tl.store(sums_ptr + row * SPLIT_K + split, squares, mask=has_row & (head == 0))
        else:
            if not COMPUTES_SUMS:
                squares = _sum_of(sums_ptr, row, has_row, NUM_SUMS)
            _store_head(
                product,
                tl.rsqrt(squares / num_inputs + layers.hidden_norm_eps),
                head,
                row,
                has_row,
                positions_ptr,
                slots_ptr,
                slots_stride,
                layers,
                caches,
                NUM_KV_HEADS,
                HEAD_SIZE,
                ROTARY_SIZE,
                IS_NEOX,
                CACHE_DTYPE,
                FP8_MAX,
                ALIGNMENT,
            )

    # Not specialised: other numbers of rows would compile in the middle of serving.
    @triton.jit(
        do_not_specialize=["num_rows", "slots_stride"],
        do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
    )
    def _context_kv_merge_kernel(
        sums_ptr,  # [T, NUM_SUMS] float32
        positions_ptr,  # [T] int64
        slots_ptr,  # [T] or [L, T] int64
        layers,  # _Layers
        caches,  # DeviceCacheTable
        partials_ptr,  # [SPLIT_K, T, N] float32
        num_rows,
        num_inputs,
        slots_stride,
        NUM_SUMS: tl.constexpr,
        SPLIT_K: tl.constexpr,
        ROW_TILE: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr,
        HEAD_SIZE: tl.constexpr,
        ROTARY_SIZE: tl.constexpr,
        IS_NEOX: tl.constexpr,
        CACHE_DTYPE: tl.constexpr,
        FP8_MAX: tl.constexpr,
        ALIGNMENT: tl.constexpr,
    ):
        """One program per tile of rows and head; partials are added in their order, so results repeat exactly."""
        head = tl.program_id(1)
        row = (tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
        has_row = row < num_rows
        num_outputs = tl.num_programs(1) * HEAD_SIZE
        place = row[:, None] * num_outputs + head * HEAD_SIZE + tl.arange(0, HEAD_SIZE)[None, :]
        product = tl.zeros((ROW_TILE, HEAD_SIZE), tl.float32)
        for split in tl.static_range(SPLIT_K):
            partial_ptrs = partials_ptr + split * num_rows.to(tl.int64) * num_outputs + place
            product += tl.load(partial_ptrs, mask=has_row[:, None], other=0.0)
        squares = _sum_of(sums_ptr, row, has_row, NUM_SUMS)
        _store_head(
            tl.trans(product),
            tl.rsqrt(squares / num_inputs + layers.hidden_norm_eps),
            head,
            row,
            has_row,
            positions_ptr,
            slots_ptr,
            slots_stride,
            layers,
            caches,
            NUM_KV_HEADS,
            HEAD_SIZE,
            ROTARY_SIZE,
            IS_NEOX,
            CACHE_DTYPE,
            FP8_MAX,
            ALIGNMENT,
        )

    @triton.jit
    def _element(pair, is_second, HEAD_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr, IS_NEOX: tl.constexpr):
        """The element of a head that is the first or second of a pair; see the module docstring."""
        if not IS_NEOX:
            return 2 * pair + is_second
        HALF: tl.constexpr = ROTARY_SIZE // 2
        if ROTARY_SIZE == HEAD_SIZE:
            return pair + is_second * HALF
        return pair + tl.where(pair < HALF, is_second * HALF, HALF + is_second * (HEAD_SIZE // 2 - HALF))

    @triton.jit
    def _sum_of(sums_ptr, row, has_row, NUM_SUMS: tl.constexpr):
        """Sums of squares of the rows, from their parts."""
        TILE: tl.constexpr = triton.next_power_of_2(NUM_SUMS)
        part = tl.arange(0, TILE)[:, None]
        mask = (part < NUM_SUMS) & has_row[None, :]
        return tl.sum(tl.load(sums_ptr + row[None, :] * NUM_SUMS + part, mask=mask, other=0.0), axis=0)

    @triton.jit
    def _store_head(
        product,  # [HEAD_SIZE, ROW_TILE] float32, in the order of pairs
        scale,  # [ROW_TILE] float32, 1 / rms of the features
        head,  # over all layers, keys before values in each
        row,  # [ROW_TILE] int64
        has_row,
        positions_ptr,
        slots_ptr,
        slots_stride,
        layers,
        caches,
        NUM_KV_HEADS: tl.constexpr,
        HEAD_SIZE: tl.constexpr,
        ROTARY_SIZE: tl.constexpr,
        IS_NEOX: tl.constexpr,
        CACHE_DTYPE: tl.constexpr,
        FP8_MAX: tl.constexpr,
        ALIGNMENT: tl.constexpr,
    ):
        """Scale, bias, K-norm, RoPE and the store of one head's rows."""
        HALF: tl.constexpr = HEAD_SIZE // 2
        ROTARY_HALF: tl.constexpr = ROTARY_SIZE // 2
        layer = head // (2 * NUM_KV_HEADS)
        is_key = head % (2 * NUM_KV_HEADS) < NUM_KV_HEADS
        slot = tl.load(slots_ptr + layer.to(tl.int64) * slots_stride + row, mask=has_row, other=-1)
        is_written = (slot >= 0)[None, :]

        first, second = product.reshape((2, HALF, row.shape[0])).permute((1, 2, 0)).split()
        first, second = first * scale[None, :], second * scale[None, :]
        pair = tl.arange(0, HALF)
        low = _element(pair, 0, HEAD_SIZE, ROTARY_SIZE, IS_NEOX)
        high = _element(pair, 1, HEAD_SIZE, ROTARY_SIZE, IS_NEOX)
        if IS_NEOX and ROTARY_HALF % 16 == 0:  # or a store of heads that turn in part would be in 16-bit pieces
            low = tl.max_contiguous(tl.multiple_of(low, 16), 16)
            high = tl.max_contiguous(tl.multiple_of(high, 16), 16)
        if layers.bias is not None:
            bias_ptr = layers.bias + head * HEAD_SIZE
            first += tl.load(bias_ptr + low).to(tl.float32)[:, None]
            second += tl.load(bias_ptr + high).to(tl.float32)[:, None]
        if is_key:
            mean_square = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / HEAD_SIZE
            k_scale = tl.rsqrt(mean_square + layers.k_norm_eps)[None, :]
            norm_ptr = layers.k_norm + layer * HEAD_SIZE
            first *= k_scale * tl.load(norm_ptr + low).to(tl.float32)[:, None]
            second *= k_scale * tl.load(norm_ptr + high).to(tl.float32)[:, None]
            position = tl.load(positions_ptr + row, mask=slot >= 0, other=0)
            turns = is_written if ROTARY_SIZE == HEAD_SIZE else is_written & (pair < ROTARY_HALF)[:, None]
            angle_ptrs = layers.cos_sin + position[None, :] * ROTARY_SIZE + pair[:, None]
            cos = tl.load(angle_ptrs, mask=turns, other=1.0).to(tl.float32)
            sin = tl.load(angle_ptrs + ROTARY_HALF, mask=turns, other=0.0).to(tl.float32)
            first, second = first * cos - second * sin, second * cos + first * sin

        if caches.key_scales is not None:
            cache_scale = tl.load((caches.key_scales if is_key else caches.value_scales) + layer)
            first, second = first / cache_scale, second / cache_scale
        if FP8_MAX > 0:
            first = tl.minimum(tl.maximum(first, -FP8_MAX), FP8_MAX)
            second = tl.minimum(tl.maximum(second, -FP8_MAX), FP8_MAX)
        address = tl.load((caches.key_addresses if is_key else caches.value_addresses) + layer)
        cache_ptr = tl.multiple_of(address.to(tl.pointer_type(CACHE_DTYPE)), ALIGNMENT)
        page, row_in_page = slot // caches.page_size, slot % caches.page_size
        offset = page * caches.page_stride + row_in_page * caches.row_stride
        out_ptrs = cache_ptr + (offset + head % NUM_KV_HEADS * caches.head_stride)[:, None]
        is_written = (slot >= 0)[:, None]
        # Turned to [rows, elements] first: on AMD a tile as the product left it would be stored in 16-bit pieces.
        first, second = tl.trans(first.to(CACHE_DTYPE)), tl.trans(second.to(CACHE_DTYPE))
        if IS_NEOX:
            tl.store(out_ptrs + low[None, :], first, mask=is_written)
            tl.store(out_ptrs + high[None, :], second, mask=is_written)
        else:
            both = tl.join(first, second).reshape((row.shape[0], HEAD_SIZE))
            tl.store(out_ptrs + tl.arange(0, HEAD_SIZE)[None, :], both, mask=is_written)
