"""Drafted tokens that are drawn instead of taken, and when that pays.

A drafted token t is accepted with probability min(1, p(t) / q(t)), where p is the target's distribution and q what t
was drawn from. Taking the drafter's most probable token (q puts all on it) is accepted with p(t); drawing from the
drafter's distribution q with the sum over tokens of min(p, q). Neither is always better: a flat q against a peaked p
loses by drawing, a q that resembles p wins. Output is the target's distribution either way.

q is what the drafter says of its `CANDIDATES` most probable tokens, under the request's temperature, min_p, top-k and
top-p, so nothing of the vocabulary's size is sorted, stored or carried to the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

#: Tokens that q is made of; what the LM head kernel returns at most (triton_kernels/draft_head.py).
CANDIDATES = 32

#: Steps between two that are measured, and how much better the other way must be to change over.
_MEASURE_EVERY, _ADVANTAGE = 8, 1.02
_MIN_ROWS, _DECAY = 30, 0.99  # rows per position before it counts; weight of what was known, per measured row


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request, as far as its drafts follow them."""

    temperature: float
    top_k: int = 0  # 0 or less = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    @property
    def bucket(self) -> float:
        """Requests with about this temperature share what is learnt."""
        return round(self.temperature * 4) / 4


@dataclass(frozen=True)
class Candidates:
    """The drafter's most probable tokens of some rows; C = CANDIDATES or the vocabulary, if that is smaller."""

    logits: torch.Tensor  # [N, C] float32, falling
    tokens: torch.Tensor  # [N, C] int64, ids of the target's vocabulary
    log_sum_exp: torch.Tensor  # [N] float32, over the whole draft vocabulary

    @property
    def confidences(self) -> torch.Tensor:
        """[N] probability of the first, at temperature 1."""
        return (self.logits[:, 0] - self.log_sum_exp).exp()


@dataclass(frozen=True)
class DraftDistributions:
    """What the drafted tokens of a request came from; P positions."""

    drafted: torch.Tensor  # [P] int64
    tokens: torch.Tensor  # [P, C] int64
    probs: torch.Tensor  # [P, C] float32, each row sums to 1
    is_drawn: bool  # False: the most probable token was taken, and q is only kept to be measured


