"""Launches of `draft_loss` to compile; see ahead_of_time.py."""

from __future__ import annotations

from functools import partial

import torch

from vllm_dflash.triton_kernels import draft_loss_chunk as module
from vllm_dflash.triton_kernels.tuning import Config

#: A chunk of slots; few, since only the kernel's code depends on what is compiled.
SLOTS = 128


def _chunk(
    vocab_size: int,
    num_labels: int,
    chosen: Config = module.CONFIGS[0],
    dtype: torch.dtype = torch.bfloat16,
    has_offsets: bool = False,
    has_scales: bool = False,
    has_gradient: bool = True,
) -> None:
    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    labels = module.Labels(
        torch.empty(SLOTS, num_labels, dtype=torch.int64, device="meta"),
        floats(SLOTS, num_labels),
        torch.empty(SLOTS, dtype=torch.int64, device="meta"),
    )
    row_stride = module.row_stride(vocab_size)
    known = module.CONFIGS
    module.CONFIGS = (chosen,)
    try:
        module.draft_loss_chunk(
            torch.empty(SLOTS, row_stride, dtype=dtype, device="meta")[:, :vocab_size],
            labels,
            floats(row_stride) if has_offsets else None,
            floats(SLOTS) if has_scales else None,
            has_gradient,
        )
    finally:
        module.CONFIGS = known


LAUNCHES = {
    "V=151936 hard": partial(_chunk, 151936, 1),
    "V=151936 8 soft": partial(_chunk, 151936, 9),
    "V=32000 64 soft": partial(_chunk, 32000, 65),
    "V=8192 8 soft": partial(_chunk, 8192, 9),
    "V=4099 8 soft, random negatives": partial(_chunk, 4099, 9, has_offsets=True),
    "V=151936 head trained, forward": partial(_chunk, 151936, 9, has_gradient=False),
    "V=151936 head trained, float32": partial(_chunk, 151936, 9, dtype=torch.float32, has_scales=True),
} | {
    f"V=32000 random negatives, head trained, {chosen.num_warps} warps, tile {dict(chosen.tiles)['TILE']}": partial(
        _chunk, 32000, 1, chosen, has_offsets=True, has_scales=True
    )
    for chosen in module.CONFIGS
}
QUICK = ("V=151936 hard", "V=4099 8 soft, random negatives", "V=151936 head trained, forward")
