"""Corrections of vLLM's CPU backend, applied when a DFlash proposer is built on a CPU.

Temperatures of verified rows
    defect (vLLM 0.32 and 0.33): `_expand_kernel_impl` in utils/cpu_triton_utils.py writes into a converted copy of
    its output and drops the copy, so with speculation on, temperature, top-k and top-p are uninitialised memory.
    Can go when vLLM issue 55005 is fixed in all supported versions.
K-norm of context keys
    defect (same): `ops.rms_norm` ignores all but the first row of a [layers, head_dim] weight, as which
    `_normalize_context_k` in model_executor/models/qwen3_dflash.py passes it, so every layer's context keys are
    scaled by layer 0's weight. Can go when the CPU kernel selects the weight by the outermost index.
Seeds of requests whose prompt comes in chunks
    defect (same): a chunk's last row is sampled like any other and the token dropped; to undo that, `_bookkeeping_sync`
    in v1/worker/gpu_model_runner.py winds the request's generator back by `set_offset`, which CPU generators do not
    have. The engine dies of it, with or without speculation. Can go when it rewinds CPU generators in another way.
top_k in steps that verify nothing
    defect (same): `apply_top_k_only` in v1/sample/ops/topk_topp_sampler.py, which only CPUs use, asks for the largest
    of no values when the rejection sampler has no rows, as in the first step of any request. The engine dies of it
    where a sampled request has top_k and none has top_p. Can go when it accepts no rows.

Metadata of steps that verify nothing
    no defect, but a quarter of a millisecond in every step (same): `_calc_spec_decode_metadata` gathers the drafts of
    steps that have none. Can go when such steps get no metadata.

Shown by tests/engine/test_cpu_backend.py and tests/faults/test_cpu_crashes.py. K-norm needs no rebinding:
`context_kv.py` normalises each layer by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_dflash.rebinding import rebind


def correct() -> None:
    """Rebind three functions of vLLM's samplers, and two of its runner. Idempotent."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_dflash.cpu_sampling import apply_top_k_top_p

    # Both modules have it as a global of their own.
    rejection_sampler.apply_top_k_top_p = topk_topp_sampler.apply_top_k_top_p = apply_top_k_top_p
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rebind(topk_topp_sampler, "apply_top_k_only", _apply_top_k_to_rows)
    rebind(GPUModelRunner, "sample_tokens", _sample_sparing_generators)
    rebind(GPUModelRunner, "_calc_spec_decode_metadata", _metadata_of_drafts)


def _apply_top_k_to_rows(original: Callable[..., Any], logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """In place of `apply_top_k_only(logits, k)`: for steps without rows too."""
    return original(logits, k) if len(logits) else logits


def _sample_sparing_generators(original: Callable[..., Any], runner: Any, *args: Any, **named: Any) -> Any:
    """In place of `GPUModelRunner.sample_tokens`: without the generators of requests whose token is dropped."""
    batch = runner.input_batch
    dropped = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
    # Without its own, a row draws from the default generator, and there is nothing to wind back.
    spared = {row: batch.generators.pop(row) for row in dropped if row in batch.generators}
    try:
        return original(runner, *args, **named)
    finally:
        batch.generators.update(spared)


def _metadata_of_drafts(
    original: Callable[..., Any], runner: Any, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
) -> Any:
    """In place of `GPUModelRunner._calc_spec_decode_metadata`: at once where nothing was drafted."""
    if num_draft_tokens.any():
        return original(runner, num_draft_tokens, cu_num_scheduled_tokens)
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    num_reqs = len(num_draft_tokens)
    requests, nothing = torch.arange(num_reqs + 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=nothing,
        num_draft_tokens=[0] * num_reqs,
        cu_num_draft_tokens=torch.zeros(num_reqs, dtype=torch.int32),
        cu_num_sampled_tokens=requests[1:],
        target_logits_indices=nothing,
        bonus_logits_indices=requests[:-1],
        logits_indices=torch.from_numpy(cu_num_scheduled_tokens.astype(np.int32) - 1),
    )


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its verified rows.

    Args:
        x: [num_reqs], any dtype; the result has the same dtype.
        cu_num_tokens: [num_reqs], integers: running totals of verified rows.
        num_tokens: the last of these totals.
        replace_from, replace_to: requests with the first value get the second (greedy's temperature 0 becomes 1).

    Returns:
        [num_tokens]: with x = [a, b, c] and totals [2, 5, 6]: [a, a, b, b, b, c].
    """
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.repeat_interleave(counts.long(), output_size=num_tokens)
