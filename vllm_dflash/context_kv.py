"""KV injection: features of the target -> keys and values of all drafter layers -> paged cache.

    H = RMSNorm(features)          features = W_c [h_l1; ...; h_l5], one row per accepted token
    K_i = RoPE(KNorm_i(H W_Ki))    per layer i, at the token's own position
    V_i = H W_Vi

(DFlash paper, section on KV injection.) The projections of all layers are one GEMM, because a decode step has
few rows and would otherwise read the features once per layer. The K/V live in vLLM's paged cache, so prefix
caching, chunked prefill and preemption keep working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

if TYPE_CHECKING:
    from vllm_dflash.fused import FusedContext


class ContextKV:
    """Projects features to K/V of every layer and stores them.

    Args:
        hidden_norm: the drafter's RMSNorm over features.
        attentions: the `DFlashQwen3Attention` of each layer, weights loaded.

    Raises:
        ValueError: layers differ in head counts, head size or RoPE, which one GEMM cannot serve.
    """

    def __init__(self, hidden_norm: nn.Module, attentions: Sequence[Any]) -> None:
        first = attentions[0]
        for attention in attentions[1:]:
            if (
                (attention.num_kv_heads, attention.head_dim) != (first.num_kv_heads, first.head_dim)
                or attention.rotary_emb.is_neox_style != first.rotary_emb.is_neox_style
                or attention.k_norm.variance_epsilon != first.k_norm.variance_epsilon
            ):
                raise ValueError("the drafter's layers differ in key/value heads, RoPE style or K-norm epsilon.")
        self.hidden_norm = hidden_norm
        self.attentions = list(attentions)
        self.rotary_emb = first.rotary_emb
        self.num_kv_heads, self.head_dim = first.num_kv_heads, first.head_dim
        self.value_scale = first.v_scale
        self.k_norm_weights = torch.stack([a.k_norm.weight.data for a in attentions])  # [L, head_dim]
        self.k_norm_eps = first.k_norm.variance_epsilon
        is_plain = all(isinstance(a.qkv_proj.quant_method, UnquantizedLinearMethod) for a in attentions)
        self.projection = _FusedProjection(attentions) if is_plain else None
        self.fused: FusedContext | None = None  # set where our kernels were admitted

    def store(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | Sequence[torch.Tensor | None] | None,
        sum_squares: torch.Tensor | None = None,
    ) -> None:
        """Compute and store K/V of T context rows.

        Args:
            features: [T, hidden], the output of the fusion projection, before `hidden_norm`.
            positions: [T] int64, position of each row's token in its request.
            slots: [T] int64 cache slot of each row (-1 writes nothing), the same for all layers or one tensor per
                layer; None computes without storing, for memory profiling.
            sum_squares: [T, P] float32, sums over parts of each row where the fusion gave them; kernels use them.
        """
        if self.fused is not None and slots is not None:
            self.fused.store(features, sum_squares, positions, slots)
            return
        keys, values = self.project(features, positions)
        if slots is None:
            return
        for layer, attention in enumerate(self.attentions):
            layer_slots = slots if isinstance(slots, torch.Tensor) else slots[layer]
            if layer_slots is not None:
                cache_layer = attention.attn
                cache_layer.impl.do_kv_cache_update(
                    cache_layer, keys[layer], values[layer], cache_layer.kv_cache, layer_slots
                )

    def project(self, features: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all layers, each [L, T, num_kv_heads, head_dim], K normalised and rotated."""
        normed = self.hidden_norm(features)
        flat = self.projection(normed) if self.projection is not None else self._project_by_layer(normed)
        num_layers, num_rows = len(self.attentions), features.shape[0]
        kv = flat.view(num_rows, num_layers, 2, self.num_kv_heads, self.head_dim)
        keys, values = kv.permute(2, 1, 0, 3, 4).contiguous()  # one copy; each [L, T, num_kv_heads, head_dim]
        keys = self._norm(keys)
        self._rotate(keys, positions)
        if self.value_scale is not None:
            values = values * self.value_scale
        return keys, values

    def _project_by_layer(self, normed: torch.Tensor) -> torch.Tensor:
        # Packed, quantised weights cannot be concatenated; each layer's own method multiplies them.
        return torch.cat([a.qkv_proj(normed)[0][:, a.q_size :] for a in self.attentions], dim=-1)

    def _norm(self, keys: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(keys)
        if keys.is_cpu:
            # vLLM's CPU kernel uses row 0 of a [L, head_dim] weight for every layer; see cpu_backend.py.
            for layer in range(keys.shape[0]):
                ops.rms_norm(normed[layer], keys[layer], self.k_norm_weights[layer], self.k_norm_eps)
        else:
            ops.rms_norm(normed, keys, self.k_norm_weights, self.k_norm_eps)
        return normed

    def _rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> None:
        num_layers, num_rows = keys.shape[:2]
        cos_sin = self.rotary_emb.cos_sin_cache
        if cos_sin.dtype != keys.dtype:
            cos_sin = cos_sin.to(keys.dtype)
        ops.rotary_embedding(
            positions.repeat(num_layers),
            keys.view(num_layers * num_rows, -1),  # rotated in place; the op calls it the query
            None,
            self.rotary_emb.head_size,
            cos_sin,
            self.rotary_emb.is_neox_style,
        )


class _FusedProjection(nn.Module):
    """The K and V rows of every layer's `qkv_proj`, stacked: [T, hidden] -> [T, L * 2 * kv_size]."""

    def __init__(self, attentions: Sequence[Any]) -> None:
        super().__init__()
        self.cpu_linear: Any = None
        weight = torch.cat([a.qkv_proj.weight.data[a.q_size :] for a in attentions])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if attentions[0].qkv_proj.bias is not None:
            bias = torch.cat([a.qkv_proj.bias.data[a.q_size :] for a in attentions])
            self.bias = nn.Parameter(bias, requires_grad=False)
        if weight.is_cpu:
            # Prepacked for oneDNN, as vLLM does for its own layers: 1.5 to 2 times faster than F.linear at 1-4 rows.
            dispatch_cpu_unquantized_gemm(self, remove_weight=True)  # sets self.cpu_linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.is_cpu:
            return self.cpu_linear(rows, self.weight, self.bias)
        return functional.linear(rows, self.weight, self.bias)
