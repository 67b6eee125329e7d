"""`thinking_token_budget` on every verified row: where a budget ends inside a block, and in steps without drafts.

vLLM's holder of budgets (V1 runner) follows one request through one token per step exactly. With speculation it looks
at a whole block at once, and then text differs from plain decoding: of closing words of several tokens only the first
row is forced, whatever stands behind it in the block, and in a step in which nobody has drafts the forced tokens of all
requests go into the first row. Here its states are led through a block token by token, as if each had had a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

#: In a state: tokens of the output that it has been led through; absent before the first step.
_NUM_SEEN = "num_seen"


class ThinkingBudgets(ThinkingBudgetStateHolder):
    """vLLM's holder, with the forced token of each row that a step verifies."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        scheduler = vllm_config.scheduler_config
        # Each row is a step of its own, so there are no speculated tokens.
        super().__init__(vllm_config.reasoning_config, scheduler.max_num_seqs, 0, device, is_pin_memory=False)
        self._forced: dict[int, list[int | None]] = {}  # by index of the request; at each of its rows

    def update_state(
        self,
        output_token_ids: list[list[int]],
        spec_token_ids: list[list[int]] | None,
        repeat_indices: torch.Tensor | None = None,
    ) -> None:
        """Before a step's rows are sampled; by index of the request, what is accepted and what is to be verified."""
        self._forced = {}
        drafts = spec_token_ids or []
        for index, state in self._state.items():
            if index < len(output_token_ids):
                output = output_token_ids[index]
                for length in range(state.get(_NUM_SEEN, -1) + 1, len(output) + 1):
                    self._lead(state, output[:length])
                state[_NUM_SEEN] = len(output)
                self._forced[index] = list(self._rows(state, output, drafts[index] if index < len(drafts) else []))

    def apply_to_logits(
        self, logits: torch.Tensor, predict_bonus_token: bool, spec_token_ids: list[list[int]] | None
    ) -> torch.Tensor:
        """Force tokens, in place.

        Args:
            logits: [rows, vocabulary]. One row per request if no request has drafts, and likewise, behind each block,
                with `predict_bonus_token`; else the rows of all drafts, request by request.
        """
        if len(logits) == 0:  # rows of drafts in a verifying step without any
            return logits
        counts = [len(drafts) for drafts in spec_token_ids or []]
        places: list[tuple[int, int]] = []  # row, token
        for index, forced in self._forced.items():
            num_drafts = counts[index] if index < len(counts) else 0
            if predict_bonus_token or not any(counts):
                rows, tokens = range(index, index + 1), forced[num_drafts:]
            else:
                first = sum(counts[:index])
                rows, tokens = range(first, first + num_drafts), forced[:num_drafts]
            places += [(row, token) for row, token in zip(rows, tokens) if token is not None]
        if places:
            index_of = torch.tensor(places).to(logits.device, non_blocking=True)
            logits[index_of[:, 0], index_of[:, 1]] = 1e9  # vLLM's value
        return logits

    def _rows(self, state: dict[str, Any], output: list[int], drafts: Sequence[int]) -> Iterator[int | None]:
        """The forced token behind the output and behind each draft."""
        yield self._forced_token(state)
        walked = dict(state)  # vLLM replaces values and changes none of them
        for count in range(1, len(drafts) + 1):
            self._lead(walked, [*output, *drafts[:count]])
            yield self._forced_token(walked)

    def _lead(self, state: dict[str, Any], output: list[int]) -> None:
        state |= {"output_tok_ids": output, "spec_token_ids": [], "force_index": [], "in_spec_mode": False}
        self._update_think_state(state)

    def _forced_token(self, state: dict[str, Any]) -> int | None:
        is_forced = state["in_end"] and state["force_index"] and state["end_count"] < len(self.think_end_token_ids)
        return self.think_end_token_ids[state["end_count"]] if is_forced else None
