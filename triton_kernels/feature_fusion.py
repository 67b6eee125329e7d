"""Fusion of the target's features, without concatenating them, with the row statistics that RMSNorm needs next.

    values[t] = W_c [h_1[t]; ...; h_F[t]] + bias          rounded to the weights' dtype
    sum_squares[t, p] = sum of values[t, j]^2 over the columns j of tile p, of the rounded values

RMSNorm of the values is then values * rsqrt(sum(sum_squares[t]) / H + eps), without a pass over them.

The product is taken as W x^T, tiles [columns of the output, rows]: the many columns fill the long side of the tensor
core's instruction, and sixteen rows are enough for the short one. A decode step has one tile of rows and too few tiles
of columns to keep a GPU's memory busy, so the sum over the inputs is split: every program writes the float32 partial
of its share, and `_feature_fusion_merge_kernel` adds them in a fixed order. A second launch was chosen over "the last
program to finish adds up": it needs no counter to reset and no fence between programs, and in a CUDA graph
a launch is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .product_tiles import configs_of_product, precision_of
from .tuning import Config, best_config, power_of_two

try:
    import triton
    import triton.language as tl

    from .product_tiles import tile_of_program
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

MERGED_COLUMNS = 512  # of one program that adds partials


class FusedFeatures(NamedTuple):
    """What the drafter's layers read. T rows, H columns, in P tiles."""

    values: torch.Tensor  # [T, H], dtype of the weights
    sum_squares: torch.Tensor  # [T, P] float32; P depends on the tiles


def feature_fusion(
    features: Sequence[torch.Tensor],  # F tensors [T, H_f], last stride 1; also column views of one [T, F * H_f]
    weight: torch.Tensor,  # [H, F * H_f], last stride 1
    bias: torch.Tensor | None = None,  # [H]
) -> FusedFeatures:
    """Fused features and their sums of squares; the kernel on a GPU, the twin elsewhere. See the module docstring.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit together.
    """
    _check(features, weight, bias)
    run = _launch if triton is not None and weight.is_cuda else feature_fusion_torch
    return run(features, weight, bias)


def feature_fusion_torch(
    features: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None = None
) -> FusedFeatures:
    """The twin of the kernel: one product per feature, one tile of columns."""
    feature_size = features[0].shape[1]
    total = weight.new_zeros((features[0].shape[0], weight.shape[0]), dtype=torch.float32)
    for index, feature in enumerate(features):
        columns = slice(index * feature_size, (index + 1) * feature_size)
        total += feature.float() @ weight[:, columns].float().T
    if bias is not None:
        total += bias.float()
    values = total.to(weight.dtype)
    return FusedFeatures(values, values.float().square().sum(dim=1, keepdim=True))


