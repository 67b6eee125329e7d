"""The distribution that a request's next token must have, written in NumPy from the target's logits.

Steps and their order are those of vLLM's sampler without speculation (v1/sample/sampler.py):

    logit_bias -> repetition, frequency, presence penalty -> temperature -> min_p -> top_k -> top_p

It shares no code with vLLM or with the rest of this package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters by vLLM's names; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As arguments of vLLM's SamplingParams."""
        settings = asdict(self)
        return settings if self.logit_bias else {key: settings[key] for key in settings if key != "logit_bias"}


def next_token_probabilities(
    logits: Floats,  # [V] float64, of the target
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],  # of the answer so far
    sampling: Sampling,
    rounding: float = 0.0,
) -> Floats:  # [V] float64, sums to 1
    """Probability of each token to follow.

    Args:
        rounding: every cut (min_p, top_k, top_p) is this much more generous, as a fraction; negative: stricter, and
            then perhaps nothing is left (all 0). Tokens kept by the generous and not by the strict cut are at the
            border, where rounding decides; the rest keeps its proportions whatever becomes of them.
    """
    scores = _penalised(logits, prompt_ids, output_ids, sampling)
    if sampling.temperature == 0:
        chosen = np.zeros_like(scores)
        chosen[int(np.argmax(scores))] = 1.0
        return chosen
    scores = scores / sampling.temperature
    if sampling.min_p > 0:
        likely = _softmax(scores)
        scores = np.where(likely >= likely.max() * sampling.min_p * (1 - rounding), scores, -np.inf)
    if 0 < sampling.top_k < len(scores):
        scores = _top_k(scores, sampling.top_k, rounding)
    if sampling.top_p < 1 and np.isfinite(scores).any():
        scores = _top_p(scores, min(sampling.top_p * (1 + rounding), 1.0))
    return _softmax(scores) if np.isfinite(scores).any() else np.zeros_like(scores)


def _penalised(logits: Floats, prompt_ids: Sequence[int], output_ids: Sequence[int], sampling: Sampling) -> Floats:
    scores = np.array(logits, dtype=np.float64)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in set(prompt_ids) | set(output_ids):
        # A penalty makes a token less likely whatever the sign of its logit.
        scores[token] *= 1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
    for token, count in Counter(output_ids).items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def _top_k(scores: Floats, top_k: int, rounding: float) -> Floats:
    """Keep the top_k likeliest tokens, and those equal to the last of them."""
    ranked = np.sort(scores)[::-1]
    is_kept = scores > ranked[top_k] - rounding if rounding < 0 else scores >= ranked[top_k - 1] - rounding
    return np.where(is_kept, scores, -np.inf)


def _top_p(scores: Floats, top_p: float) -> Floats:
    """Keep the likeliest tokens up to the one with which their probabilities reach top_p."""
    order = np.argsort(-scores, kind="stable")
    reached = np.cumsum(_softmax(scores)[order])
    num_kept = int(np.searchsorted(reached, top_p)) + 1
    kept = np.full_like(scores, -np.inf)
    kept[order[:num_kept]] = scores[order[:num_kept]]
    return kept


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)
