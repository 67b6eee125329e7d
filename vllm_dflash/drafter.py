"""The drafter as a vLLM model: vLLM's DFlashQwen3ForCausalLM with KV injection, loading and head of our own.

Registered over the architecture "DFlashDraftModel", so both of vLLM's runners build it. Layers, weight loaders,
tensor parallelism and paged attention are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from vllm_dflash import LOGGER, __version__
from vllm_dflash.context_kv import ContextKV
from vllm_dflash.draft_sampling import Candidates
from vllm_dflash.fused import FusedContext, FusedHead, admit
from vllm_dflash.options import DFlashOptions
from vllm_dflash.targets import cache_folder

logger = init_logger(LOGGER)


class DrafterLayers(DFlashQwen3Model):
    """The drafter's layers; context K/V go through `ContextKV`, and embeddings are scaled as in training."""

    context_kv: ContextKV | None = None

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        nested = getattr(self.config, "dflash_config", None) or {}
        self.input_embedding_scale = float(nested.get("input_embedding_scale") or 1.0)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, hidden] of block tokens [T], scaled; a mask embedding of its own too, as it stands for a row.

        The table is shared with the target, which multiplies by a factor of its own elsewhere, if at all.
        """
        embeddings = super().embed_input_ids(input_ids)
        return embeddings if self.input_embedding_scale == 1 else embeddings * self.input_embedding_scale

    def _build_fused_kv_buffers(self) -> None:
        self.context_kv = ContextKV(self.hidden_norm, [layer.self_attn for layer in self.layers])

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: torch.Tensor | list[torch.Tensor | None] | None = None,
        sum_squares: torch.Tensor | None = None,
    ) -> None:
        """See `ContextKV.store`; vLLM calls it by this name."""
        if self.context_kv is None:  # dummy weights: load_weights never ran
            self._build_fused_kv_buffers()
        assert self.context_kv is not None
        self.context_kv.store(context_states, context_positions, context_slot_mapping, sum_squares)


class Drafter(DFlashQwen3ForCausalLM):
    """The drafter. Constructs vLLM's own class instead where the plugin is switched off for this engine."""

    model_cls = DrafterLayers

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        if not DFlashOptions.from_additional_config(vllm_config.additional_config).enabled:
            return DFlashQwen3ForCausalLM(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vllm_config = vllm_config
        self.fused_head: FusedHead | None = None  # set where our kernel was admitted

    def admit_kernels(self) -> None:
        """Use our Triton kernels where they compute the same; caches are allocated, CUDA graphs not yet captured."""
        if DFlashOptions.from_additional_config(self.vllm_config.additional_config).kernels == "auto":
            admitted = admit(self, cache_folder() / "tuning")
            if admitted:
                logger.info("vllm-dflash kernels in use: %s.", ", ".join(admitted))

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Context features [T, hidden] of the target's [T, F * hidden]; vLLM calls it by this name."""
        fused = self._fused_context
        if fused is None or hidden_states.dim() != 2:
            return super().combine_hidden_states(hidden_states)
        return fused.fuse(hidden_states).values

    def store_context(
        self,
        target_hidden_states: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor | list[torch.Tensor | None],
    ) -> None:
        """Features of T rows [T, F * hidden] to K/V in the caches; see `ContextKV.store`."""
        fused = self._fused_context
        if fused is None:
            features = self.combine_hidden_states(target_hidden_states)
            self.model.precompute_and_store_context_kv(features, positions, slots)
        else:
            features, sum_squares = fused.fuse(target_hidden_states)
            self.model.precompute_and_store_context_kv(features, positions, slots, sum_squares)

    @property
    def _fused_context(self) -> FusedContext | None:
        return self.model.context_kv.fused if self.model.context_kv is not None else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint and refuse one that leaves a parameter unfilled.

        vLLM only objects to tensors that it cannot place. Filling the parameters with NaN first also finds the
        third of a fused projection that no tensor reached.

        Raises:
            ValueError: names the parameters without a value.
        """
        optional = ("embed_tokens", "lm_head", "mask_embedding")
        parameters = {
            name: parameter
            for name, parameter in self.named_parameters()
            if parameter.is_floating_point() and not any(part in name for part in optional)
        }
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
        super().load_weights(weights)
        unfilled = [name for name, parameter in parameters.items() if bool(parameter.isnan().any())]
        if unfilled:
            raise ValueError(
                f"drafter '{self.draft_model_config.model}' gives no (or NaN) values for {', '.join(unfilled)}; it "
                f"would draft from random values. Re-export the checkpoint."
            )
        self._announce()

    def _announce(self) -> None:
        """One line per worker that says what is live; a plugin that vLLM could not load would say nothing."""
        is_cpu = self.vllm_config.device_config.device_type == "cpu"
        is_v2 = self.vllm_config.use_v2_model_runner
        nested = getattr(self.config, "dflash_config", None) or {}
        logger.info(
            "vllm-dflash %s is live: %s drafts in the %s, kernels: %s, trained block %s, K = %s, target layers %s.",
            __version__,
            type(self).__name__,
            "V2 runner (vLLM's own speculator)" if is_v2 else "V1 runner (our proposer)",
            "oneDNN and torch on the CPU" if is_cpu else "vLLM's, and ours where they are admitted",
            nested.get("block_size", getattr(self.config, "block_size", "unknown")),
            self.vllm_config.speculative_config.num_speculative_tokens,
            nested.get("target_layer_ids"),
        )

    def greedy_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The most probable token of each row, as a target token id.

        Args:
            hidden_states: [N, hidden], only rows that predict.

        Returns:
            [N] int64. With a reduced draft vocabulary the argmax is taken there and then mapped, instead of
            scattering [N, draft vocabulary] into [N, vocabulary] first.
        """
        if self.fused_head is not None:
            return self.fused_head.confident_tokens(hidden_states)[0]
        return self._target_ids(self.logits_processor(self.lm_head, hidden_states).argmax(dim=-1))

    def confident_tokens(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`greedy_tokens` with the probability [N] float32 of each."""
        if self.fused_head is not None:
            return self.fused_head.confident_tokens(hidden_states)
        logits = self.logits_processor(self.lm_head, hidden_states).float()
        largest, tokens = logits.max(dim=-1)
        confidences = 1 / (logits - largest[:, None]).exp_().sum(-1)
        return self._target_ids(tokens), confidences

    def candidates(self, hidden_states: torch.Tensor, count: int) -> Candidates:
        """The `count` most probable tokens of each row [N, hidden], or all where the draft vocabulary is smaller."""
        if self.fused_head is not None:
            return self.fused_head.candidates(hidden_states, count)
        logits = self.logits_processor(self.lm_head, hidden_states).float()
        largest, tokens = logits.topk(min(count, logits.shape[1]))
        return Candidates(largest, self._target_ids(tokens), logits.logsumexp(-1))

    def _target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        offsets = self.draft_id_to_target_id  # d2t
        return tokens if offsets is None else tokens + offsets[tokens]
