"""Verify lengths that maximise expected tokens per second of a step.

With survival S[r, j], the probability that drafted tokens 1..j of request r are all accepted, a step in which request r
verifies l_r of them gains

    tokens  = R + sum_r sum_{j <= l_r} S[r, j]              every request gains its bonus token
    seconds = seconds[n] + sum_r l_r * token_prices[r]      n = sum_r l_r

S does not increase with j, so for equal prices the best n tokens are the n largest S of the batch, and these are a
prefix of every request's block: one sort and one scan over n are exact. Prices differ where contexts do. Then, for a
given rate (tokens per second), the best lengths maximise tokens - rate * seconds, and the same sort and scan over S[r,
j] - rate * token_prices[r] are exact; Dinkelbach's iteration over the rate ends at the best ratio.

Only distributions may be looked at here, never the value of a sampled draft token: whether a token is verified would
then depend on which it is, and the output would no longer be the target's. (Maximum probabilities of later positions
may be looked at because all positions of a DFlash block are predicted from the same prefix, not from each other's
samples.)
"""

from __future__ import annotations

import numpy as np

#: Dinkelbach's iteration takes 2 rounds or 3; each of them only improves the ratio.
_MAX_ROUNDS = 10


def choose_lengths(
    survival: np.ndarray,  # [R, K] in [0, 1], not increasing along a row; 0 where a request may not verify
    seconds: np.ndarray,  # [R * K + 1] > 0, not decreasing: a step that verifies n drafted tokens
    token_prices: np.ndarray | None = None,  # [R] further seconds per verified token of a request
    base_tokens: float | None = None,  # tokens that the step gains without these drafts; default R
) -> np.ndarray:
    """[R] int64, how many drafted tokens each request verifies.

    Raises:
        ValueError: shapes do not fit.
    """
    num_requests, num_positions = survival.shape
    if seconds.shape != (survival.size + 1,) or (token_prices is not None and token_prices.shape != (num_requests,)):
        raise ValueError(
            f"{survival.size + 1} step times and {num_requests} prices belong to survival of shape {survival.shape},"
            f" but here are {seconds.shape} and {None if token_prices is None else token_prices.shape}."
        )
    base = float(num_requests) if base_tokens is None else base_tokens
    if survival.size == 0:
        return np.zeros(num_requests, dtype=np.int64)
    mean_price = 0.0 if token_prices is None else float(token_prices.mean())
    lengths, rate = _by_one_scan(survival, seconds, mean_price, base)
    if token_prices is None or (token_prices == token_prices[0]).all():
        return lengths
    # What is best at the mean price is a good start, so that one round finds the best and another one confirms it.
    rate = _rate(survival, lengths, seconds, token_prices, base)
    for _ in range(_MAX_ROUNDS):
        worth = survival - rate * token_prices[:, None]
        ordered = np.sort(worth, axis=None)[::-1]
        gain = np.cumsum(ordered) - rate * seconds[1:]  # of 1, 2, ... tokens
        best = int(gain.argmax())
        better = _largest(worth, ordered, best + 1 if gain[best] > -rate * seconds[0] else 0)
        better_rate = _rate(survival, better, seconds, token_prices, base)
        if better_rate <= rate * (1 + 1e-12):
            break
        lengths, rate = better, better_rate
    return lengths


def _by_one_scan(
    survival: np.ndarray, seconds: np.ndarray, token_price: float, base: float
) -> tuple[np.ndarray, float]:
    """Lengths for one price of all tokens, and their rate."""
    ordered = np.sort(survival, axis=None)[::-1]
    tokens = np.empty(len(seconds))
    tokens[0] = base
    np.cumsum(ordered, out=tokens[1:])
    tokens[1:] += base
    if token_price:
        seconds = seconds + token_price * np.arange(len(seconds))
    rates = tokens / seconds
    # The first of equal rates: a token that cannot be accepted is not verified, even where time is flat.
    best = int(rates.argmax())
    return _largest(survival, ordered, best), float(rates[best])


def _rate(
    survival: np.ndarray, lengths: np.ndarray, seconds: np.ndarray, token_prices: np.ndarray, base: float
) -> float:
    """Tokens per second of given lengths."""
    is_verified = np.arange(survival.shape[1]) < lengths[:, None]
    tokens = base + float(np.vdot(survival, is_verified))
    return tokens / float(seconds[lengths.sum()] + token_prices @ lengths)


def _largest(worth: np.ndarray, ordered: np.ndarray, count: int) -> np.ndarray:
    """[R] how many of the `count` largest entries of `worth` [R, K] each row holds; of equal ones the first rows'."""
    if count == 0:
        return np.zeros(len(worth), dtype=np.int64)
    threshold = ordered[count - 1]
    held = (worth >= threshold).sum(1)
    if held.sum() == count:
        return held
    above = (worth > threshold).sum(1)
    equal = held - above
    free = count - above.sum()
    return above + np.clip(free - (np.cumsum(equal) - equal), 0, equal)
