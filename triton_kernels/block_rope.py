"""Per-head RMSNorm and rotary embedding of a block's queries and keys, as a piece of the block_attention kernel.

    x <- x / rms(x) * weight          over the D elements of a head, where there is a weight
    (a, b) <- (a cos - b sin, b cos + a sin)

The pairs (a, b) are elements (i, i + rotary_dim / 2) in NeoX style and (2 i, 2 i + 1) otherwise; elements from
rotary_dim on are not rotated. A row of `cos_sin_cache` holds rotary_dim / 2 cosines, then as many sines.

It runs inside the attention kernel rather than before it, which saves a launch and a copy of the queries. Every split
repeats it for its one tile of queries; no configuration spills because of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None


class BlockRope(NamedTuple):
    """What turns raw queries and keys of a block into those that attend."""

    q_norm_weight: torch.Tensor | None  # [D]; None = queries are not normalised
    k_norm_weight: torch.Tensor | None  # [D]; None = keys are not normalised
    eps: float  # of both norms
    cos_sin_cache: torch.Tensor  # [max_position, rotary_dim], float32 or the model's dtype
    positions: torch.Tensor  # [R * Q] int64
    is_neox_style: bool = True

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What the kernel reads, in its order."""
        return self.q_norm_weight, self.k_norm_weight, self.cos_sin_cache, self.positions

    def check(self, head_dim: int) -> None:
        """Refuse what the kernel cannot do.

        Raises:
            ValueError: rotary_dim is no power of two that divides head_dim, or the table has gaps between its rows.
        """
        if not self.cos_sin_cache.is_contiguous():
            raise ValueError("cos_sin_cache must be contiguous; call .contiguous() on it once, at load.")
        rotary_dim = self.cos_sin_cache.shape[1]
        if rotary_dim < 2 or rotary_dim & (rotary_dim - 1) or head_dim % rotary_dim:
            raise ValueError(
                f"block_attention rotates a power of two of elements that divides head_dim, but rotary_dim is "
                f"{rotary_dim} and head_dim {head_dim}; rotate queries and keys before and pass rope=None."
            )


def block_rope_torch(
    x: torch.Tensor,  # [rows, heads, D]
    weight: torch.Tensor | None,  # [D]
    rope: BlockRope,
) -> torch.Tensor:
    """Normalised and rotated heads in x's dtype; the twin of `normed_and_rotated`."""
    heads = x.float()
    if weight is not None:
        heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + rope.eps) * weight.float()
    rotary_dim = rope.cos_sin_cache.shape[1]
    cos, sin = rope.cos_sin_cache[rope.positions].float()[:, None].chunk(2, -1)
    turned, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    if rope.is_neox_style:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, kept], -1).to(x.dtype)


if triton is not None:

    @triton.jit
    def normed_and_rotated(
        x,  # [ROWS, D]
        weight_ptr,  # [D] or None
        eps,
        cos_sin_ptr,  # [max_position, ROTARY_DIM], contiguous
        position,  # [ROWS] int64
        ROTARY_DIM: tl.constexpr,
        IS_NEOX: tl.constexpr,
    ):
        """Normalised and rotated heads in x's dtype. Rows of padding need a position that exists."""
        ROWS: tl.constexpr = x.shape[0]
        D: tl.constexpr = x.shape[1]
        HALF: tl.constexpr = ROTARY_DIM // 2
        CHUNKS: tl.constexpr = D // ROTARY_DIM  # the first is rotated
        heads = x.to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
            heads = heads * tl.rsqrt(tl.sum(heads * heads, axis=1) / D + eps)[:, None] * weight[None, :]
        if IS_NEOX:
            pairs = heads.reshape(ROWS, CHUNKS, 2, HALF).permute(0, 1, 3, 2)
        else:
            pairs = heads.reshape(ROWS, CHUNKS, HALF, 2)
        a, b = pairs.split()  # [ROWS, CHUNKS, HALF]
        element = tl.arange(0, HALF)[None, None, :]
        is_rotated = tl.arange(0, CHUNKS)[None, :, None] == 0
        row_ptr = cos_sin_ptr + (position * ROTARY_DIM)[:, None, None]
        cos = tl.load(row_ptr + element, mask=is_rotated, other=1.0).to(tl.float32)
        sin = tl.load(row_ptr + HALF + element, mask=is_rotated, other=0.0).to(tl.float32)
        pairs = tl.join(a * cos - b * sin, b * cos + a * sin)
        if IS_NEOX:
            pairs = pairs.permute(0, 1, 3, 2)
        return pairs.reshape(ROWS, D).to(x.dtype)
