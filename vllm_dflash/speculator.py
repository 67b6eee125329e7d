"""The speculator of vLLM's V2 runner, with steps that draft nothing.

All but those is vLLM's own: it drives our drafter. vLLM 0.32 runs the block pass although no token of it is wanted;
0.33 does without by itself, and this class is not used there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator


class DraftSpeculator(DFlashSpeculator):
    """Where a step drafts no tokens, only context K/V of the target's new rows are written."""

    _writes_context_only = False

    def propose(self, input_batch: Any, *args: Any, num_speculative_tokens: int | None = None, **named: Any) -> Any:
        """As vLLM calls it; `num_speculative_tokens` is K of this step."""
        if num_speculative_tokens != 0 or named.get("dummy_run"):
            return super().propose(input_batch, *args, num_speculative_tokens=num_speculative_tokens, **named)
        self._writes_context_only = True
        try:
            # A profiling run is not replayed from a graph: context K/V are written by themselves, before the block
            # pass, which is left out below.
            named["is_profile"] = True
            return super().propose(input_batch, *args, num_speculative_tokens=num_speculative_tokens, **named)
        finally:
            self._writes_context_only = False

    def _generate_draft(self, *args: Any, **named: Any) -> None:
        if not self._writes_context_only:
            super()._generate_draft(*args, **named)

    def _build_uniform_attn_metadata(self, *args: Any, **named: Any) -> dict[str, Any] | None:
        return None if self._writes_context_only else super()._build_uniform_attn_metadata(*args, **named)

    def _prepare_eplb_forward(self, num_unpadded_tokens: int) -> None:
        if not self._writes_context_only:
            super()._prepare_eplb_forward(num_unpadded_tokens)


def skips_by_itself(speculator_class: type = DFlashSpeculator) -> bool:
    """Does vLLM's own speculator leave out the block pass where nothing is drafted?"""
    return hasattr(speculator_class, "_store_hidden_states")


def make_speculator(vllm_config: Any, device: torch.device) -> DFlashSpeculator:
    """In place of vLLM's for a plain DFlash drafter."""
    return (DFlashSpeculator if skips_by_itself() else DraftSpeculator)(vllm_config, device)
