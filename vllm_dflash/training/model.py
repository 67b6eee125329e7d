"""The drafter as it is trained: plain PyTorch, with the checkpoint's tensor names.

    context rows   C = RMSNorm(W_c [h_l1; ...; h_lF])                    once, for all layers
    block rows     X = embeddings of [anchor, mask, ..., mask], rows of the target's table times input_embedding_scale
    each layer     X += Attention(q: X,  k, v: [C; X]);  X += MLP(X)     C is only keys and values: KV injection
    prediction     RMSNorm(X), slots 1 to B - 1, times the target's LM head

The ablations of the paper are variants of where context rows come from and where they go (`Variant`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.attention import Backend, Visibility, block_attention
from vllm_dflash.training.blocks import Blocks, PackedRow

Rotation = tuple[Tensor, Tensor]  # cos and sin, [..., 1, head_dim / 2]


@dataclass(frozen=True)
class Variant:
    """Ablations of the method; only the defaults can be served."""

    injection: Literal["kv", "input"] = "kv"  # "input": context rows run through the layers like any token
    uses_features: bool = True  # False: context rows are token embeddings
    drafting: Literal["block", "autoregressive"] = "block"  # "autoregressive": slot k sees the true tokens before it

    @property
    def is_servable(self) -> bool:
        """Does vLLM know this variant?"""
        return self == Variant()


class Drafter(nn.Module):
    """A DFlash drafter.

    Args:
        config: its shape.
        has_lm_head: does it carry an LM head of its own, [draft vocabulary, hidden], to be trained?
    """

    def __init__(self, config: DFlashConfig, variant: Variant = Variant(), has_lm_head: bool = False) -> None:
        super().__init__()
        if variant.drafting == "autoregressive":
            # The true tokens are the input of the slots before, so a slot must not see those behind it.
            config = replace(config, layer_causal=(True,) * config.num_layers)
        self.config, self.variant = config, variant
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.fc.requires_grad_(variant.uses_features)
        self.hidden_norm.requires_grad_(variant.uses_features)
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if has_lm_head else None

    def forward(self, row: PackedRow, blocks: Blocks, embedding: Tensor, backend: Backend = "sdpa") -> Tensor:
        """Final hidden states [A, B - 1, hidden] of the predicting slots, slot k = 1 first.

        Args:
            row, blocks: what is drafted on.
            embedding: the target's embedding table [vocabulary, hidden].
        """
        block = self._embed(self._block_ids(row, blocks), embedding)
        context = self._context_rows(row, embedding)
        is_block_drafting = self.variant.drafting == "block"
        context_rotation = self._rotation(row.position)
        block_rotation = self._rotation(blocks.positions)
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            is_last = layer is self.layers[-1]
            # Behind the last layer the anchor's slot predicts nothing, so only its keys and values are needed there.
            first_query = 1 if is_last and is_block_drafting else 0
            # Context rows that run through the layers are normed like any token's; injected ones only once, above.
            normed = layer.input_layernorm(context) if self.variant.injection == "input" else context
            context_kv = layer.context_kv(normed, context_rotation)
            block = layer(block, context_kv, block_rotation, blocks, first_query, backend)
            if self.variant.injection == "input" and not is_last:
                context = layer.advance_context(context, context_kv, row.document, context_rotation)
        # An autoregressive drafter predicts from the slot before.
        return self.norm(block if is_block_drafting else block[:, :-1])

    def fuse(self, features: Tensor) -> Tensor:
        """Context rows [T, hidden] of raw features [T, F * hidden]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def _context_rows(self, row: PackedRow, embedding: Tensor) -> Tensor:
        return self.fuse(row.features) if self.variant.uses_features else self._embed(row.input_ids, embedding)

    def _embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        rows = embedding[ids]
        return rows if self.config.input_embedding_scale == 1 else rows * self.config.input_embedding_scale

    def _block_ids(self, row: PackedRow, blocks: Blocks) -> Tensor:
        """[A, length] int64."""
        if self.variant.drafting == "block":
            ids = torch.full_like(blocks.positions, self.config.mask_token_id)
        else:
            ids = torch.cat([blocks.labels[:, :1], blocks.labels], dim=1)
        ids[:, 0] = row.input_ids[blocks.anchors]
        return ids

    def _rotation(self, position: Tensor) -> Rotation:
        half = self.config.head_dim // 2
        exponent = torch.arange(half, dtype=torch.float32, device=position.device) / half
        angle = position[..., None, None] * self.config.rope_theta**-exponent
        return angle.cos(), angle.sin()


