"""Launches of `draft_inputs` to compile; see ahead_of_time.py."""

from __future__ import annotations

import torch

from vllm_dflash.triton_kernels.draft_inputs import _launch


def _step(num_query_per_req: int, num_requests: int) -> None:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def longs(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    rejected = ints(num_requests)
    table = ints(num_requests, 64)
    _launch(
        ints(num_requests),
        longs(16 * num_requests),
        ints(num_requests + 1),
        rejected,
        table,
        longs(num_requests),
        kv_block_size=16,
        mask_token_id=151669,
        num_query_per_req=num_query_per_req,
        max_position=40960,
    )


LAUNCHES = {"block 16": lambda: _step(16, 8), "block 4": lambda: _step(4, 8)}