def draft_probs(logits: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """q of each row [N, C], for logits [N, C] that fall and one setting per row with a temperature above 0."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(logits.device, non_blocking=True)[:, None]

    rank = torch.arange(logits.shape[1], device=logits.device)
    probs = (logits / column([s.temperature for s in settings])).softmax(-1)
    kept = probs >= column([s.min_p for s in settings]) * probs[:, :1]
    kept &= rank < column([s.top_k if s.top_k > 0 else logits.shape[1] for s in settings])
    probs = probs * kept
    probs /= probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = probs * (before < column([s.top_p for s in settings]))
    return probs / probs.sum(-1, keepdim=True)


def draw(probs: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    """Index [N] of the candidate drawn in each row of [N, C].

    A seeded request's numbers depend on its seed and the row's position in the text alone, so the same text comes out
    beside any neighbours. A position may be drafted again; what was drawn for it before was never looked at then.
    """
    noise = torch.empty(probs.shape, dtype=torch.float32)
    noise.exponential_()
    for row, (setting, position) in enumerate(zip(settings, positions)):
        if setting.seed is not None:
            generator = torch.Generator().manual_seed(_mixed(setting.seed, position))
            noise[row].exponential_(generator=generator)
    return (probs / noise.to(probs.device, non_blocking=True)).argmax(-1)


def _mixed(seed: int, position: int) -> int:
    """A seed of its own for each position, unrelated to the request's generator, which draws for the target."""
    mixed = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & (2**64 - 1)
    mixed ^= mixed >> 32
    return (mixed * 0xD6E8FEB86659FD93 & (2**64 - 1)) >> 1


class DraftSampling:
    """Which requests' drafts are drawn, and the distributions of those that wait to be verified.

    Args:
        is_drawn: drafts of sampled requests are drawn, to begin with.
        chooses: that changes to what is measured to be better. Requests with a seed keep what they began with, or
            their text would depend on others.
    """

    def __init__(self, is_drawn: bool, chooses: bool) -> None:
        self.is_drawn, self.chooses = is_drawn, chooses
        self._records: dict[float, AcceptanceRecord] = {}
        self._kept: dict[str, DraftDistributions] = {}
        self._step = 0

    def begin_step(self, settings: Sequence[Sampling]) -> tuple[np.ndarray, bool]:
        """Whose drafts are drawn in this step [D] bool, and whether distributions of the others are kept too."""
        self._step += 1
        draws = np.array([s.temperature > 0 and self.draws(s) for s in settings], dtype=bool)
        can_learn = self.chooses and any(s.temperature > 0 and s.seed is None for s in settings)
        return draws, can_learn and self._step % _MEASURE_EVERY == 0

    def draws(self, setting: Sampling) -> bool:
        """Are drafts of such a request drawn?"""
        if not self.chooses or setting.seed is not None:
            return self.is_drawn
        record = self._records.setdefault(setting.bucket, AcceptanceRecord(self.is_drawn))
        return record.draws_better

    def propose(
        self,
        candidates: Candidates,  # rows of request 0 at all P positions, then of request 1, ...
        request_ids: Sequence[str],  # D
        settings: Sequence[Sampling],  # D
        anchor_positions: np.ndarray,  # [D]
        draws: np.ndarray,  # [D] bool
        keeps_all: bool,
    ) -> torch.Tensor:
        """Drafted tokens [D * P]; distributions are kept until `keep_only` or the request's next drafts."""
        num_positions = len(candidates.tokens) // len(request_ids)
        drafted = candidates.tokens[:, 0].clone()
        self.drop(request_ids)
        wanted = draws | (keeps_all & np.array([s.temperature > 0 for s in settings]))
        chosen = np.flatnonzero(wanted)
        if len(chosen) == 0:
            return drafted
        rows = torch.from_numpy((chosen[:, None] * num_positions + np.arange(num_positions)).reshape(-1))
        rows = rows.to(drafted.device, non_blocking=True)
        by_row = [settings[i] for i in chosen for _ in range(num_positions)]
        positions = [int(anchor_positions[i]) + 1 + slot for i in chosen for slot in range(num_positions)]
        probs, tokens = draft_probs(candidates.logits[rows], by_row), candidates.tokens[rows]
        drawn = tokens.gather(1, draw(probs, by_row, positions)[:, None])[:, 0]
        is_drawn = torch.from_numpy(draws[chosen].repeat(num_positions)).to(drafted.device, non_blocking=True)
        drafted[rows] = torch.where(is_drawn, drawn, drafted[rows])
        for place, request in enumerate(chosen):
            part = slice(place * num_positions, (place + 1) * num_positions)
            self._kept[request_ids[request]] = DraftDistributions(
                drafted[rows[part]], tokens[part], probs[part], bool(draws[request])
            )
        return drafted

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forget the distributions of requests that have new drafts."""
        for request in request_ids:
            self._kept.pop(request, None)

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Forget requests that are gone."""
        for request in [kept for kept in self._kept if kept not in request_ids]:
            del self._kept[request]

    def verified_probs(
        self,
        request_ids: Sequence[str],
        num_drafts: Sequence[int],
        drafts: torch.Tensor,  # [rows] integers, request by request
        vocab_size: int,
    ) -> torch.Tensor | None:
        """q [rows, vocabulary] of the drafts that are verified now; None where each was simply taken.

        A token that was taken, or is not the one that was drawn (a placeholder of the scheduler), has all of its q.
        """
        parts = []
        for request, count in zip(request_ids, num_drafts):
            kept = self._kept.get(request)
            is_kept = kept is not None and kept.is_drawn
            parts.append(kept if is_kept and count <= len(kept.drafted) else None)  # type: ignore[union-attr]
        if not any(part is not None and count for part, count in zip(parts, num_drafts)):
            return None
        probs = torch.zeros(len(drafts), vocab_size, device=drafts.device)
        is_drawn = torch.zeros(len(drafts), dtype=torch.bool, device=drafts.device)
        first = 0
        for part, count in zip(parts, num_drafts):
            rows = slice(first, first + count)
            first += count
            if part is not None and count:
                is_drawn[rows] = part.drafted[:count] == drafts[rows]
                probs[rows].scatter_(1, part.tokens[:count], part.probs[:count])
        probs *= is_drawn[:, None]
        taken = (~is_drawn).to(probs.dtype)
        return probs.scatter_add_(1, drafts.long()[:, None], taken[:, None])

    def wants(self, request_ids: Sequence[str]) -> bool:
        """Is there anything to learn from the verification of these requests' drafts?"""
        return self.chooses and any(request in self._kept for request in request_ids)

    def learn(
        self,
        request_ids: Sequence[str],
        settings: Sequence[Sampling],
        num_drafts: Sequence[int],
        num_accepted: Sequence[int],
        target_probs: torch.Tensor,  # [rows, vocabulary]: p of each verified row
    ) -> None:
        """Note what either way would have been accepted with, at every position that was reached."""
        first = 0
        for request, setting, count, accepted in zip(request_ids, settings, num_drafts, num_accepted):
            kept, reached = self._kept.get(request), min(count, accepted + 1)
            rows = target_probs[first : first + reached]
            first += count
            if kept is None or setting.seed is not None or reached == 0 or count > len(kept.drafted):
                continue
            p = rows.gather(1, kept.tokens[:reached])
            drawn = torch.minimum(p, kept.probs[:reached]).sum(-1).tolist()
            taken = p[:, 0].tolist()
            record = self._records.setdefault(setting.bucket, AcceptanceRecord(self.is_drawn))
            for position, rates in enumerate(zip(taken, drawn)):
                record.add(position, *rates)


class AcceptanceRecord:
    """Probability of acceptance per position, for tokens that are taken and tokens that are drawn."""

    def __init__(self, draws_better: bool) -> None:
        self.draws_better = draws_better
        self._rates: list[tuple[float, float]] = []
        self._counts: list[int] = []

    def add(self, position: int, taken: float, drawn: float) -> None:
        """Note one row; positions come in order, so each is known before the next."""
        if position == len(self._counts):
            self._rates.append((taken, drawn))
            self._counts.append(0)
        count = self._counts[position] = self._counts[position] + 1
        weight = max(1 - _DECAY, 1 / count)
        self._rates[position] = tuple(  # type: ignore[assignment]
            old + weight * (new - old) for old, new in zip(self._rates[position], (taken, drawn))
        )
        if self._counts[0] >= _MIN_ROWS:
            taken_tokens, drawn_tokens = self.expected_tokens()
            now, other = (drawn_tokens, taken_tokens) if self.draws_better else (taken_tokens, drawn_tokens)
            self.draws_better ^= other > _ADVANTAGE * now

    def expected_tokens(self) -> tuple[float, float]:
        """Expected accepted tokens of a block, over positions with enough rows: taken, drawn."""
        known = [rates for rates, count in zip(self._rates, self._counts) if count >= _MIN_ROWS]
        products = np.cumprod(np.array(known or [(0.0, 0.0)]), axis=0)
        taken, drawn = products.sum(0)
        return float(taken), float(drawn)