def _check(features: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    shapes = {tuple(feature.shape) for feature in features}
    if len(shapes) != 1:
        raise ValueError(f"all features need one shape [T, H_f], got {sorted(shapes)}.")
    feature_size = features[0].shape[1]
    if weight.shape[1] != len(features) * feature_size:
        raise ValueError(
            f"the weight has {weight.shape[1]} input columns, {len(features)} features of {feature_size} have "
            f"{len(features) * feature_size}; use as many features as the drafter was trained with."
        )
    if any(tensor.stride(-1) != 1 for tensor in [*features, weight]):
        raise ValueError("features and weight need contiguous rows (last stride 1).")
    if any(feature.dtype != weight.dtype for feature in features):
        raise ValueError(f"features are {features[0].dtype}, the weight is {weight.dtype}; give both one dtype.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias is {tuple(bias.shape)}, the weight has {weight.shape[0]} output columns.")


def _launch(
    features: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: Config | None = None,
) -> FusedFeatures:
    """The kernel with a configuration, by default the one that was measured to be the fastest."""
    num_rows, feature_size = features[0].shape
    num_columns = weight.shape[0]
    if num_rows == 0:
        empty = weight.new_empty((0, 1), dtype=torch.float32)
        return FusedFeatures(weight.new_empty((0, num_columns)), empty)
    if config is None:
        shape = (power_of_two(num_rows), num_columns, len(features), feature_size, str(weight.dtype))
        configs = _configs(num_rows, num_columns, len(features), feature_size, weight.dtype)
        config = best_config("feature_fusion", shape, configs, lambda one: _run(features, weight, bias, one))
    return _run(features, weight, bias, config)


def _configs(num_rows: int, num_columns: int, num_features: int, feature_size: int, dtype: torch.dtype) -> list[Config]:
    """What may be measured for a shape; see `product_tiles`."""
    return configs_of_product(num_rows, num_columns, feature_size, dtype, num_features)


def _run(
    features: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, config: Config
) -> FusedFeatures:
    num_rows, feature_size = features[0].shape
    num_columns = weight.shape[0]
    tiles = dict(config.tiles)
    split = tiles["SPLIT_K"]
    num_column_tiles = triton.cdiv(num_columns, tiles["COLUMN_TILE"])
    num_tiles = num_column_tiles * triton.cdiv(num_rows, tiles["ROW_TILE"])
    num_sums = num_column_tiles if split == 1 else triton.cdiv(num_columns, MERGED_COLUMNS)
    fused = FusedFeatures(
        values=weight.new_empty((num_rows, num_columns)),
        sum_squares=weight.new_empty((num_rows, num_sums), dtype=torch.float32),
    )
    partials = weight.new_empty((split, num_rows, num_columns), dtype=torch.float32) if split > 1 else None
    _feature_fusion_kernel[(num_tiles, split)](
        tuple(features),
        tuple(feature.stride(0) for feature in features),
        weight,
        bias,
        *fused,
        partials,
        num_rows,
        num_columns,
        feature_size,
        weight.stride(0),
        NUM_FEATURES=len(features),
        EVEN_K=feature_size % tiles["K_TILE"] == 0,
        EVEN_COLUMNS=num_columns % tiles["COLUMN_TILE"] == 0,
        PRECISION=precision_of(weight.dtype),
        **config.options,
    )
    if split > 1:
        _feature_fusion_merge_kernel[(num_rows, num_sums)](
            partials,
            bias,
            *fused,
            num_rows,
            num_columns,
            SPLIT_K=split,
            COLUMN_TILE=MERGED_COLUMNS,
            num_warps=2,
        )
    return fused


if triton is not None:

    @triton.jit(do_not_specialize=["num_rows"])  # or other numbers of rows would compile in the middle of serving
    def _feature_fusion_kernel(
        features,  # tuple of F pointers to [T, H_f]
        row_strides,  # tuple of F
        weight_ptr,  # [H, F * H_f]
        bias_ptr,  # [H] or None
        values_ptr,  # [T, H]
        sum_squares_ptr,  # [T, column tiles] float32
        partials_ptr,  # [SPLIT_K, T, H] float32, or None if SPLIT_K is 1
        num_rows,
        num_columns,
        feature_size,
        weight_stride,
        NUM_FEATURES: tl.constexpr,
        EVEN_K: tl.constexpr,  # whether K_TILE divides H_f
        EVEN_COLUMNS: tl.constexpr,  # whether COLUMN_TILE divides H
        PRECISION: tl.constexpr,
        COLUMN_TILE: tl.constexpr,
        ROW_TILE: tl.constexpr,
        K_TILE: tl.constexpr,
        SPLIT_K: tl.constexpr,
    ):
        """One program per tile of the output and share of the sum over F * H_f."""
        row_tile, column_tile = tile_of_program(
            tl.program_id(0), tl.cdiv(num_rows, ROW_TILE), tl.cdiv(num_columns, COLUMN_TILE)
        )
        split = tl.program_id(1)
        row = (row_tile * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
        column = column_tile * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        has_row, has_column = (row < num_rows)[None, :], (column < num_columns)[:, None]
        weight_ptrs = weight_ptr + column.to(tl.int64)[:, None] * weight_stride

        steps_per_feature = tl.cdiv(feature_size, K_TILE)
        num_steps = NUM_FEATURES * steps_per_feature
        share = tl.cdiv(num_steps, SPLIT_K)
        total = tl.zeros((COLUMN_TILE, ROW_TILE), tl.float32)
        for step in range(split * share, min((split + 1) * share, num_steps)):
            # One loop over all features keeps the pipeline of loads full from the first to the last.
            feature = step // steps_per_feature
            k = (step - feature * steps_per_feature) * K_TILE + tl.arange(0, K_TILE)
            feature_ptr, row_stride = features[0], row_strides[0]
            for other in tl.static_range(1, NUM_FEATURES):
                feature_ptr = tl.where(feature == other, features[other], feature_ptr)
                row_stride = tl.where(feature == other, row_strides[other], row_stride)
            x_mask, weight_mask = has_row, None
            if not EVEN_K:
                x_mask, weight_mask = has_row & (k < feature_size)[:, None], (k < feature_size)[None, :]
            if not EVEN_COLUMNS:
                weight_mask = has_column if EVEN_K else has_column & weight_mask
            x = tl.load(feature_ptr + row[None, :] * row_stride + k[:, None], mask=x_mask, other=0.0)
            weight_tile_ptrs = weight_ptrs + feature * feature_size + k[None, :]
            if weight_mask is None:
                weight = tl.load(weight_tile_ptrs)
            else:
                weight = tl.load(weight_tile_ptrs, mask=weight_mask, other=0.0)
            total = tl.dot(weight, x, total, input_precision=PRECISION)

        # Turned to [rows, columns] first: on AMD a tile as the product left it would be stored in 16-bit pieces.
        out = row[:, None] * num_columns + column[None, :]
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        if SPLIT_K > 1:
            size = num_rows.to(tl.int64) * num_columns
            tl.store(partials_ptr + split * size + out, tl.trans(total), mask=mask)
        else:
            if bias_ptr is not None:
                total += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[:, None]
            values = total.to(values_ptr.dtype.element_ty)
            rounded = values.to(tl.float32)
            squares = tl.sum(rounded * rounded, axis=0)  # columns beyond the last are zero
            tl.store(values_ptr + out, tl.trans(values), mask=mask)
            num_column_tiles = tl.cdiv(num_columns, COLUMN_TILE)
            tl.store(sum_squares_ptr + row * num_column_tiles + column_tile, squares, mask=row < num_rows)

    @triton.jit(do_not_specialize=["num_rows"])  # or other numbers of rows would compile in the middle of serving
    def _feature_fusion_merge_kernel(
        partials_ptr,  # [SPLIT_K, T, H] float32
        bias_ptr,  # [H] or None
        values_ptr,  # [T, H]
        sum_squares_ptr,  # [T, column tiles] float32
        num_rows,
        num_columns,
        SPLIT_K: tl.constexpr,
        COLUMN_TILE: tl.constexpr,
    ):
        """One program per row and tile of columns; partials are added in their order, so results repeat exactly."""
        row, column_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
        column = column_tile * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        has_column = column < num_columns
        size = num_rows.to(tl.int64) * num_columns
        out = row * num_columns + column
        total = tl.zeros((COLUMN_TILE,), tl.float32)
        for split in tl.static_range(SPLIT_K):
            total += tl.load(partials_ptr + split * size + out, mask=has_column, other=0.0)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + column, mask=has_column, other=0.0).to(tl.float32)
        values = total.to(values_ptr.dtype.element_ty)
        rounded = values.to(tl.float32)
        tl.store(values_ptr + out, values, mask=has_column)
        tl.store(sum_squares_ptr + row * tl.num_programs(1) + column_tile, tl.sum(rounded * rounded, axis=0))
