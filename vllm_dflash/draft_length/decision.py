"""What the controller hands out and gets back: a plan before the draft pass, a decision after it.

Both are values: the caller holds them, so that nothing has to pair up inside the controller, and a pipeline that learns
of outcomes some steps later keeps a queue of decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DraftPlan:
    """Which requests of a step get a draft pass, and for how many positions the LM head is computed."""

    drafting: np.ndarray  # [D] int64 indices into the step's requests, increasing; empty = no draft pass
    num_positions: int  # P; 0 where nothing is drafted
    request_ids: tuple[str, ...]  # [R]
    context_lens: np.ndarray  # [R]
    caps: np.ndarray  # [D] most tokens that each drafting request may verify, at most P
    fixed: np.ndarray  # [D] bool, rows whose length does not depend on the batch: it is their cap
    is_probe: bool  # drafted to learn, although it is not expected to pay
    step: int
    rest_steps: int = 0  # nobody drafts, nor in as many steps after this one, as long as they are like it


@dataclass(frozen=True)
class DraftDecision:
    """How many of its drafted tokens each drafting request verifies in the next step."""

    request_ids: tuple[str, ...]  # [D]
    confidences: np.ndarray  # [D, P] maximum probability of each position
    lengths: np.ndarray  # [D] int64
    fixed: np.ndarray  # [D] bool, as in the plan

    def rows(self, chosen: np.ndarray) -> DraftDecision:
        """That of some of its requests, by a mask [D]."""
        ids = tuple(request for request, is_chosen in zip(self.request_ids, chosen) if is_chosen)
        return DraftDecision(ids, self.confidences[chosen], self.lengths[chosen], self.fixed[chosen])

    def with_those_of(self, other: DraftDecision) -> DraftDecision:
        """Of both; they have no request in common. Positions that were not drafted have a confidence of 0."""
        num_positions = max(self.confidences.shape[1], other.confidences.shape[1])
        padded = [
            np.pad(one.confidences, ((0, 0), (0, num_positions - one.confidences.shape[1]))) for one in (self, other)
        ]
        return DraftDecision(
            self.request_ids + other.request_ids,
            np.concatenate(padded),
            np.concatenate([self.lengths, other.lengths]),
            np.concatenate([self.fixed, other.fixed]),
        )
