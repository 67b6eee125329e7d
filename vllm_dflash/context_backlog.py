"""Context rows whose K/V are not written yet, because nobody drafts.

Fusing a few rows costs as much as fusing one: the weights have to be read. While plain steps follow each other, their
rows wait here, and are written at once when

* a request is about to draft,
* more than BACKLOG_ROWS would wait, or a step brings more than one row of a request (a prompt),
* a row completes a page: a full page may be shared with other requests through the prefix cache.

Rows wait with their slots. vLLM gives the pages of a request that ended or was preempted to others, so the rows of a
request that is not where they left it are dropped. What is dropped is never a part of a shared page, and a request that
comes back is computed anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_dflash.draft_length import BACKLOG_ROWS
from vllm_dflash.length_control import StepBatch


class ContextRows(NamedTuple):
    """T rows to be written."""

    features: torch.Tensor  # [T, F * hidden], the target's
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, PAD_SLOT_ID = do not write


class ContextBacklog:
    """Rows of plain steps, in order. They are copied, as vLLM reuses what they came in.

    Args:
        page_size: tokens of a page of the drafter's cache.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._rows: ContextRows | None = None  # [BACKLOG_ROWS, ...]; the first len(_owners) are waiting
        self._owners: list[str] = []  # request of each row that waits
        self._lengths: dict[str, int] = {}  # accepted tokens of each of them when its last row came

    def __len__(self) -> int:
        return len(self._owners)

    def rows_due(self, rows: ContextRows, batch: StepBatch, is_drafting: bool) -> ContextRows | None:
        """What is to be written now, with `rows` of this step at its end; None if they wait."""
        self._drop_those_that_left(batch)
        if self._can_wait(batch, is_drafting):
            self._add(rows, batch)
            return None
        if not self._owners or self._rows is None:
            return rows
        waiting = [held[: len(self._owners)] for held in self._rows]
        self._owners, self._lengths = [], {}
        return ContextRows(*(torch.cat(pair) for pair in zip(waiting, rows)))

    def _can_wait(self, batch: StepBatch, is_drafting: bool) -> bool:
        if is_drafting or not batch.has_exact_lens or len(self) + len(batch.request_ids) > BACKLOG_ROWS:
            return False
        return bool((batch.num_rows == 1).all() and (batch.context_lens % self._page_size != 0).all())

    def _add(self, rows: ContextRows, batch: StepBatch) -> None:
        if self._rows is None:
            self._rows = ContextRows(*(part.new_empty(BACKLOG_ROWS, *part.shape[1:]) for part in rows))
        first = len(self)
        for held, part in zip(self._rows, rows):
            held[first : first + len(part)] = part
        self._owners += batch.request_ids
        self._lengths |= zip(batch.request_ids, batch.context_lens.tolist())

    def _drop_those_that_left(self, batch: StepBatch) -> None:
        if not self._owners or self._rows is None:
            return
        before = (batch.context_lens - batch.num_rows + batch.num_rejected).tolist()
        there = {i for i, length in zip(batch.request_ids, before) if self._lengths.get(i) == length}
        if len(there) == len(self._lengths):
            return
        kept = [row for row, owner in enumerate(self._owners) if owner in there]
        index = torch.from_numpy(np.array(kept, dtype=np.int64)).to(self._rows.slots.device)
        for held in self._rows:
            held[: len(kept)] = held[index]
        self._owners = [self._owners[row] for row in kept]
        self._lengths = {i: length for i, length in self._lengths.items() if i in there}
