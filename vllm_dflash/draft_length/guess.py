"""Prices of a step's terms before anything is measured, as parts of the seconds of a plain step with one token."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from vllm_dflash.draft_length.terms import HEADS, INDEX, NAMES, QUERIES, TOKENS

_PARTS = {"step": 0.9, "request": 0.01, "speculation": 0.01, "context": 1e-5, "attended": 1e-6, "draft": 0.1}
_PARTS |= {"draft_context": 1e-6, "stored": 0.005, "stored_row": 5e-4}
_TOKEN, _ROW = 0.05, 0.003
#: What differs where a pass over some tokens takes about as long as one over a single token: weights are read once.
_FLAT_PARTS = {"request": 0.002, "draft": 0.15}
_FLAT_TOKEN, _FLAT_ROW = 0.002, 0.0003
#: Between logarithms of guessed prices of neighbouring ramps: who finds one cheap expects the next to be cheap.
_RAMP_CORRELATION = 0.8


def guessed_prices(seconds: float, is_flat: bool = False) -> np.ndarray:
    """[len(NAMES)] seconds per unit.

    Args:
        seconds: of a plain step with one token.
        is_flat: further tokens cost little, as on a GPU.
    """
    prices = np.empty(len(NAMES))
    prices[TOKENS] = _FLAT_TOKEN if is_flat else _TOKEN
    prices[QUERIES] = prices[HEADS] = _FLAT_ROW if is_flat else _ROW
    for name, part in (_PARTS | (_FLAT_PARTS if is_flat else {})).items():
        prices[INDEX[name]] = part
    return prices * seconds


def ramp_correlations(guessed: Collection[str]) -> np.ndarray:
    """[len(NAMES), len(NAMES)] of what is not known of each log price by itself."""
    correlations = np.eye(len(NAMES))
    is_guessed = np.isin(NAMES, list(guessed))
    for part in (TOKENS, QUERIES, HEADS):
        index = np.flatnonzero(is_guessed[part]) + part.start
        correlations[np.ix_(index, index)] = _RAMP_CORRELATION ** np.abs(index[:, None] - index)
    return correlations
