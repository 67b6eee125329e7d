"""LoRA adapters and a quantised copy of a tiny target, written in code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS

RANK = 8
_SIZES = {  # of what goes in and what comes out
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "mlp.down_proj": (INNER, HIDDEN),
}


def write_adapter(folder: Path, seed: int, num_layers: int = 4) -> Path:
    """A LoRA adapter for the tiny Qwen3 target, strong enough to change its texts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for module, (into, out) in _SIZES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, into, generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.2
    folder.mkdir(parents=True)
    modules = [module.rpartition(".")[2] for module in _SIZES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_int8_target(target: Path, folder: Path) -> Path:
    """A copy of a target with int8 linear layers (W8A8, a scale per row of a weight) in compressed-tensors' format."""
    shutil.copytree(target, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _int8_settings()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _int8_settings() -> dict[str, Any]:
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
