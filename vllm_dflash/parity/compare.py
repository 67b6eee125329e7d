"""Where two greedy answers differ, and whether that is a tie of two tokens or a bug. Pure functions.

A target computes its logits with rounding errors that depend on how many rows it computes at once, so two tokens whose
logits are closer than these errors may come out in either order: a tie. After it the two answers go on from different
text, and nothing that follows can be compared. Any other difference is a bug. What decides is the target itself, which
a plain engine asks once more behind the common prefix: both tokens must be within epsilon of the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

#: Largest distance of two log-probabilities that rounding explains, by dtype of the target.
#: bfloat16, float16: two units in the last place of a logit between 16 and 32, as large language models have them;
#: the head's result is rounded to such units, which no later precision brings back.
#: float32: a unit there is 2e-6; sums over thousands of terms, layer after layer, taken in another order, differ by
#: 1e-5 to 1e-4. 1e-3 leaves room, and a wrong row, position or cache slot changes logits by far more.
EPSILON = {"bfloat16": 0.25, "float16": 0.03125, "float32": 1e-3}

Label = Literal["tie within epsilon", "BUG"]


@dataclass(frozen=True)
class Difference:
    """The first place at which an answer with drafts is not the plain one."""

    prompt_id: str
    position: int  # in the answer, from 0
    plain_token: int | None  # None: the plain answer ends before it
    dflash_token: int | None


@dataclass(frozen=True)
class Verdict:
    """What a difference is."""

    difference: Difference
    label: Label
    reason: str
    logprobs: dict[int, float]  # of both tokens and the target's best, by a plain engine after the common prefix
    gap: float | None  # of the lesser of the two behind the best, in nats
    gap_in_plain_run: float | None = None  # plain token before the other, as recorded in the run; None: not recorded
    gap_in_dflash_run: float | None = None  # other token before the plain one


def first_difference(prompt_id: str, plain: Sequence[int], dflash: Sequence[int]) -> Difference | None:
    """The first place at which two answers (token ids) are not the same; None where there is none."""
    for position, (a, b) in enumerate(zip(plain, dflash)):
        if a != b:
            return Difference(prompt_id, position, a, b)
    if len(plain) == len(dflash):
        return None
    position = min(len(plain), len(dflash))
    longer, is_plain = (plain, True) if len(plain) > len(dflash) else (dflash, False)
    token = longer[position]
    return Difference(prompt_id, position, token if is_plain else None, None if is_plain else token)


def num_compared(difference: Difference | None, plain: Sequence[int]) -> int:
    """Tokens of an answer whose equality was looked at, the differing one included."""
    return len(plain) if difference is None else difference.position + 1


def judge(
    difference: Difference,
    logprobs: Mapping[int, float],
    epsilon: float,
    in_plain_run: Mapping[int, float] | None = None,
    in_dflash_run: Mapping[int, float] | None = None,
) -> Verdict:
    """Label a difference.

    Args:
        logprobs: log-probabilities after the common prefix, of both tokens and of the target's best.
        epsilon: largest distance that rounding explains, in nats.
        in_plain_run, in_dflash_run: log-probabilities of the likeliest tokens at that place in the runs themselves.
    """
    plain, dflash = difference.plain_token, difference.dflash_token
    if plain is None or dflash is None:
        ended, other = ("with", "without") if dflash is None else ("without", "with")
        reason = f"the answer {ended} drafts ends after {difference.position} tokens, the one {other} goes on"
        return Verdict(difference, "BUG", reason, {}, None)
    best = max(logprobs.values())
    behind = {"plain": best - logprobs[plain], "drafted": best - logprobs[dflash]}
    gap = max(behind.values())
    is_tie = gap <= epsilon
    if is_tie:
        reason = f"both are within {epsilon:g} of the best"
    else:
        worse = max(behind, key=lambda which: behind[which])
        whose = "without" if worse == "plain" else "with"
        reason = f"the token {whose} drafts is {gap:.4g} behind the best, more than {epsilon:g}"
    return Verdict(
        difference,
        "tie within epsilon" if is_tie else "BUG",
        reason,
        dict(logprobs),
        gap,
        _distance(in_plain_run, plain, dflash),
        _distance(in_dflash_run, dflash, plain),
    )


def _distance(logprobs: Mapping[int, float] | None, chosen: int, other: int) -> float | None:
    if not logprobs or chosen not in logprobs or other not in logprobs:
        return None
    return logprobs[chosen] - logprobs[other]