class DrafterLayer(nn.Module):
    """Attention over context and block, then an MLP, both pre-norm and residual (Qwen3's layer)."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DrafterMLP(config)

    def context_kv(self, context: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [T, kv_heads, head_dim] of context rows [T, hidden], which pass no input norm."""
        return self.self_attn.keys_values(context, rotation)

    def forward(
        self,
        block: Tensor,  # [A, length, hidden]
        context_kv: tuple[Tensor, Tensor],
        rotation: Rotation,
        blocks: Blocks,
        first_query: int,
        backend: Backend,
    ) -> Tensor:  # [A, length - first_query, hidden]
        """The block's rows behind this layer, from slot `first_query` on."""
        normed = self.input_layernorm(block)
        block = block[:, first_query:] + self.self_attn(normed, context_kv, rotation, blocks, first_query, backend)
        return block + self.mlp(self.post_attention_layernorm(block))

    def advance_context(
        self, context: Tensor, context_kv: tuple[Tensor, Tensor], document: Tensor, rotation: Rotation
    ) -> Tensor:
        """Context rows [T, hidden] behind this layer, for the variant that treats them as tokens."""
        causal = torch.ones(len(document), len(document), dtype=torch.bool, device=document.device).tril()
        visible = causal & (document[:, None] == document)
        q = self.self_attn.queries(self.input_layernorm(context), rotation).transpose(0, 1)[None]
        k, v = (t.transpose(0, 1)[None] for t in context_kv)
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        context = context + self.self_attn.o_proj(out[0].transpose(0, 1).flatten(1))
        return context + self.mlp(self.post_attention_layernorm(context))


class DrafterAttention(nn.Module):
    """Grouped-query attention with RMS-normed queries and keys and rotary positions."""

    def __init__(self, config: DFlashConfig, index: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.visibility = Visibility(config.layer_causal[index], config.sliding_windows[index])
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        rows: Tensor,
        context_kv: tuple[Tensor, Tensor],
        rotation: Rotation,
        blocks: Blocks,
        first_query: int,
        backend: Backend,
    ) -> Tensor:
        """[A, length - first_query, hidden] from normed block rows [A, length, hidden]."""
        q = self.queries(rows[:, first_query:], (rotation[0][:, first_query:], rotation[1][:, first_query:]))
        block_kv = self.keys_values(rows, rotation)
        out = block_attention(q, block_kv, context_kv, blocks, self.visibility, backend)
        return self.o_proj(out.flatten(-2))

    def queries(self, rows: Tensor, rotation: Rotation) -> Tensor:
        """[..., heads, head_dim] from rows [..., hidden]."""
        q = self.q_proj(rows).unflatten(-1, (self.num_heads, self.head_dim))
        return _rotate(self.q_norm(q), rotation)

    def keys_values(self, rows: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [..., kv_heads, head_dim] from rows [..., hidden]."""
        shape = (self.num_kv_heads, self.head_dim)
        k, v = self.k_proj(rows).unflatten(-1, shape), self.v_proj(rows).unflatten(-1, shape)
        return _rotate(self.k_norm(k), rotation), v


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each (first half, second half) pair of [..., heads, head_dim] by its position's angle."""
    cos, sin = (part.to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
