"""The target's logits after given texts, by Hugging Face transformers in float32: nothing of vLLM takes part."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vllm_dflash.parity.oracle import Floats

_BATCH = 64


class TargetLogits:
    """A Hugging Face causal language model in float32, on the CPU or the first GPU."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()

    @torch.inference_mode()
    def after(
        self, prompt_ids: Sequence[int], continuations: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], Floats]]:
        """Each of `continuations`, which are not empty and all different, with the logits [V] that follow it.

        The prompt is computed once; a continuation is a row of a batch that goes on from it.
        """
        ids = torch.tensor([list(prompt_ids)], device=self._model.device)
        prompt = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
        wanted = set(continuations)
        # A continuation that begins another one is answered by the longer one's row.
        beginnings = {c[:n] for c in wanted for n in range(1, len(c))}
        rows = sorted(wanted - beginnings, key=lambda c: (len(c), c))
        for start in range(0, len(rows), _BATCH):
            yield from self._batch(prompt, rows[start : start + _BATCH], wanted)

    def _batch(
        self, prompt: Any, rows: Sequence[tuple[int, ...]], wanted: set[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], Floats]]:
        longest = max(map(len, rows))
        # Padding on the right is not seen by what stands before it.
        ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=self._model.device)
        cache = copy.deepcopy(prompt)
        cache.batch_repeat_interleave(len(rows))
        logits = self._model(ids, past_key_values=cache, use_cache=True).logits.double().cpu().numpy()
        for row, row_logits in zip(rows, logits):
            for length in range(1, len(row) + 1):
                if row[:length] in wanted:
                    wanted.discard(row[:length])
                    yield row[:length], np.asarray(row_logits[length - 1])
