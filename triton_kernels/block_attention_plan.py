"""How block_attention cuts its work: tiles, and splits of the context. Everything follows from shapes and the GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton on this platform: nothing is launched
    triton = None

from .tuning import Config, config

#: Most rows of a tile. Taller ones would need more registers for the output than eight warps have to spare.
_MOST_ROWS = 128
#: Most context tokens of one program, so that one long request among short ones is still shared out.
_MOST_TOKENS = 16384
#: Most splits: beyond it the merge reads more than what the splits gain on any GPU so far.
_MOST_SPLITS = 256
#: Programs that fit on a multiprocessor at once, by registers and shared memory of the configurations below.
_PROGRAMS_PER_MULTIPROCESSOR = 2


def configs(rows: int, head_dim: int, element_size: int) -> list[Config]:
    """Candidates for `rows` = num_query_per_req * heads per key/value head, the safe one first.

    Between two of them the GPU decides: half the keys need half the registers and shared memory, so that twice as
    many programs run at once, each with half as much in flight. Either way shared memory holds two tiles of each kind:
    the load of a page's number takes the third stage, and a fourth one changes nothing.
    """
    rows = min(max(triton.next_power_of_2(rows), 16), _MOST_ROWS)
    warps = 8 if rows == _MOST_ROWS or head_dim == 256 else 4
    # Keys and values of a tile are 16 KiB each, which AMD's 64 KiB of shared memory hold beside the queries.
    keys = max(min(16384 // (head_dim * element_size), 64), 16)
    if gpu()[0] == "hip":
        return [config(warps, 2, ROW_TILE=rows, KEY_TILE=keys)]
    found = [config(warps, 3, ROW_TILE=rows, KEY_TILE=tile) for tile in (keys, max(keys // 2, 16))]
    if rows < 64:  # a tile of 64 has idle rows, but a product that sm_90 and later compute asynchronously
        found[1] = config(warps, 3, ROW_TILE=64, KEY_TILE=keys)
    return found


def number_of_splits(num_tiles: int, bound: int, row_tile: int, num_multiprocessors: int) -> int:
    """Programs that share the context of each request.

    Args:
        num_tiles: programs without splits: requests * key/value heads * tiles of rows.
        bound: most context tokens that a request can have.
        row_tile: rows of a program.
        num_multiprocessors: of the GPU.
    """
    fills_gpu = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // max(num_tiles, 1)
    shares_long = triton.cdiv(bound, _MOST_TOKENS)
    return max(1, min(max(fills_gpu, shares_long), triton.cdiv(bound, least_tokens(row_tile)), _MOST_SPLITS))


def least_tokens(row_tile: int) -> int:
    """Fewest context tokens of a split: below, it reads fewer bytes of bf16 K/V than it writes of float32 results."""
    return 2 * row_tile


def gpu() -> tuple[str, str]:
    """Kind ("cuda", "hip") and architecture ("90", "gfx942") of the current GPU; the interpreter passes for sm_90."""
    if triton.knobs.runtime.interpret:
        return "cuda", "90"
    target = triton.runtime.driver.active.get_current_target()
    return target.backend, str(target.arch)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H200 for tensors that are on none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def fp8_type(dtype: torch.dtype) -> Any:
    """The triton type of an fp8 cache; uint8 says only that it is one, and AMD's gfx942 has a format of its own.

    Raises:
        NotImplementedError: this GPU converts no fp8.
    """
    kind, architecture = gpu()
    if kind == "cuda" and int(architecture) < 89:
        raise NotImplementedError(
            f"block_attention reads an fp8 KV cache from compute capability 8.9 on, and this GPU has "
            f"{int(architecture) / 10}; serve with --kv-cache-dtype auto."
        )
    is_fnuz = dtype == torch.float8_e4m3fnuz or (dtype == torch.uint8 and architecture == "gfx942")
    return tl.float8e4b8 if is_fnuz else tl.float8e4nv
