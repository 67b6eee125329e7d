"""Watches a KV cache while requests run: a step may write only where its own requests have room for new tokens.

The null page, free pages, pages of requests that are not in the step, what a request has already computed, and
positions beyond the maximum length must stay as they were, bit for bit, in the layers of target and drafter alike.
The drafter's layers may also get rows that waited, but only in the page that the request is filling: fuller ones may be
shared. A page that was just handed out is zeroed, even if its request loses it again before the step. At the start all
pages get a pattern, so that other zeros are seen.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops

from vllm_dflash.draft_length import BACKLOG_ROWS

_PATTERN = 3.0


class CacheCanary:
    """Wraps a runner's two calls of a step; looks at every `check_every`-th one."""

    def __init__(self, runner: Any, check_every: int = 1) -> None:
        self.runner, self.check_every = runner, check_every
        self.pages_checked = 0
        self._problems: list[str] = []
        context = runner.compilation_config.static_forward_context
        # Tensors [pages, heads, page size, 2 * head size] by layer.
        self.caches = {name: layer.kv_cache for name, layer in context.items() if layer.kv_cache.numel()}
        self.draft_layers = set(runner.drafter._draft_attn_layer_names)
        for cache in self.caches.values():
            cache.fill_(_PATTERN)
        self.page_size = next(iter(self.caches.values())).shape[2]
        self.elements = {name: _elements_of_slots(context[name]) for name in self.caches}
        self._snapshot: dict[str, torch.Tensor] | None = None
        self._new_pages: set[int] = set()
        self._steps = 0
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._before, self._after

    def take_problems(self) -> list[str]:
        """What was written where nothing may be; forgets it."""
        problems, self._problems = self._problems, []
        return problems

    def _before(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        self._snapshot = None
        if scheduler_output.total_num_scheduled_tokens and self._steps % self.check_every == 0:
            self._snapshot = {name: cache.clone() for name, cache in self.caches.items()}
        self._steps += 1
        self._new_pages = set(scheduler_output.new_block_ids_to_zero or [])
        return self._execute(scheduler_output, *arguments, **named)

    def _after(self, *arguments: Any, **named: Any) -> Any:
        batch = self.runner.input_batch
        starts = batch.num_computed_tokens_cpu[: batch.num_reqs].copy()
        result = self._sample(*arguments, **named)
        if self._snapshot is not None:
            filling = [max(start - BACKLOG_ROWS, start // self.page_size * self.page_size) for start in starts.tolist()]
            is_free, is_free_for_drafter = self._writable_slots(starts.tolist()), self._writable_slots(filling)
            for name, cache in self.caches.items():
                allowed = is_free_for_drafter if name in self.draft_layers else is_free
                self._check(name, self._snapshot[name], cache, allowed)
        return result

    def _writable_slots(self, starts: list[int]) -> torch.Tensor:
        """[pages, page size] bool: from each request's first writable position to the last that it can ever have.

        A page that several requests share is written by the one that computes it, perhaps in this very step.
        """
        num_pages = next(iter(self.caches.values())).shape[0]
        is_free = torch.zeros(num_pages, self.page_size, dtype=torch.bool)
        # All layers of a tiny model share one group of pages.
        [table] = self.runner.input_batch.block_table.block_tables
        for row, start in enumerate(starts):
            pages = table.get_cpu_tensor()[row, : table.num_blocks_per_row[row]].long()
            flags = is_free[pages].view(-1)
            flags[start : self.runner.max_model_len] = True
            is_free[pages] = flags.view(len(pages), self.page_size)
        return is_free

    def _check(self, name: str, before: torch.Tensor, now: torch.Tensor, is_free: torch.Tensor) -> None:
        num_pages = len(now)
        changed = (before.view(torch.int32) != now.view(torch.int32)).view(num_pages, -1)
        self.pages_checked += int((~is_free).any(1).sum())
        # [pages, page size]: did an element of this slot change?
        touched = changed.float() @ self.elements[name].float().T > 0
        zeroed = (now == 0).view(num_pages, -1)
        written: dict[int, list[int]] = {}
        for page, slot in (touched & ~is_free).nonzero().tolist():
            if page not in self._new_pages or not zeroed[page][self.elements[name][slot]].all():
                written.setdefault(page, []).append(slot)
        kind = "drafter" if name in self.draft_layers else "target"
        for page, slots in written.items():
            self._problems.append(
                f"step {self._steps}: {kind} layer {name} wrote slots {slots} of page {page}, which no new token has"
            )


def _elements_of_slots(layer: Any) -> torch.Tensor:
    """[page size, elements of a page] bool: which elements a slot consists of; vLLM's kernel decides that."""
    cache = torch.zeros_like(layer.kv_cache[:1])
    _, heads, page_size, width = cache.shape
    keys, values = cache.view(1, heads, 2 * page_size, -1).chunk(2, dim=2)
    ones = torch.ones(1, heads, width // 2, dtype=cache.dtype)
    elements = []
    for slot in range(page_size):
        cache.zero_()
        ops.cpu_attn_reshape_and_cache(ones, ones, keys, values, torch.tensor([slot]), layer.isa)
        elements.append(cache.view(-1) != 0)
    found = torch.stack(elements)
    assert (found.sum(0) == 1).all(), "each element belongs to one slot"
    return found
