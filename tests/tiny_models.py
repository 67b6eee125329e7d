"""Tiny targets and drafters with random weights, written in the formats that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 4, 2, 32


def write_tiny_target(folder: Path, vocab_size: int = 128, num_layers: int = 4, seed: int = 0) -> Path:
    """A Qwen3 model; weights large enough that its choices are not ties."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=num_layers,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def drafter_config(**changes: Any) -> dict[str, Any]:
    """config.json of a tiny drafter in z-lab's dialect; `changes` replace top-level keys."""
    num_layers = changes.get("num_hidden_layers", 3)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "attention_bias": False,
        "block_size": 8,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 2]},
    } | changes


def drafter_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tensors of a tiny drafter. K-norm weights differ between layers, as in trained drafters."""
    generator = torch.Generator().manual_seed(seed)
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    num_features = len(config["dflash_config"]["target_layer_ids"])

    def matrix(out: int, into: int) -> torch.Tensor:
        return torch.randn(out, into, generator=generator) * 0.2

    def norm(size: int, spread: float) -> torch.Tensor:
        return 1 + spread * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(HIDDEN, HIDDEN * num_features),
        "hidden_norm.weight": norm(HIDDEN, 0.1),
        "norm.weight": norm(HIDDEN, 0.1),
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= {
            f"layers.{layer}.{name}": tensor
            for name, tensor in {
                "self_attn.q_proj.weight": matrix(q_size, HIDDEN),
                "self_attn.k_proj.weight": matrix(kv_size, HIDDEN),
                "self_attn.v_proj.weight": matrix(kv_size, HIDDEN),
                "self_attn.o_proj.weight": matrix(HIDDEN, q_size),
                "self_attn.q_norm.weight": norm(HEAD_DIM, 0.3),
                "self_attn.k_norm.weight": norm(HEAD_DIM, 0.3) * (1 + layer),
                "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
                "mlp.up_proj.weight": matrix(INNER, HIDDEN),
                "mlp.down_proj.weight": matrix(HIDDEN, INNER),
                "input_layernorm.weight": norm(HIDDEN, 0.1),
                "post_attention_layernorm.weight": norm(HIDDEN, 0.1),
            }.items()
        }
    return tensors


def write_tiny_drafter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A drafter for `write_tiny_target`; `tensors` replace or add to the random ones."""
    config = drafter_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(drafter_tensors(config) | (tensors or {}), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
