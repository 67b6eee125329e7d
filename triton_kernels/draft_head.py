"""LM head of a draft step with its argmax, top-k and log-sum-exp; the logits [rows, vocabulary] are never written.

    logits[n, v] = logit_scale * cap(weight_scale[v] * <hidden[n], weight[v]> + bias[v])     cap(x) = c * tanh(x / c)
    tokens[n]    = the top_k ids v < num_tokens by (logit falling, id rising); with d2t, v + d2t[v]
    log_sum_exp  = log sum_v exp(logits[n, v]), so exp(logits[:, 0] - log_sum_exp) is the largest probability

The first launch has a program per vocabulary tile and row tile. It takes the product as weight x hidden^T: a few rows
are the narrow side of the tensor cores' tiles, and the weight, which is nearly all of the traffic, is read once. Row
tiles are neighbours in the grid, so beyond one row tile the others find the weight tile in the cache. It leaves

    keys [top_k, N, tiles] int64      the best logits of each tile, best first
    sums [N, tiles] float32           sum of exp(logit - largest logit of the tile)

A key is an integer that sorts as (logit, lowest id first): upper half the bits of the logit made monotonous, lower half
2^31 - 1 - id. One maximum thus finds value and id, no two keys are equal, and ties go to the lowest id across tiles in
whatever order they are reduced, as torch.argmax does on a CPU. NaN counts as the largest, as in torch.

The second launch has a program per row: the top_k best ids lie in the top_k tiles with the best first keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .head_quantisation import FP8_DTYPES, check_conversion
from .tuning import Config, best_config, config, power_of_two

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

MAX_TOP_K = 32


class DraftTokens(NamedTuple):
    """Proposals for N rows."""

    tokens: torch.Tensor  # [N, top_k] int64, ids of the target's vocabulary
    logits: torch.Tensor  # [N, top_k] float32, falling
    log_sum_exp: torch.Tensor  # [N] float32


def draft_head(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H], of hidden's dtype or float8
    *,
    bias: torch.Tensor | None = None,  # [V]
    weight_scale: torch.Tensor | None = None,  # [V] float32, with a float8 weight and only then
    top_k: int = 1,  # 1..32
    num_tokens: int | None = None,  # rows of the weight at or beyond it are padding; None: V
    softcap: float = 0.0,  # 0: none
    logit_scale: float = 1.0,  # after the softcap, as in vLLM
    draft_to_target: torch.Tensor | None = None,  # [V] int64 offsets (d2t): target id = draft id + d2t[draft id]
) -> DraftTokens:
    """The best tokens of each row; the kernels on a GPU, the twin elsewhere. See the module docstring.

    Products are summed in float32 and logits are not rounded to hidden's dtype, so that near ties may resolve unlike
    in a head that writes bfloat16 logits. A float8 weight changes proposals only: the target verifies with its own.

    Raises:
        ValueError: sizes, dtypes or `top_k` that do not go together.
        NotImplementedError: a float8 weight that the GPU cannot convert.
    """
    num_tokens = weight.shape[0] if num_tokens is None else num_tokens
    _check(hidden, weight, bias, weight_scale, top_k, num_tokens, draft_to_target)
    run = _launch if triton is not None and hidden.is_cuda else draft_head_torch
    return run(hidden, weight, bias, weight_scale, top_k, num_tokens, softcap, logit_scale, draft_to_target)


def draft_head_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    top_k: int,
    num_tokens: int,
    softcap: float,
    logit_scale: float,
    draft_to_target: torch.Tensor | None,
) -> DraftTokens:
    """The twin of the kernels, and what runs on a CPU. It does write the logits."""
    logits = hidden.float() @ weight[:num_tokens].float().T
    if weight_scale is not None:
        logits *= weight_scale[:num_tokens]
    if bias is not None:
        logits += bias[:num_tokens]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits *= logit_scale
    if top_k == 1:
        best, ids = logits.max(dim=1, keepdim=True)  # the first of equals
    else:
        ordered, order = logits.sort(dim=1, descending=True, stable=True)  # topk promises no order among equals
        best, ids = ordered[:, :top_k].clone(), order[:, :top_k].clone()
    tokens = ids if draft_to_target is None else ids + draft_to_target[ids]
    return DraftTokens(tokens, best, torch.logsumexp(logits, dim=1))


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    top_k: int,
    num_tokens: int,
    draft_to_target: torch.Tensor | None,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, H] and [V, H]")
    if not 1 <= num_tokens <= weight.shape[0]:
        raise ValueError(f"num_tokens {num_tokens} must be in 1..{weight.shape[0]}, the rows of the weight")
    if not 1 <= top_k <= min(MAX_TOP_K, num_tokens):
        raise ValueError(f"top_k {top_k} must be in 1..{min(MAX_TOP_K, num_tokens)}")
    if weight.dtype not in (hidden.dtype, *FP8_DTYPES):
        raise ValueError(f"the weight is {weight.dtype}, hidden is {hidden.dtype}; cast one, or use quantise_head")
    if (weight_scale is not None) != (weight.dtype in FP8_DTYPES):
        raise ValueError(f"weight_scale belongs to a float8 weight and to no other; this weight is {weight.dtype}")
    for name, vector in {"bias": bias, "weight_scale": weight_scale, "draft_to_target": draft_to_target}.items():
        if vector is not None and (vector.shape != weight.shape[:1] or not vector.is_contiguous()):
            raise ValueError(f"{name} {tuple(vector.shape)} must be contiguous with {weight.shape[0]} entries")
    if hidden.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("the rows of hidden and weight must be contiguous")


def _launch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    top_k: int,
    num_tokens: int,
    softcap: float,
    logit_scale: float,
    draft_to_target: torch.Tensor | None,
) -> DraftTokens:
    num_rows, hidden_size = hidden.shape
    backend, arch = _target()
    check_conversion(weight.dtype, backend, arch)
    outputs = DraftTokens(
        tokens=hidden.new_empty((num_rows, top_k), dtype=torch.int64),
        logits=hidden.new_empty((num_rows, top_k), dtype=torch.float32),
        log_sum_exp=hidden.new_empty(num_rows, dtype=torch.float32),
    )
    if num_rows == 0:
        return outputs

    def run(chosen: Config) -> None:
        options = chosen.options
        num_tiles = triton.cdiv(num_tokens, options["VOCAB_TILE"])
        keys = hidden.new_empty((top_k, num_rows, num_tiles), dtype=torch.int64)
        sums = hidden.new_empty((num_rows, num_tiles), dtype=torch.float32)
        _draft_head_tiles_kernel[(triton.cdiv(num_rows, options["ROW_TILE"]), num_tiles)](
            hidden,
            weight,
            bias,
            weight_scale,
            keys,
            sums,
            num_rows,
            num_tokens,
            hidden.stride(0),
            weight.stride(0),
            softcap,
            logit_scale,
            HIDDEN_SIZE=hidden_size,
            TOP_K=top_k,
            HAS_SOFTCAP=softcap != 0,
            **options,
        )
        _draft_head_merge_kernel[(num_rows,)](
            keys,
            sums,
            draft_to_target,
            *outputs,
            num_rows,
            num_tiles,
            VOCAB_TILE=options["VOCAB_TILE"],
            TILES=triton.next_power_of_2(num_tiles),
            TOP_K=top_k,
            RANKS=triton.next_power_of_2(top_k),
            num_warps=8,
        )

    row_bucket = power_of_two(num_rows)
    shape = (row_bucket, num_tokens, hidden_size, str(weight.dtype).removeprefix("torch."), top_k)
    run(best_config("draft_head", shape, _configs(row_bucket, backend), run))
    return outputs


def _target() -> tuple[str, int | str]:
    """Backend and architecture that triton compiles for; ("interpreter", 0) where it has no device."""
    try:
        target = triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return "interpreter", 0
    return target.backend, target.arch


def _configs(row_bucket: int, backend: str) -> list[Config]:
    """Candidates, the safe one first. What counts is bytes of weight in flight: tile, stages, programs per processor.

    One row tile holds up to 128 rows, so that the weight is read once for them.
    """
    row_tile = min(max(row_bucket, 16), 128)
    # (vocabulary, depth of the product, warps, stages)
    if backend == "hip":  # 64 KiB of shared memory, and the pipeline keeps one stage in registers
        tiles = [(128, 64, 4, 2), (64, 128, 4, 2)] if row_tile <= 32 else [(64, 64, 4, 2)]
    elif row_tile <= 32:
        tiles = [(128, 64, 4, 4), (64, 128, 4, 4), (128, 128, 4, 3)]
    else:
        tiles = [(64, 64, 4, 4), (128, 64, 8, 3)]
    return [
        config(warps, stages, VOCAB_TILE=vocab_tile, ROW_TILE=row_tile, K_TILE=k_tile)
        for vocab_tile, k_tile, warps, stages in tiles
    ]


if triton is not None:
    _LEAST = tl.constexpr(-(1 << 31))  # below the order of every logit, also of -inf
    _NO_KEY = tl.constexpr(-(1 << 63))

    @triton.jit
    def _order_of(logits):
        """int32 that sorts as the logit does, above _LEAST."""
        bits = logits.to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(order == -1, 0, order)  # -0 and 0 are equal
        return tl.where(logits == logits, order, 0x7FFFFFFF)  # any NaN

    @triton.jit
    def _key_of(order, ids):
        """See the module docstring."""
        key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        return tl.where(order == _LEAST, _NO_KEY, key)

    @triton.jit
    def _order_in(keys):
        return (keys >> 32).to(tl.int32)

    @triton.jit
    def _logits_of(order):
        return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)

    @triton.jit
    def _ids_in(keys):
        return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)

    @triton.jit
    def _finite(maximum):
        """What to subtract before exp: inf - inf would be NaN."""
        return tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)

    @triton.jit(do_not_specialize=["num_rows"])  # the same code for 1, 15 and 16 rows
    def _draft_head_tiles_kernel(
        hidden_ptr,  # [N, H]
        weight_ptr,  # [V, H]
        bias_ptr,  # [V] or None
        weight_scale_ptr,  # [V] float32 or None
        out_keys_ptr,  # [TOP_K, N, tiles] int64
        out_sums_ptr,  # [N, tiles] float32
        num_rows,
        num_tokens,
        hidden_stride,
        weight_stride,
        softcap,
        logit_scale,
        HIDDEN_SIZE: tl.constexpr,
        TOP_K: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        VOCAB_TILE: tl.constexpr,
        ROW_TILE: tl.constexpr,
        K_TILE: tl.constexpr,
    ):
        """One program per (row tile, vocabulary tile)."""
        tile = tl.program_id(1)
        num_tiles = tl.num_programs(1)
        row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
        first_id = tile * VOCAB_TILE
        ids = first_id + tl.arange(0, VOCAB_TILE)
        # Rows past the end repeat the last one instead of being masked: every load stays a plain 16-byte one.
        weight_row = tl.minimum(ids, num_tokens - 1) - first_id
        hidden_row = tl.minimum(row, num_rows - 1).to(tl.int64)
        depth = tl.arange(0, K_TILE)
        weight_ptrs = weight_ptr + first_id.to(tl.int64) * weight_stride
        weight_ptrs += weight_row[:, None] * weight_stride + depth[None, :]
        hidden_ptrs = hidden_ptr + hidden_row[None, :] * hidden_stride + depth[:, None]
        logits = tl.zeros((VOCAB_TILE, ROW_TILE), tl.float32)
        for start in tl.range(0, HIDDEN_SIZE, K_TILE):
            if HIDDEN_SIZE % K_TILE == 0:
                weight = tl.load(weight_ptrs + start)
                hidden = tl.load(hidden_ptrs + start)
            else:
                inside = start + depth < HIDDEN_SIZE
                weight = tl.load(weight_ptrs + start, mask=inside[None, :], other=0.0)
                hidden = tl.load(hidden_ptrs + start, mask=inside[:, None], other=0.0)
            if weight_scale_ptr is not None:
                # By way of float32: sm_90 converts float16 to bfloat16 with one slow F2F instruction per entry.
                weight = weight.to(tl.float32).to(hidden.dtype)
            logits = tl.dot(weight, hidden, logits, input_precision="ieee")

        is_token = ids < num_tokens
        if weight_scale_ptr is not None:
            logits *= tl.load(weight_scale_ptr + ids, mask=is_token, other=0.0)[:, None]
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + ids, mask=is_token, other=0.0).to(tl.float32)[:, None]
        if HAS_SOFTCAP:
            logits = softcap * libdevice.tanh(logits / softcap)
        logits *= logit_scale
        order = tl.where(is_token[:, None], _order_of(logits), _LEAST)
        best = tl.max(order, axis=0)
        exponentials = tl.exp(logits - _finite(_logits_of(best))[None, :])
        sums = tl.sum(tl.where(is_token[:, None], exponentials, 0.0), axis=0)
        is_row = row < num_rows
        place = row.to(tl.int64) * num_tiles + tile
        tl.store(out_sums_ptr + place, sums, mask=is_row)
        for _ in tl.range(TOP_K):
            best_id = tl.min(tl.where(order == best[None, :], ids[:, None], 0x7FFFFFFF), axis=0)
            tl.store(out_keys_ptr + place, _key_of(best, best_id), mask=is_row)
            order = tl.where(ids[:, None] == best_id[None, :], _LEAST, order)
            best = tl.max(order, axis=0)
            place += num_rows.to(tl.int64) * num_tiles

    @triton.jit(do_not_specialize=["num_rows"])  # the same code for 1, 15 and 16 rows
    def _draft_head_merge_kernel(
        keys_ptr,  # [TOP_K, N, tiles] int64
        sums_ptr,  # [N, tiles] float32
        draft_to_target_ptr,  # [V] int64 or None
        out_tokens_ptr,  # [N, TOP_K] int64
        out_logits_ptr,  # [N, TOP_K] float32
        out_log_sum_exp_ptr,  # [N] float32
        num_rows,
        num_tiles,
        VOCAB_TILE: tl.constexpr,
        TILES: tl.constexpr,
        TOP_K: tl.constexpr,
        RANKS: tl.constexpr,
    ):
        """One program per row."""
        row = tl.program_id(0).to(tl.int64)
        tile = tl.arange(0, TILES)
        exists = tile < num_tiles
        keys = tl.load(keys_ptr + row * num_tiles + tile, mask=exists, other=_NO_KEY)
        sums = tl.load(sums_ptr + row * num_tiles + tile, mask=exists, other=0.0)
        shift = _finite(_logits_of(_order_in(tl.max(keys, axis=0))))
        shares = tl.where(exists, sums * tl.exp(_logits_of(_order_in(keys)) - shift), 0.0)
        tl.store(out_log_sum_exp_ptr + row, shift + tl.log(tl.sum(shares, axis=0)))

        if TOP_K > 1:
            rank = tl.arange(0, RANKS)
            chosen = tl.full((RANKS,), -1, tl.int32)
            for index in tl.range(TOP_K):
                best = tl.max(keys, axis=0)
                chosen = tl.where((rank == index) & (best > _NO_KEY), _ids_in(best) // VOCAB_TILE, chosen)
                keys = tl.where(keys == best, _NO_KEY, keys)
            # [rank in the tile, chosen tile]
            key_ptrs = keys_ptr + (rank[:, None] * num_rows.to(tl.int64) + row) * num_tiles + chosen[None, :]
            is_key = (rank[:, None] < TOP_K) & (chosen[None, :] >= 0)
            keys = tl.reshape(tl.load(key_ptrs, mask=is_key, other=_NO_KEY), (RANKS * RANKS,))
        for index in tl.range(TOP_K):
            best = tl.max(keys, axis=0)
            keys = tl.where(keys == best, _NO_KEY, keys)
            token = _ids_in(best).to(tl.int64)
            if draft_to_target_ptr is not None:
                token += tl.load(draft_to_target_ptr + token)
            tl.store(out_tokens_ptr + row * TOP_K + index, token)
            tl.store(out_logits_ptr + row * TOP_K + index, _logits_of(_order_in(best)))
