"""Which requests are worth a draft pass, and how many of its positions, before any confidence is known.

The draft pass is paid before it tells anything, so it is decided from M likely survival vectors per request. At a rate
(tokens per second) every second costs that many tokens, and a request's expected gain is what its blocks bring beyond
the price of their verification, each block cut where it stops paying. Requests are taken in the order of gains less
their share of the draft pass; of all prefixes of that order, and of none, the one with the most tokens per second is
kept. Head rows are computed for a position as long as its gain over the batch pays for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_dflash.draft_length.cost import CostModel

#: The rate of the last step is a good start, and one or two rounds more settle it.
_MAX_ROUNDS = 3
_SETTLED = 0.01  # relative change of the rate


@dataclass(frozen=True)
class Prospect:
    """The best draft pass for a step."""

    drafting: np.ndarray  # [D] indices, increasing; empty if no request can draft
    num_positions: int  # P
    rate: float  # expected tokens per second with it
    plain_rate: float  # and without any draft pass

    def is_like(self, other: Prospect) -> bool:
        """The same requests, and positions but for one."""
        return np.array_equal(self.drafting, other.drafting) and abs(self.num_positions - other.num_positions) <= 1


def best_draft_pass(
    survival: np.ndarray,  # [R, M, K] of M equally likely blocks; 0 beyond a request's cap
    context_lens: np.ndarray,  # [R]
    cost: CostModel,
    draft_block_size: int | None,  # None: an anchor and as many masks as positions
    rate: float | None = None,  # tokens per second of the last step, where known
) -> Prospect:
    """The set of requests and the number of positions with the most expected tokens per second."""
    num_requests, num_samples, num_positions = survival.shape
    constant = cost.one_token_seconds(num_requests, float(context_lens.sum()))
    plain_seconds = constant + float(cost.token_seconds(np.array(num_requests)))
    plain_seconds += cost.storing_seconds(num_requests, is_plain=True)
    constant += cost.storing_seconds(num_requests, is_plain=False)
    plain_rate = num_requests / plain_seconds
    row_prices = cost.price("attended") * context_lens + cost.price("stored_row")
    best = Prospect(np.empty(0, dtype=np.int64), 0, plain_rate, plain_rate)
    is_possible = survival[:, :, 0].any(1)
    if not is_possible.any():
        return best
    fractions = np.arange(survival.size + 1) / num_samples
    shared_seconds = cost.token_seconds(num_requests + fractions)
    rate = max(rate or plain_rate, plain_rate)
    for _ in range(_MAX_ROUNDS):
        # Tokens in the step as they are expected: M blocks per request, each counting 1/M.
        worth = survival - rate * row_prices[:, None, None]
        ordered = np.sort(worth, axis=None)[::-1]
        total = np.concatenate([[0.0], np.cumsum(ordered)]) / num_samples - rate * shared_seconds
        count = int(np.argmax(total))
        if count == 0:
            # Nothing pays at this rate. A rate from a step with other requests may have been too high.
            if rate <= plain_rate:
                break
            rate = plain_rate
            continue
        threshold = max(float(ordered[count - 1]), 0.0)
        is_kept = (worth >= threshold) & (survival > 0)
        token_price = rate * float(shared_seconds[count] - shared_seconds[0]) / fractions[count]
        surplus = np.where(is_kept, worth - token_price, 0.0)  # [R, M, K]
        gains = surplus.sum((1, 2)) / num_samples - rate * cost.price("draft_context") * context_lens
        order = np.argsort(-np.where(is_possible, gains, -np.inf), kind="stable")[: np.count_nonzero(is_possible)]
        gaining = order[: max(np.count_nonzero(gains[order] > 0), 1)]
        head_positions = _positions_that_pay(
            np.where(is_kept, worth, 0.0)[gaining], is_kept[gaining], num_requests, cost, rate, draft_block_size
        )
        is_kept &= np.arange(num_positions) < head_positions
        gained = np.where(is_kept, survival, 0.0).sum((1, 2)) / num_samples  # [R] tokens
        verified = is_kept.sum((1, 2)) / num_samples  # [R]
        num_drafting = np.arange(1, len(order) + 1)
        tokens = num_requests + np.cumsum(gained[order])
        num_verified = np.cumsum(verified[order])
        seconds = constant + cost.price("speculation") + cost.token_seconds(num_requests + num_verified)
        seconds += np.cumsum(row_prices[order] * verified[order])
        contexts = np.cumsum(context_lens[order])
        seconds += cost.draft_pass_seconds(num_drafting, head_positions, draft_block_size, contexts)
        rates = tokens / seconds
        chosen = int(np.argmax(rates))
        if rates[chosen] > best.rate or not len(best.drafting):
            best = Prospect(np.sort(order[: chosen + 1]), head_positions, float(rates[chosen]), plain_rate)
        last, rate = rate, max(best.rate, plain_rate)
        if abs(rate - last) < _SETTLED * last:
            break
    return best


def _positions_that_pay(
    worth: np.ndarray,  # [D, M, K] expected tokens of each position of each likely block, less its own price
    is_kept: np.ndarray,  # [D, M, K] it would be verified
    num_requests: int,
    cost: CostModel,
    rate: float,
    draft_block_size: int | None,
) -> int:
    """How many positions bring the batch more than their rows cost, those through the target, through the LM head and,
    where blocks can be shorter, through the draft layers; at least 1.

    What a row costs the target depends on how many there are: with experts the first ones are dear, for each calls for
    experts of its own, and later ones nearly free.
    """
    num_drafting, num_samples, num_positions = worth.shape
    positions = np.arange(num_positions + 1)
    gained, verified = np.zeros(num_positions + 1), np.zeros(num_positions + 1)
    np.cumsum(worth.sum((0, 1)) / num_samples, out=gained[1:])
    np.cumsum(is_kept.sum((0, 1)) / num_samples, out=verified[1:])
    seconds = cost.draft_pass_seconds(np.array(num_drafting), positions, draft_block_size, np.array(0))
    seconds += cost.token_seconds(num_requests + verified)
    return max(int(np.argmax(gained - rate * seconds)), 1)
