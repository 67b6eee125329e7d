"""Acceptance length tau, exactly, without running the target: the walk.

For text that the target wrote greedily, the target's choice after any prefix of it is the text's next token. So a draft
is accepted exactly as far as it equals the text, and serving can be replayed on paper:

    start at the first response token (the anchor);  the draft agrees with the text for r tokens;
    the cycle gained r + 1 tokens;  the next anchor is r + 1 further on

tau = tokens gained / cycles = 1 + accepted / drafts, pooled as vLLM does (v1/spec_decode/metrics.py). Averages over
uniformly drawn anchors, as trainers report them, weigh easy stretches more than serving does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_dflash.training.blocks import Blocks, PackedRow, make_blocks

#: Blocks drafted at a time.
_BLOCKS_AT_ONCE = 256

Draft = Callable[[PackedRow, Blocks], Tensor]  # tokens [A, length - 1] int64 that the drafter proposes


@dataclass(frozen=True)
class DocumentAcceptance:
    """Accepted tokens of each cycle of one response."""

    id: str
    source: str
    runs: tuple[int, ...]
    num_drafted: int  # K

    @property
    def tau(self) -> float:
        """Tokens gained per cycle."""
        return 1 + sum(self.runs) / max(len(self.runs), 1)


@dataclass
class Acceptance:
    """Acceptance over documents."""

    documents: list[DocumentAcceptance] = field(default_factory=list)

    @property
    def num_cycles(self) -> int:
        """Draft-verify cycles."""
        return sum(len(d.runs) for d in self.documents)

    @property
    def tau(self) -> float:
        """Tokens gained per cycle, pooled over documents; 1 where there was no cycle."""
        return 1 + sum(sum(d.runs) for d in self.documents) / max(self.num_cycles, 1)

    @property
    def by_position(self) -> list[float]:
        """Share of cycles in which slot 1, 2, ..., K was accepted."""
        num_drafted = max((d.num_drafted for d in self.documents), default=0)
        runs = [run for d in self.documents for run in d.runs]
        return [sum(run >= k for run in runs) / max(len(runs), 1) for k in range(1, num_drafted + 1)]

    def of(self, keep: Callable[[DocumentAcceptance], bool]) -> Acceptance:
        """Acceptance over some of the documents."""
        return Acceptance([d for d in self.documents if keep(d)])


def walk(row: PackedRow, draft: Draft, num_drafted: int, ids: Sequence[tuple[str, str]]) -> list[DocumentAcceptance]:
    """Replay serving on each document of a packed row.

    Args:
        row: documents written greedily by the target.
        draft: proposes tokens for blocks.
        num_drafted: K.
        ids: (id, source) of each document.
    """
    possible = row.loss_mask & (row.position > 0)
    anchors = possible.nonzero()[:, 0]
    run_at = dict(zip(anchors.tolist(), _runs(row, anchors, draft, num_drafted)))
    documents = row.document.tolist()
    found: list[list[int]] = [[] for _ in ids]
    is_anchor, next_anchor = possible.tolist(), -1
    for index, possible_here in enumerate(is_anchor):
        if not possible_here or index < next_anchor:
            continue
        # At the last token of a response nothing is left to draft: serving has stopped. (The first token of the next
        # document is never an anchor, so the token behind one is of the same document.)
        if index + 1 < len(is_anchor) and is_anchor[index + 1]:
            found[documents[index]].append(run_at[index])
        next_anchor = index + run_at[index] + 1
    return [DocumentAcceptance(i, s, tuple(runs), num_drafted) for (i, s), runs in zip(ids, found)]


@torch.inference_mode()
def _runs(row: PackedRow, anchors: Tensor, draft: Draft, num_drafted: int) -> list[int]:
    """How many drafted tokens agree with the text behind each anchor."""
    runs = []
    for some in anchors.split(_BLOCKS_AT_ONCE):
        blocks = make_blocks(row, some, num_drafted + 1)
        agrees = (draft(row, blocks) == blocks.labels) & blocks.label_mask
        runs += agrees.long().cumprod(1).sum(1).tolist()
    return runs
