"""Tiny targets of many model families with random weights, made in code, and a drafter that fits all of them.

Each has 4 layers of hidden size 64 and 128 tokens, as `tiny_models.write_tiny_drafter` expects. Weights are drawn large
enough that greedy choices are not ties.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS

#: Settings that all families share; `head_dim` only where the family has it.
_SHARED: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


def llama() -> tuple[Any, type]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaConfig(**_SHARED, head_dim=HEAD_DIM), LlamaForCausalLM


def qwen2() -> tuple[Any, type]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2Config(**_SHARED | {"num_attention_heads": 2, "num_key_value_heads": 1}), Qwen2ForCausalLM


def mistral() -> tuple[Any, type]:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralConfig(**_SHARED, head_dim=HEAD_DIM, sliding_window=24), MistralForCausalLM


def phi3() -> tuple[Any, type]:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3Config(**_SHARED | {"num_attention_heads": 2, "num_key_value_heads": 1}), Phi3ForCausalLM


def granite() -> tuple[Any, type]:
    from transformers import GraniteConfig, GraniteForCausalLM

    scales = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7}
    shared = _SHARED | {"num_attention_heads": 2, "num_key_value_heads": 1}
    return GraniteConfig(**shared, **scales, attention_multiplier=0.2), GraniteForCausalLM


def qwen3_moe() -> tuple[Any, type]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeConfig(**_SHARED, **_EXPERTS, head_dim=HEAD_DIM), Qwen3MoeForCausalLM


def gpt_oss() -> tuple[Any, type]:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_SHARED | {"intermediate_size": 32},
        head_dim=HEAD_DIM,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
    )
    return config, GptOssForCausalLM


def qwen3_next() -> tuple[Any, type]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    settings = _SHARED | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 32, "head_dim": HEAD_DIM}
    return Qwen3NextConfig(**settings), Qwen3NextForCausalLM


def qwen3_5() -> tuple[Any, type]:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5TextConfig(**_SHARED, **_LINEAR, head_dim=HEAD_DIM), Qwen3_5ForCausalLM


def nemotron_h() -> tuple[Any, type]:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **_SHARED,
        head_dim=HEAD_DIM,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=4,
        chunk_size=32,
    )
    return config, NemotronHForCausalLM


def gemma4() -> tuple[Any, type]:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **_SHARED | {"tie_word_embeddings": True},
        head_dim=HEAD_DIM,
        global_head_dim=HEAD_DIM,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=0,
        sliding_window=24,
        final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    )
    return config, Gemma4ForCausalLM


def gemma3() -> tuple[Any, type]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3TextConfig(**_SHARED | {"tie_word_embeddings": True}, head_dim=HEAD_DIM), Gemma3ForCausalLM


def write_target(family: Callable[[], tuple[Any, type]], folder: Path, seed: int = 0) -> Path:
    """A target of this family in `folder`, float32."""
    torch.manual_seed(seed)
    config, model_class = family()
    model = model_class(config).float()
    if family is gemma4:  # it multiplies embeddings by 8, beside which its layers would say nothing
        model.get_input_embeddings().weight.data /= 8
    model.save_pretrained(folder)
    return folder
