"""The terms of a step's time: named quantities, each with a price in seconds that is never negative.

    target   step + request R + speculation [drafts?] + context C + attended A + tokens_k ramp_k(num_tokens)
    draft    draft [D > 0] + draft_context C_D + query_k ramp_k(query_rows) + head_k ramp_k(head_rows)
    context  stored + stored_row rows

ramp_k grows by one per token between two knots and is flat elsewhere, so that non-negative prices are exactly the
monotone piecewise-linear functions: nearly linear on a CPU, flat and then rising on a GPU.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from vllm_dflash.draft_length.steps import StepSize

#: Dense where a CPU's time bends. The last ramp has no end.
TOKEN_KNOTS: Final = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096], dtype=float
)
ROW_KNOTS: Final = np.array([1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], dtype=float)

_END: Final = 1e8  # no step has as many tokens
_POINTS: Final = {len(knots): np.append(knots, _END) for knots in (TOKEN_KNOTS, ROW_KNOTS)}
_WIDTHS: Final = {length: np.diff(points) for length, points in _POINTS.items()}

_TARGET: Final = ["step", "request", "speculation", "context", "attended", *(f"tokens_{k:.0f}" for k in TOKEN_KNOTS)]
_DRAFT: Final = ["draft", "draft_context", *(f"{kind}_{k:.0f}" for kind in ("query", "head") for k in ROW_KNOTS)]
NAMES: Final = (*_TARGET, *_DRAFT, "stored", "stored_row")
INDEX: Final = {name: i for i, name in enumerate(NAMES)}

TARGET_PART: Final = slice(0, len(_TARGET))
DRAFT_PART: Final = slice(len(_TARGET), len(_TARGET) + len(_DRAFT))
CONTEXT_PART: Final = slice(len(_TARGET) + len(_DRAFT), len(NAMES))

TOKENS: Final = slice(INDEX["tokens_1"], INDEX["tokens_1"] + len(TOKEN_KNOTS))
QUERIES: Final = slice(INDEX["query_1"], INDEX["query_1"] + len(ROW_KNOTS))
HEADS: Final = slice(INDEX["head_1"], INDEX["head_1"] + len(ROW_KNOTS))


def ramps(count: float, knots: np.ndarray) -> np.ndarray:
    """[len(knots)] how much of `count` lies above each knot and below the next."""
    return np.minimum(np.maximum(count - knots, 0), _WIDTHS[len(knots)])


def ramp_table(knots: np.ndarray, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points [k + 1] whose linear interpolation at any counts is ramps(count) @ prices."""
    seconds = np.zeros(len(knots) + 1)
    np.cumsum(_WIDTHS[len(knots)] * prices, out=seconds[1:])
    return _POINTS[len(knots)], seconds


def features(size: StepSize) -> np.ndarray:
    """[len(NAMES)] quantities of a step; times prices they give its seconds."""
    row = np.zeros(len(NAMES))
    row[INDEX["step"]] = 1
    row[INDEX["request"]] = size.num_requests
    row[INDEX["speculation"]] = size.num_verified > 0
    row[INDEX["context"]] = size.context_tokens
    row[INDEX["attended"]] = size.attended_tokens
    row[TOKENS] = ramps(size.num_tokens, TOKEN_KNOTS)
    if size.num_drafting:
        row[INDEX["draft"]] = 1
        row[INDEX["draft_context"]] = size.draft_context_tokens
        row[QUERIES] = ramps(size.query_rows, ROW_KNOTS)
        row[HEADS] = ramps(size.head_rows, ROW_KNOTS)
    if size.context_rows:
        row[INDEX["stored"]] = 1
        row[INDEX["stored_row"]] = size.context_rows
    return row
