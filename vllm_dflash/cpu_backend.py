"""Corrections of vLLM's CPU backend, applied when a DFlash proposer is built on a CPU.

Temperatures of verified rows
    defect (vLLM 0.32 and 0.33): `_expand_kernel_impl` in utils/cpu_triton_utils.py writes into a converted copy of
    its output and drops the copy, so with speculation on, temperature, top-k and top-p are uninitialised memory.
    Can go when vLLM issue 55005 is fixed in all supported versions.
K-norm of context keys
    defect (same): `ops.rms_norm` ignores all but the first row of a [layers, head_dim] weight, as which
    `_normalize_context_k` in model_executor/models/qwen3_dflash.py passes it, so every layer's context keys are
    scaled by layer 0's weight. Can go when the CPU kernel selects the weight by the outermost index.

Both are shown by tests/engine/test_cpu_backend.py. The second needs no rebinding: `context_kv.py` normalises each
layer by itself.
"""

from __future__ import annotations

import torch


def correct() -> None:
    """Rebind `expand_batch_to_tokens` of vLLM's rejection sampler. Idempotent."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


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
