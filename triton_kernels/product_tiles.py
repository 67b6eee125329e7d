"""Tile sizes of the products W x^T of `feature_fusion` and `context_kv`, and the order of their tiles.

A tile is [COLUMN_TILE rows of W, ROW_TILE rows of x], summed over K_TILE inputs at a time. Few rows: the weights are
read once, so what counts is bytes in flight: long K tiles and a deep pipeline; if there are fewer tiles than a GPU
has multiprocessors, the sum is split between programs. Many rows: large tiles that keep tensor cores busy.
"""

from __future__ import annotations

import torch

from .tuning import Config, config, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton on this platform: the twins are all there is
    triton = None

FEW_ROWS = 64  # up to here one tile holds all rows
MIN_TILE = 16  # least side of a tile of a tensor core
PROGRAMS = 256  # about two for each multiprocessor of an H200 (132) or B200 (148), and for most of an MI300X (304)
HEAD_TILE = 128 * 128  # elements of the largest tile of a head; what follows its product would spill with more
MIN_STEPS = 4  # a program with fewer steps over K mostly waits for its first load


def configs_of_product(
    num_rows: int,
    num_columns: int,
    depth: int,
    dtype: torch.dtype,
    num_features: int = 1,
    column_tile: int | None = None,
) -> list[Config]:
    """Candidates for x [num_rows, num_features * depth] times W^T [.., num_columns], the safe one first.

    Args:
        num_rows: rows of x.
        num_columns: rows of W.
        depth: inputs of one feature; a K tile that divides it needs no mask.
        dtype: of x and W.
        num_features: how many times `depth` the sum is long.
        column_tile: the only tile of W's rows that will do (a head), or None for a choice.
    """
    configs = []
    for columns, rows, k, num_warps, num_stages in _shapes(num_rows, dtype):
        if column_tile is None:
            columns = _dividing(columns, num_columns, least=64)
        else:
            k = max(k * columns // column_tile, 32) if num_rows <= FEW_ROWS else k
            columns, rows = column_tile, min(rows, HEAD_TILE // column_tile)
        k = _dividing(min(k, 256), depth, least=32)
        num_tiles = -(-num_columns // columns) * -(-num_rows // rows)
        split = _split(num_tiles, -(-depth // k) * num_features)
        # A head's tile that is not split needs one launch only, so that is a candidate too, and the safe one.
        splits = [split, split * 2 if split > 1 else 1] if column_tile is None else [1, split]
        for one in splits:
            configs.append(config(num_warps, num_stages, COLUMN_TILE=columns, ROW_TILE=rows, K_TILE=k, SPLIT_K=one))
    return list(dict.fromkeys(configs))


def _shapes(num_rows: int, dtype: torch.dtype) -> list[tuple[int, int, int, int, int]]:
    """(columns, rows, K, warps, stages) of tiles that fit the GPU which kernels compile for."""
    backend, architecture = _target()
    rows = max(MIN_TILE, power_of_two(num_rows))
    if dtype == torch.float32:
        # Products of float32 are exact, without tensor cores: small tiles, or their operands do not fit registers.
        shapes = [(32, min(rows, 32), 32, 4, 2)]
    elif num_rows <= FEW_ROWS:
        shapes = [(128, rows, 128, 4, 4 if rows <= 32 else 3), (64, rows, 128, 4, 4)]
    else:
        shapes = [(128, 128, 64, 8, 3), (128, 64, 64, 4, 4)]
        if backend == "hip" or architecture >= 90:  # older tensor cores take operands from registers: it would spill
            shapes.append((128, 256, 64, 8, 3))
    if backend == "hip":  # its 64 KiB of shared memory hold one buffer; the pipeline keeps the next in registers
        shapes = [(*shape[:4], 2) for shape in shapes]
    return shapes


def _split(num_tiles: int, num_steps: int) -> int:
    """Into how many programs to split the sum of a tile, `num_steps` K tiles long, to fill a GPU."""
    split = 1
    while num_tiles * split * 2 <= PROGRAMS and split * 2 * MIN_STEPS <= num_steps:
        split *= 2
    return split


def precision_of(dtype: torch.dtype) -> str:
    """`input_precision` of the product: float32 stays float32, as in vLLM, instead of Triton's tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _dividing(tile: int, size: int, least: int) -> int:
    """The largest tile from `least` to `tile` that divides `size`; if there is none, `tile` with masks."""
    smaller = tile
    while smaller >= least:
        if size % smaller == 0:
            return smaller
        smaller //= 2
    return tile


def _target() -> tuple[str, int]:
    """Backend ("cuda", "hip") and, of NVIDIA's, the compute capability times ten that kernels compile for."""
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:  # no driver: the interpreter, which takes any tile
        return "cuda", 90
    return target.backend, target.arch if target.backend == "cuda" else 0


if triton is not None:
    ROW_TILES_PER_GROUP = tl.constexpr(8)

    @triton.jit
    def tile_of_program(program, num_row_tiles, num_column_tiles):
        """(row tile, column tile). Programs that run at the same time share few rows of x and few of W in L2."""
        per_group = ROW_TILES_PER_GROUP * num_column_tiles
        first = program // per_group * ROW_TILES_PER_GROUP
        size = min(num_row_tiles - first, ROW_TILES_PER_GROUP)
        place = program % per_group
        return first + place % size, place // size
