"""Seconds of a step from what it contains: first from a start-up profile, then corrected by every timed step.

Prices of the terms (terms.py) are kept as exp(log price), so they stay positive whatever is observed. An observation y
of a step with predicted seconds p = sum of shares is, to first order in the log prices z,

    log y = log p + sum_i share_i / p * (z_i' - z_i)          the weights share_i / p sum to 1

which a Kalman filter takes in. Two kinds of drift are expected: all prices together (another program on the machine, a
lower clock) and each by itself (the profile was coarse there). Innovations beyond a few deviations are clipped: a pause
of the machine moves prices by no more than any late step does. The deviation itself is tracked by signs, so that
outliers count once, whatever their size, while a real change widens it within some steps and is then followed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from vllm_dflash.draft_length.guess import guessed_prices, ramp_correlations
from vllm_dflash.draft_length.nonnegative import nonnegative_least_squares
from vllm_dflash.draft_length.steps import BACKLOG_ROWS, StepSize, TimedStep
from vllm_dflash.draft_length.terms import (
    CONTEXT_PART,
    DRAFT_PART,
    HEADS,
    INDEX,
    NAMES,
    QUERIES,
    ROW_KNOTS,
    TARGET_PART,
    TOKEN_KNOTS,
    TOKENS,
    features,
    ramp_table,
)

#: Raised when the terms or their meaning change: a cached file of another version is refused.
_FORMAT = 1

#: Pull of a ramp's price towards its neighbour's, against a measurement's relative error of 1.
_SMOOTHNESS = 0.02
#: Pull of a price towards its guess.
_GUESS_WEIGHT = 1e-3
#: A price that the profile found to be 0 keeps this part of a step's time, or it could never grow again.
_FLOOR = 5e-4

#: What is not known of log prices at first: all together, and each by itself. A profile of bare passes does not contain
#: overheads (scheduling, sampling, accepting), and of guessed prices it says nothing.
_COMMON_DEVIATION, _OWN_DEVIATION, _OVERHEAD_DEVIATION, _GUESSED_DEVIATION = 0.3, 0.1, 0.4, 1.0
_OVERHEAD = ("step", "request", "speculation")
#: Deviations that are added per step. The scale may follow noise, because decisions depend on ratios of prices only.
_COMMON_DRIFT, _OWN_DRIFT = 0.03, 0.004
_MAX_VARIANCE = 1.5  # of what is not observed for long
_CLIP = 2.5  # deviations beyond which an innovation counts no more
_MIN_NOISE, _MAX_NOISE = 0.02, 0.5  # deviation of log seconds
_NOISE_STEP = 0.05  # of its logarithm per observation
_NORMAL_MEDIAN = 0.6745  # median of |x| for x ~ N(0, 1)

_PARTS = {"whole": slice(0, len(NAMES)), "target": TARGET_PART, "draft": DRAFT_PART, "context": CONTEXT_PART}


class CostModel:
    """Prices of the terms of a step, with what is not known about them.

    Args:
        prices: [len(NAMES)] seconds per unit of each term, all > 0.
        guessed: names of the terms whose price was not measured.
        scale_is_known: False where no price was.
    """

    def __init__(self, prices: np.ndarray, guessed: Collection[str] = (), scale_is_known: bool = True) -> None:
        if prices.shape != (len(NAMES),) or not (np.isfinite(prices) & (prices > 0)).all():
            raise ValueError(f"a cost model needs {len(NAMES)} positive prices, one for each of {', '.join(NAMES)}.")
        self._log_prices, self._guessed = np.log(prices), tuple(guessed)
        own = np.full(len(NAMES), _OWN_DEVIATION)
        own[[INDEX[name] for name in _OVERHEAD]] = _OVERHEAD_DEVIATION
        own[[INDEX[name] for name in guessed]] = _GUESSED_DEVIATION
        self._covariance = np.outer(own, own) * ramp_correlations(guessed)
        self._covariance += (_COMMON_DEVIATION if scale_is_known else 3.0) ** 2
        self._drift = np.eye(len(NAMES)) * _OWN_DRIFT**2 + _COMMON_DRIFT**2
        self._noise = dict.fromkeys(_PARTS, 0.1)
        self._refresh()

    @classmethod
    def unprofiled(cls, seconds: float = 0.02, is_flat: bool = False) -> CostModel:
        """A guess of usual proportions; the first timed steps set its scale.

        Args:
            seconds: of a plain step.
            is_flat: tokens beyond the first cost little, as on a GPU.
        """
        return cls(guessed_prices(seconds, is_flat), NAMES, scale_is_known=False)

    @classmethod
    def from_profile(cls, steps: Sequence[TimedStep]) -> CostModel:
        """Prices that explain timed steps best, in relative error.

        Args:
            steps: with and without a draft pass; several token counts, contexts and head rows, or these terms keep
                guessed prices. Parts that were timed by themselves are fitted by themselves.

        Raises:
            ValueError: no step has a draft pass, none is without, or a time is not positive.
        """
        if not any(s.size.num_drafting for s in steps) or all(s.size.num_drafting for s in steps):
            raise ValueError(
                f"a profile needs steps with and without a draft pass; of these {len(steps)}"
                f" {sum(s.size.num_drafting > 0 for s in steps)} have one."
            )
        rows, seconds = [], []
        for step in steps:
            for part, measured in _timed_parts(step):
                if not (np.isfinite(measured) and measured > 0):
                    raise ValueError(f"times of a profile are positive, but here is {measured} s of {step.size}.")
                kept = np.zeros(len(NAMES))
                kept[_PARTS[part]] = features(step.size)[_PARTS[part]]
                rows.append(kept / measured)
                seconds.append(measured)
        plain = min((step.size.num_tokens, step.seconds) for step in steps if not step.size.num_drafting)[1]
        matrix, guess = np.array(rows), guessed_prices(plain)
        # Where terms always went together, the guess says in which proportions.
        pulls = np.concatenate([_GUESS_WEIGHT * np.diag(1 / guess), _smoothness_rows(plain)])
        wanted = np.zeros(len(pulls))
        wanted[: len(guess)] = _GUESS_WEIGHT
        unscaled = nonnegative_least_squares(
            np.concatenate([matrix, pulls]) * guess, np.concatenate([np.ones(len(matrix)), wanted])
        )
        largest = np.maximum((matrix * np.array(seconds)[:, None]).max(0), 1)
        is_ramp = np.array([name.rpartition("_")[2].isdigit() for name in NAMES])
        guessed = [name for name, is_seen in zip(NAMES, matrix.any(0) | is_ramp) if not is_seen]
        floor = np.where(matrix.any(0), _FLOOR * plain / largest, 0.0)
        return cls(np.maximum(unscaled * guess, floor), guessed)

    def seconds(self, size: StepSize) -> float:
        """Predicted seconds of a step."""
        return float(features(size) @ self._prices)

    @property
    def noise(self) -> float:
        """Deviation of log(seconds) of whole steps from what was predicted."""
        return self._noise["whole"]

    def compare(self, sizes: Sequence[StepSize], base: int) -> tuple[np.ndarray, np.ndarray]:
        """Predicted seconds of steps, and how well their ratios are known.

        Args:
            sizes: A steps.
            base: index of the one that the others are compared with.

        Returns:
            [A] seconds, and [A] standard deviations of log(seconds / seconds of the base). What all prices have in
            common cancels there.
        """
        shares = np.array([features(size) for size in sizes]) * self._prices
        seconds = shares.sum(1)
        shares /= seconds[:, None]
        shares -= shares[base].copy()
        variances = np.einsum("ai,ij,aj->a", shares, self._covariance, shares)
        return seconds, np.sqrt(np.maximum(variances, 0.0))

    def draft_pass_seconds(
        self,
        num_drafting: np.ndarray,  # any shape
        num_positions: int | np.ndarray,  # shapes of all three broadcast
        draft_block_size: int | None,  # None: an anchor and as many masks as positions
        draft_context_tokens: np.ndarray,
    ) -> np.ndarray:
        """Seconds of draft passes of several sizes; 0 where no request drafts."""
        prices, block_size = self._prices, num_positions + 1 if draft_block_size is None else draft_block_size
        rows = num_drafting * block_size
        seconds = prices[INDEX["draft"]] + prices[INDEX["draft_context"]] * draft_context_tokens
        seconds = seconds + np.interp(rows, *self._query_table)
        seconds = seconds + np.interp(num_drafting * num_positions, *self._head_table)
        return np.where(num_drafting > 0, seconds, 0.0)

    def one_token_seconds(self, num_requests: int, context_tokens: float) -> float:
        """Seconds of a plain step, less `token_seconds` of its rows and `storing_seconds` of their context K/V."""
        seconds = self.price("step") + self.price("request") * num_requests
        return seconds + (self.price("context") + self.price("attended")) * context_tokens

    def storing_seconds(self, num_requests: int, is_plain: bool) -> float:
        """Seconds of writing context K/V of one row per request; plain steps share a pass among several of them."""
        passes = min(num_requests / BACKLOG_ROWS, 1.0) if is_plain else 1.0
        return self.price("stored") * passes + self.price("stored_row") * num_requests

    def token_seconds(self, counts: np.ndarray) -> np.ndarray:
        """Seconds that tokens beyond the first add to a target pass, context aside; counts need not be whole."""
        return np.interp(counts, *self._token_table)

    def price(self, name: str) -> float:
        """Seconds per unit of one term."""
        return float(self._prices[INDEX[name]])

    def observe(self, step: TimedStep) -> float:
        """Correct prices by a timed step, and return the seconds that were predicted before.

        Times that are not positive are ignored: clocks of two devices may disagree by more than a short part takes.
        """
        row = features(step.size)
        predicted = float(row @ self._prices)
        self._covariance += self._drift
        deviations = np.sqrt(np.diag(self._covariance) / _MAX_VARIANCE)
        if deviations.max() > 1:
            shrunk = 1 / np.maximum(deviations, 1)
            self._covariance *= shrunk[:, None] * shrunk
        for part, measured in _timed_parts(step):
            if 0 < measured < math.inf:
                self._correct(part, row, measured)
        self._refresh()
        return predicted

    def _correct(self, part: str, row: np.ndarray, measured: float) -> None:
        where = _PARTS[part]
        # Prices of before this step: its parts are corrected side by side.
        shares = row[where] * self._prices[where]
        predicted = float(shares.sum())
        if predicted <= 0:
            return
        shares /= predicted
        spread = self._covariance[:, where] @ shares
        uncertainty, noise = float(shares @ spread[where]), self._noise[part]
        # While the scale is unknown a large innovation is no outlier.
        variance = uncertainty + noise**2
        innovation, deviation = math.log(measured / predicted), math.sqrt(variance)
        clipped = max(-_CLIP * deviation, min(_CLIP * deviation, innovation))
        self._log_prices += spread * (clipped / variance)
        self._covariance -= spread[:, None] * (spread / variance)
        is_wide = abs(innovation) > _NORMAL_MEDIAN * deviation
        noise *= math.exp(_NOISE_STEP if is_wide else -_NOISE_STEP)
        self._noise[part] = max(_MIN_NOISE, min(_MAX_NOISE, noise))

    def _refresh(self) -> None:
        self._prices = np.exp(self._log_prices)
        self._token_table = ramp_table(TOKEN_KNOTS, self._prices[TOKENS])
        self._query_table = ramp_table(ROW_KNOTS, self._prices[QUERIES])
        self._head_table = ramp_table(ROW_KNOTS, self._prices[HEADS])

    def to_json(self) -> str:
        """For the cache of a start-up profile; uncertainty starts anew after reading."""
        return json.dumps(
            {"format": _FORMAT, "prices": dict(zip(NAMES, self._prices.tolist()))} | {"guessed": self._guessed},
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The inverse of `to_json`.

        Raises:
            ValueError: not JSON, of another format, or with other terms than this version's.
        """
        try:
            values: Any = json.loads(text)
            found, prices, guessed = values["format"], values["prices"], values["guessed"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"not a cost model: {error!r}; profile anew.") from error
        if found != _FORMAT or set(prices) != set(NAMES) or not set(guessed) <= set(NAMES):
            raise ValueError(
                f"this cost model has format {found}, this version writes {_FORMAT}, or its terms differ; profile anew."
            )
        return cls(np.array([prices[name] for name in NAMES], dtype=float), guessed)


def _timed_parts(step: TimedStep) -> list[tuple[str, float]]:
    """Parts of a step with their seconds, or the whole; parts that did not happen are left out."""
    target = step.target_seconds
    if target is None or step.draft_seconds is None or step.context_seconds is None:
        return [("whole", step.seconds)]
    parts = [("target", target)]
    if step.size.num_drafting:
        parts.append(("draft", step.draft_seconds))
    if step.size.context_rows:
        parts.append(("context", step.context_seconds))
    return parts


def _smoothness_rows(seconds: float) -> np.ndarray:
    """[n, len(NAMES)] rows of the least-squares problem: prices of neighbouring ramps are alike where nothing tells."""
    rows = []
    for part, knots in ((TOKENS, TOKEN_KNOTS), (QUERIES, ROW_KNOTS), (HEADS, ROW_KNOTS)):
        for k in range(1, len(knots)):
            row = np.zeros(len(NAMES))
            row[part.start + k], row[part.start + k - 1] = 1, -1
            rows.append(row * _SMOOTHNESS * knots[k] / seconds)
    return np.array(rows)
