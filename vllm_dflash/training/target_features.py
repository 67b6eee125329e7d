"""What the frozen target gives a drafter to learn from: raw hidden states of some layers, and its likeliest tokens.

    features[t]     = [h_l1(t); ...; h_lF(t)]      residual stream after each feature layer, no norm, F * hidden wide
    top_ids[t]      = the k likeliest tokens to follow token t, of the vocabulary that the drafter can draft
    top_logprobs[t] = their log-probabilities, normalised over that vocabulary

Sequences are padded on the right and no attention mask is needed: in a causal model padding cannot be seen.
Features are kept in bf16 for training. fp16 would not do: the first token's state is a thousand times the others'
(SmolLM2: RMS 1040 against 6 to 27), and fp16 spends its precision where it is not needed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm_dflash.config import TargetShape

#: Keys of a target's config that hold the factor on its embeddings: Granite, Falcon-H1 and HyperCLOVA X; MiniCPM; HRM.
_EMBEDDING_SCALES = ("embedding_multiplier", "scale_emb", "embedding_scale")

#: Values of each parameter that go into a target's fingerprint.
_VALUES_HASHED = 64


@dataclass(frozen=True)
class SequenceFeatures:
    """One sequence of T tokens as the target sees it."""

    features: Tensor  # [T, F * hidden]
    top_ids: Tensor | None  # [T, k] int32, target token ids
    top_logprobs: Tensor | None  # [T, k] bf16


class TargetFeatures:
    """A frozen Hugging Face causal language model, run up to the last layer that is needed.

    Args:
        model: the causal language model, on its device.
        layer_ids: feature layers as z-lab counts (0 = output of the first layer), increasing.
        top_k: how many of the target's likeliest tokens to keep for soft labels; 0 stops after the last feature
            layer and keeps none.
        vocabulary: target ids the drafter can draft, [V'] int64; None for all.
        dtype: of the features. Training rounds them to bf16, as the cache keeps them; a measurement does as serving
            does and takes the target's own.
    """

    def __init__(
        self,
        model: Any,
        layer_ids: Sequence[int],
        top_k: int = 0,
        vocabulary: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.model, self.layer_ids, self.top_k = model.eval().requires_grad_(False), tuple(layer_ids), top_k
        self.dtype = dtype
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._decoder = model.get_decoder()
        head = model.get_output_embeddings().weight
        self._vocabulary = None if vocabulary is None else vocabulary.to(head.device)
        self._head = head if self._vocabulary is None else head[self._vocabulary].clone()

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self._head.device

    @torch.inference_mode()
    def extract(self, sequences: Sequence[Sequence[int]]) -> list[SequenceFeatures]:
        """Features of each sequence of token ids; one target pass for all."""
        longest = max(len(ids) for ids in sequences)
        batch = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, ids in enumerate(sequences):
            batch[row, : len(ids)] = torch.tensor(ids)
        final, captured = None, dict[int, Tensor]()
        # The hooks are there for this pass only: the same model also generates answers and gives a drafter its start.
        with self._capturing(captured), contextlib.suppress(_EnoughError):
            final = self._decoder(input_ids=batch.to(self.device), use_cache=False).last_hidden_state
        features = torch.cat([captured[i] for i in self.layer_ids], dim=-1).to(self.dtype)
        finals = [None] * len(sequences) if final is None else final
        return [self._of_row(features[row], finals[row], len(ids)) for row, ids in enumerate(sequences)]

    def _of_row(self, features: Tensor, final: Tensor | None, length: int) -> SequenceFeatures:
        ids = logprobs = None
        if final is not None:
            logits = (final[:length] @ self._head.T).float()
            if self._softcap:  # Gemma's; it changes the probabilities
                logits = self._softcap * torch.tanh(logits / self._softcap)
            values, ids = logits.log_softmax(-1).topk(self.top_k)
            if self._vocabulary is not None:
                ids = self._vocabulary[ids]
            ids, logprobs = ids.int(), values.bfloat16()
        return SequenceFeatures(features[:length].clone(), ids, logprobs)

    @contextlib.contextmanager
    def _capturing(self, captured: dict[int, Tensor]) -> Iterator[None]:
        def hook_of(layer_id: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                captured[layer_id] = output[0] if isinstance(output, tuple) else output
                if layer_id == self.layer_ids[-1] and not self.top_k:
                    raise _EnoughError

            return hook

        hooks = [self._decoder.layers[i].register_forward_hook(hook_of(i)) for i in self.layer_ids]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _EnoughError(Exception):
    """Ends a target pass behind the last feature layer, where nothing after it is asked for."""


def load_target(name: str, device: torch.device) -> Any:
    """The target as a Hugging Face model: float32 on a CPU (faster there than bf16), bf16 elsewhere."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)


def fingerprint(model: Any) -> str:
    """A hash that tells targets apart, whatever they are called: of some values of every parameter, as bf16."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _VALUES_HASHED)][:_VALUES_HASHED]
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(some.bfloat16().cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def load_target_config(name: str) -> Any:
    """The target's Hugging Face config.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"there is no model config for target '{name}' ({str(error).splitlines()[0]}); give the folder of a "
            f"causal language model, or its name on the Hugging Face hub."
        ) from error


def target_shape(name: str, hf_config: Any) -> TargetShape:
    """Layers, hidden size and vocabulary of a target's Hugging Face config (the text part of a multimodal one)."""
    text = hf_config.get_text_config()
    return TargetShape(name, text.num_hidden_layers, text.hidden_size, text.vocab_size)


def embedding_scale(hf_config: Any) -> float:
    """What a target multiplies the rows of its embedding table by before its first layer; 1 for most models."""
    text = hf_config.get_text_config()
    for key in _EMBEDDING_SCALES:
        if getattr(text, key, None) is not None:
            return float(getattr(text, key))
    if "gemma" in text.model_type or getattr(text, "mup_enabled", False):  # the latter is AFMoE's
        return float(text.hidden_size**0.5)
    return 1.0


def default_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Feature layers by the paper's rule: spread evenly from the second to the third-from-last layer.

    Python's round() goes to the even neighbour at .5, as in z-lab's build_target_layer_ids: 30 layers and 5 features
    give 1, 8, 14, 20, 27. A shallow target gives fewer layers, because each may be read once.

    Raises:
        ValueError: the target is too shallow for any.
    """
    first, last = 1, num_target_layers - 3
    if num_features == 1:
        return (num_target_layers // 2,)
    if last < first:
        raise ValueError(
            f"the paper's rule for feature layers needs a target of at least 4 layers, but it has {num_target_layers}; "
            f"name them with --target-layer-ids (0 to {num_target_layers - 2})."
        )
    step = (last - first) / (num_features - 1)
    return tuple(sorted({round(first + i * step) for i in range(num_features)}))
