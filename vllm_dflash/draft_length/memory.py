"""What is remembered of each request: how far it departs from the shared estimate, and how its last blocks looked.

Before a draft pass there are no confidences, so those of a request's last blocks stand for the next one's. What they
promise is judged by what is known now, so that a drafter that turns out to be wrong is not believed for another eight
blocks. Their survival vectors are sorted by length and averaged in groups: the worse half and the better half, say. One
mean would not do, because a block that turns out well is verified further than one that does not; a single block would
not either, because requests are chosen by it, and those that were lucky once would be. A request without blocks of its
own, or whose last one is long ago, goes by a pool of other requests' blocks. The pool takes blocks of requests that are
new or are tried again: it stands for requests that nothing is known of, and one that drafts all the time should not
crowd it.

Requests have slots in arrays; with all slots taken, the one that was seen longest ago is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_dflash.draft_length.acceptance import AcceptanceEstimate
from vllm_dflash.draft_length.seeded import FIRST_LENGTH

NUM_RECENT = 8  # blocks kept of each request
_POOL = 64  # blocks kept of all
_SHARED_WEIGHT = 2.0  # blocks that the pool counts for beside a request's own
_FADE = 0.97  # of a request's own blocks and labels per step; it is tried again after some 50 steps without a draft

_OFFSET_PRECISION = 2.0  # prior of an offset in logits: deviation 0.7
_MAX_OFFSET = 4.0


class RequestMemory:
    """Memory of requests by id.

    Args:
        num_positions: K.
        max_requests: slots; at least as many as are ever in one step.
    """

    def __init__(self, num_positions: int, max_requests: int) -> None:
        self._slots: dict[str, int] = {}
        self._ids: list[str | None] = [None] * max_requests
        self._free = list(range(max_requests))[::-1]
        self._seen = np.zeros(max_requests, dtype=np.int64)  # step in which a request was last in the batch
        self.offsets = np.zeros(max_requests)
        self._information = np.zeros(max_requests)
        # Confidences; NaN where the LM head was not computed.
        self._recent = np.full((max_requests, NUM_RECENT, num_positions), np.nan)
        self._num_blocks = np.zeros(max_requests, dtype=np.int64)  # remembered so far, NUM_RECENT of them kept
        self._drafted = np.zeros(max_requests, dtype=np.int64)  # step of the last block
        self._pool = np.full((_POOL, num_positions), np.nan)  # the same
        self._num_pooled = 0
        self.seeded_lengths = np.zeros(max_requests, dtype=np.int64)  # see seeded.py
        self.seeded_misses = np.zeros(max_requests, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, request_ids: Sequence[str], step: int) -> np.ndarray:
        """[R] slots of the requests of a step; new ones begin with nothing remembered.

        Raises:
            ValueError: more requests than slots.
        """
        if len(request_ids) > len(self._ids):
            raise ValueError(
                f"a step has {len(request_ids)} requests, but there is memory for {len(self._ids)}; raise max_requests."
            )
        known = self._slots
        slots = np.array([known.get(request_id, -1) for request_id in request_ids], dtype=np.int64)
        self._seen[slots[slots >= 0]] = step
        for row in np.flatnonzero(slots < 0):
            slots[row] = self._new_slot(request_ids[row], step)
        return slots

    def find(self, request_ids: Sequence[str]) -> np.ndarray:
        """[D] slots, -1 for requests that have been forgotten."""
        return np.array([self._slots.get(request_id, -1) for request_id in request_ids], dtype=np.int64)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the slots of finished requests; unknown ids are ignored."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._ids[slot] = None
                self._free.append(slot)

    def _new_slot(self, request_id: str, step: int) -> int:
        if not self._free:
            oldest = self._ids[int(np.argmin(self._seen))]
            assert oldest is not None
            self.forget([oldest])
        slot = self._free.pop()
        self._slots[request_id], self._ids[slot] = slot, request_id
        self._seen[slot] = step
        self.offsets[slot] = self._information[slot] = 0
        self._num_blocks[slot] = self._drafted[slot] = 0
        self.seeded_lengths[slot], self.seeded_misses[slot] = FIRST_LENGTH, 0
        return slot

    def remember(self, slots: np.ndarray, confidences: np.ndarray, step: int) -> None:
        """Keep the confidences [D, P] of blocks that were just drafted."""
        num_positions = confidences.shape[1]
        is_news = (self._num_blocks[slots] < 4) | (self._drafted[slots] < step - 1)
        place = self._num_blocks[slots] % NUM_RECENT
        self._recent[slots, place] = np.nan
        self._recent[slots, place, :num_positions] = confidences
        self._num_blocks[slots] += 1
        self._drafted[slots] = step
        fresh = confidences[is_news][-_POOL:]
        places = (self._num_pooled + np.arange(len(fresh))) % _POOL
        self._pool[places] = np.nan
        self._pool[places, :num_positions] = fresh
        self._num_pooled += len(fresh)

    def learn(self, slots: np.ndarray, residuals: np.ndarray, information: np.ndarray) -> None:
        """Move offsets by what AcceptanceEstimate.observe returned [D], shrunk towards 0."""
        self._information[slots] = _FADE * self._information[slots] + information
        gradient = residuals - (1 - _FADE) * _OFFSET_PRECISION * self.offsets[slots]
        moved = self.offsets[slots] + gradient / (_OFFSET_PRECISION + self._information[slots])
        self.offsets[slots] = np.clip(moved, -_MAX_OFFSET, _MAX_OFFSET)

    def learn_outcomes(
        self,
        acceptance: AcceptanceEstimate,
        slots: np.ndarray,  # [D] -1 where a request is not remembered; one may stand there several times
        confidences: np.ndarray,  # [D, P]
        verified: np.ndarray,  # [D]
        accepted: np.ndarray,  # [D]
    ) -> np.ndarray:
        """Have the estimate and the offsets learn from verified drafts; the slots that this was about, each once."""
        kept = (verified > 0) & (slots >= 0)
        slots = slots[kept]
        if not len(slots):
            return slots
        moved = acceptance.observe(confidences[kept], self.offsets[slots], verified[kept], accepted[kept])
        of_request, place = np.unique(slots, return_inverse=True)
        self.learn(of_request, *(np.bincount(place, weights=values) for values in moved))
        return of_request

    def mark_drafted(self, slots: np.ndarray, step: int) -> None:
        """Requests [D] whose blocks were verified, of which nothing is kept but what `learn` made of it."""
        self._drafted[slots] = step

    def aged_offsets(self, slots: np.ndarray, step: int) -> np.ndarray:
        """[R] offsets, which return to 0 while a request does not draft."""
        return self.offsets[slots] * _FADE ** self.unseen_for(slots, step)

    def unseen_for(self, slots: np.ndarray, step: int) -> np.ndarray:
        """[R] steps since each request's last block; the step number itself where it had none."""
        return step - self._drafted[slots]

    def expected_survival(
        self,
        slots: np.ndarray,  # [R]
        num_samples: int,  # M, a divisor of NUM_RECENT
        estimate: AcceptanceEstimate,
        step: int,
    ) -> np.ndarray:
        """[R, M, K] survival of M equally likely next blocks of each request."""
        count = np.minimum(self._num_blocks[slots], NUM_RECENT)
        # Of a request with few blocks, some stand several times.
        index = np.arange(NUM_RECENT) % np.maximum(count, 1)[:, None]  # [R, NUM_RECENT]
        blocks = self._recent[slots[:, None], index]
        own = estimate.survival(blocks.reshape(-1, blocks.shape[2]), np.repeat(self.offsets[slots], NUM_RECENT))
        own = own.reshape(blocks.shape)
        own = np.take_along_axis(own, np.argsort(own.sum(2), axis=1)[:, :, None], axis=1)
        own = own.reshape(len(slots), num_samples, -1, own.shape[2]).mean(2)
        shared = self._shared_survival(num_samples, estimate)
        kept = count * _FADE ** np.maximum(step - 1 - self._drafted[slots], 0)
        weight = (kept / (kept + _SHARED_WEIGHT))[:, None, None]
        return weight * own + (1 - weight) * shared

    def _shared_survival(self, num_samples: int, estimate: AcceptanceEstimate) -> np.ndarray:
        """[M or 1, K] of the pool."""
        pool = self._pool[: min(self._num_pooled, _POOL)]
        if len(pool) == 0:
            return np.cumprod(estimate.rates)[None]
        survival = estimate.survival(pool, np.zeros(len(pool)))
        survival = survival[np.argsort(survival.sum(1))]
        if len(pool) < num_samples:
            return survival.mean(0, keepdims=True)
        return np.array([group.mean(0) for group in np.array_split(survival, num_samples)])
