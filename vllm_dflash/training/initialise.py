"""A drafter before its first step: its shape, and what it takes over from the target.

Layers come from the target's last layers, the final norm from its final norm. With "last-feature" the fusion passes the
deepest feature on unchanged and the others faintly, and the feature norm is the input norm of the first layer taken
over: the first draft layer then sees context keys and values close to those that the layer had in the target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.model import Drafter, Variant
from vllm_dflash.training.settings import TrainSettings
from vllm_dflash.training.target_features import default_layer_ids, embedding_scale, target_shape

#: Standard deviation of random matrices, as in Qwen3 and Llama.
_SPREAD = 0.02


def drafter_config(settings: TrainSettings, target_config: Any, mask_token_id: int) -> DFlashConfig:
    """Shape of a new drafter for a target: the target's own sizes, the settings' layers and block.

    Raises:
        ValueError: a setting does not fit the target.
    """
    text = target_config.get_text_config()
    shape = target_shape(settings.target, target_config)
    if settings.initialisation == "target" and settings.num_layers > shape.num_layers:
        raise ValueError(
            f"{settings.num_layers} draft layers cannot be started from a target of {shape.num_layers}; use fewer, or "
            f"--initialisation random."
        )
    layer_ids = settings.target_layer_ids or default_layer_ids(shape.num_layers, settings.num_features)
    num_heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    is_causal = settings.in_block_attention == "causal"
    config = DFlashConfig(
        name=settings.output,
        dialect="z-lab",
        target_layer_ids=tuple(layer_ids),
        mask_token_id=mask_token_id,
        draft_block_size=settings.draft_block_size,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or shape.hidden_size // num_heads,
        vocab_size=shape.vocab_size,
        draft_vocab_size=settings.draft_vocab_size or shape.vocab_size,
        num_target_layers=shape.num_layers,
        layer_causal=(is_causal,) * settings.num_layers,
        sliding_windows=(settings.sliding_window or None,) * settings.num_layers,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10_000.0),
        max_position_embeddings=text.max_position_embeddings,
        attention_bias=False,
        has_attention_sinks=False,
        is_quantised=False,
        # Layers taken over from the target know tokens by its own embeddings.
        input_embedding_scale=settings.input_embedding_scale or embedding_scale(target_config),
    )
    config.check_target(shape)
    return config


def new_drafter(settings: TrainSettings, config: DFlashConfig, target: Any, head: Tensor, rms: Tensor) -> Drafter:
    """A drafter with its first weights.

    Args:
        target: the target, a Hugging Face model.
        head: its output projection for the drafted vocabulary, [draft vocabulary, hidden].
        rms: root mean square of each feature layer, [F], without the first token (an attention sink).

    Raises:
        ValueError: layers cannot be taken over because sizes differ.
    """
    torch.manual_seed(settings.seed)
    variant = Variant(settings.injection, settings.target_features, settings.drafting)
    drafter = Drafter(config, variant, has_lm_head=settings.train_lm_head)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=_SPREAD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if drafter.lm_head is not None:
        drafter.lm_head.weight.data.copy_(head)
    decoder = target.get_decoder()
    first_taken = len(decoder.layers) - config.num_layers
    if settings.initialisation == "target":
        _take_over_layers(drafter, decoder, first_taken)
    _start_fusion(drafter, settings.fc_initialisation, rms)
    if settings.fc_initialisation == "last-feature" and settings.initialisation == "target":
        drafter.hidden_norm.weight.data.copy_(decoder.layers[first_taken].input_layernorm.weight)
    return drafter


@torch.no_grad()
def _take_over_layers(drafter: Drafter, decoder: Any, first_taken: int) -> None:
    for mine, its in zip(drafter.layers, decoder.layers[first_taken:]):
        weights = {name: w.float() for name, w in its.state_dict().items()}
        taken = {name: weights[name] for name, own in mine.state_dict().items() if name in weights}
        wrong = [name for name, w in taken.items() if w.shape != mine.state_dict()[name].shape]
        matrices = [name for name, _ in mine.named_parameters() if name.endswith("proj.weight") and name not in taken]
        if wrong or matrices:
            raise ValueError(
                f"layers of this target cannot be taken over ({', '.join(wrong + matrices)} differ); use "
                f"--initialisation random."
            )
        mine.load_state_dict(taken, strict=False)
    drafter.norm.weight.copy_(decoder.norm.weight)


@torch.no_grad()
def _start_fusion(drafter: Drafter, rule: str, rms: Tensor) -> None:
    weight = drafter.fc.weight  # [hidden, F * target hidden]
    hidden, target_hidden = drafter.config.hidden_size, drafter.config.target_hidden_size
    if rule != "random":
        # Without this the deepest layers, whose states are the largest, drown the others.
        weight.mul_((rms[-1] / rms).repeat_interleave(target_hidden))
    if rule == "last-feature":
        if hidden != target_hidden:
            raise ValueError(
                f"--fc-initialisation last-feature needs a drafter as wide as its target, but it is {hidden} wide "
                f"and the target {target_hidden}; use scaled."
            )
        weight[:, -target_hidden:] = torch.eye(hidden)
        weight[:, :-target_hidden] *= 0.1


def feature_rms(features: Tensor, num_features: int) -> Tensor:
    """Root mean square [F] of each feature layer over rows [T, F * hidden]."""
    return features.float().unflatten(-1, (num_features, -1)).pow(2).mean((0, 2)).sqrt()


def find_mask_token(tokenizer: Any, embedding: Tensor) -> int:
    """A token to stand for "unknown": the tokenizer's mask token, an unused row of the embedding, or a special token.

    Tokens that no text contains keep the embedding they were initialised with, so among special tokens those of equal
    norm are untrained; the last of them is taken (SmolLM2: 16, <empty_output>). End and padding tokens never are.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < len(embedding):
        return len(tokenizer)
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = [i for i, t in tokenizer.added_tokens_decoder.items() if t.special and i not in used]
    norms = {i: round(float(embedding[i].float().norm()), 3) for i in special}
    for token_id in reversed(special):
        if list(norms.values()).count(norms[token_id]) > 1:
            return token_id
    raise ValueError("no token is free to serve as mask token; name one that texts do not use with --mask-token-id.")
