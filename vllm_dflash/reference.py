"""Draft, verify, accept: DFlash on plain Hugging Face modules, one request, greedy. The executable specification.

It shares nothing with the served path but the reader of config.json, and it is written to be read: the drafter is
recomputed from all features in every cycle, without caches.

    context rows   H = RMSNorm(W_c [h_l1; ...; h_l5]) of every token before the anchor, at its own position p
    block rows     [anchor, mask x K], at the positions from the anchor's on
    in each layer  Q from the block; K, V from context rows (through W_K, W_V, K-norm, RoPE) and from the block
    prediction     slot k of the block predicts the token at its own position; the anchor predicts nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

from vllm_dflash.config import DFlashConfig


@dataclass(frozen=True)
class Cycle:
    """One draft-verify cycle."""

    start: int  # position of the anchor
    draft: list[int]  # the K drafted tokens
    num_accepted: int  # how many of them the target agreed with


class ReferenceDrafter:
    """The drafter, float32, without a cache.

    Args:
        folder: checkpoint with model.safetensors.
        config: its parsed config.json.
        embed: the target's embedding table, [vocabulary, hidden].
        lm_head: the target's output projection, [vocabulary, hidden].
    """

    def __init__(self, folder: Path, config: DFlashConfig, embed: torch.Tensor, lm_head: torch.Tensor) -> None:
        self.config, self.embed = config, embed.float()
        self.weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
        self.lm_head = self.weights.get("lm_head.weight", lm_head.float())

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Context rows [T, hidden] from raw features [T, F * hidden]."""
        return self._rms_norm(features.float() @ self.weights["fc.weight"].T, "hidden_norm")

    def predict(self, context: torch.Tensor, anchor: int, num_drafted: int) -> torch.Tensor:
        """Final hidden states [K, hidden] of the drafted slots of the block after T context rows [T, hidden]."""
        ids = torch.tensor([anchor] + [self.config.mask_token_id] * num_drafted)
        hidden = self.embed[ids] * self.config.input_embedding_scale  # [1 + K, hidden]
        for layer in range(self.config.num_layers):
            hidden = hidden + self._attention(layer, self._rms_norm(hidden, f"layers.{layer}.input_layernorm"), context)
            hidden = hidden + self._mlp(layer, self._rms_norm(hidden, f"layers.{layer}.post_attention_layernorm"))
        return self._rms_norm(hidden, "norm")[1:]

    def logits(self, predicted: torch.Tensor) -> torch.Tensor:
        """Logits [N, draft vocabulary] of predicted slots [N, hidden]."""
        return predicted @ self.lm_head.T

    def draft(self, context: torch.Tensor, anchor: int, num_drafted: int) -> list[int]:
        """The most probable token of each slot, as target token ids."""
        tokens = self.logits(self.predict(context, anchor, num_drafted)).argmax(-1)
        if "d2t" in self.weights:
            tokens = tokens + self.weights["d2t"].long()[tokens]
        return tokens.tolist()

    def _attention(self, layer: int, block: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        config, name = self.config, f"layers.{layer}.self_attn"
        num_context, num_block = len(context), len(block)
        rows = torch.cat([context, block])
        position = torch.arange(num_context + num_block)
        q = self._linear(f"{name}.q_proj", block).view(num_block, config.num_heads, config.head_dim)
        k = self._linear(f"{name}.k_proj", rows).view(len(rows), config.num_kv_heads, config.head_dim)
        v = self._linear(f"{name}.v_proj", rows).view(len(rows), config.num_kv_heads, config.head_dim)
        q = self._rotate(self._rms_norm(q, f"{name}.q_norm"), position[num_context:])
        k = self._rotate(self._rms_norm(k, f"{name}.k_norm"), position)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        distance = position[num_context:, None] - position  # of each key behind each query
        visible = distance >= 0 if config.layer_causal[layer] else torch.ones_like(distance, dtype=torch.bool)
        window = config.sliding_windows[layer]
        if window is not None:
            visible &= distance.abs() < window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return self._linear(f"{name}.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def _mlp(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        name = f"layers.{layer}.mlp"
        gate = functional.silu(self._linear(f"{name}.gate_proj", rows))
        return self._linear(f"{name}.down_proj", gate * self._linear(f"{name}.up_proj", rows))

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _rms_norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        scale = rows.pow(2).mean(-1, keepdim=True).add(self.config.rms_norm_eps).rsqrt()
        return rows * scale * self.weights[f"{name}.weight"]

    def _rotate(self, heads: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        half = self.config.head_dim // 2
        frequency = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = position[:, None, None] * frequency  # [rows, 1, half]
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@torch.inference_mode()
def features_and_logits(target: Any, token_ids: list[int], config: DFlashConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """One target pass: raw features [T, F * hidden] and logits [T, vocabulary] of T tokens."""
    output = target(torch.tensor([token_ids]), output_hidden_states=True)
    # hidden_states[0] are the embeddings, so the output of layer i is hidden_states[i + 1]: vLLM's counting.
    layers = [output.hidden_states[i][0] for i in config.aux_layer_ids]
    return torch.cat(layers, dim=-1), output.logits[0]


@torch.inference_mode()
def generate(
    target: Any, drafter: ReferenceDrafter, prompt_ids: list[int], max_tokens: int, num_drafted: int
) -> tuple[list[int], list[Cycle]]:
    """Greedy generation with DFlash.

    Args:
        target: a Hugging Face causal language model.
        prompt_ids: the prompt.
        max_tokens: tokens to generate; there is no stop token.
        num_drafted: K.

    Returns:
        The generated tokens, which are the target's own greedy ones, and the cycles that led there.
    """
    _, logits = features_and_logits(target, prompt_ids, drafter.config)
    tokens = [
        *prompt_ids,
        int(logits[-1].argmax()),
    ]  # the last token is the anchor: known, its features are not
    cycles = []
    while len(tokens) < len(prompt_ids) + max_tokens:
        start = len(tokens) - 1
        features, _ = features_and_logits(target, tokens[:start], drafter.config)
        draft = drafter.draft(drafter.fuse(features), tokens[start], num_drafted)
        _, logits = features_and_logits(target, tokens + draft, drafter.config)
        chosen = logits[start:].argmax(-1).tolist()  # the target's choice after the anchor and after each draft
        num_accepted = 0
        while num_accepted < num_drafted and draft[num_accepted] == chosen[num_accepted]:
            num_accepted += 1
        tokens += chosen[: num_accepted + 1]  # the accepted drafts and the target's own next token
        cycles.append(Cycle(start, draft, num_accepted))
    return tokens[len(prompt_ids) : len(prompt_ids) + max_tokens], cycles
