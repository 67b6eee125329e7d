"""Greedy answers with drafts against those without, for each K."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dflash.parity.compare import EPSILON, Difference, Verdict, first_difference, judge, num_compared
from vllm_dflash.parity.runs import Run


@dataclass(frozen=True)
class Comparison:
    """One K against the plain engine."""

    num_speculative_tokens: int
    num_answers: int
    num_tokens: int  # of the plain answers
    num_compared: int  # tokens up to the first difference of each answer
    num_cycles: int
    num_drafted: int
    num_accepted: int
    verdicts: tuple[Verdict, ...]
    facts: dict[str, Any]

    @property
    def tau(self) -> float:
        """Tokens per target pass, the target's own included."""
        return 1 + self.num_accepted / max(self.num_cycles, 1)

    @property
    def num_bugs(self) -> int:
        """Differences that rounding does not explain."""
        return sum(verdict.label == "BUG" for verdict in self.verdicts)


def compare_greedy(run: Run, drafts: Sequence[int], epsilon: float | None, score_dtype: str | None) -> list[Comparison]:
    """Answers without drafts, then with each of `drafts`, then a verdict on every difference.

    Args:
        drafts: K of each run.
        epsilon: largest distance that rounding explains, in nats; None: EPSILON of the target's dtype.
        score_dtype: of the engine that scores differences; None: the target's.

    Raises:
        EngineDied: an engine ended without its answers.
        ValueError: the dtype has no epsilon.
    """
    plain = run.answers(None)
    with_drafts = {num_drafted: run.answers(num_drafted) for num_drafted in drafts}
    found = {num_drafted: _differences(run, plain, answers) for num_drafted, answers in with_drafts.items()}
    dtype = plain["facts"]["dtype"]
    if epsilon is None:
        if dtype not in EPSILON:
            raise ValueError(f"there is no epsilon for {dtype}, only for {', '.join(EPSILON)}; give one by --epsilon.")
        epsilon = EPSILON[dtype]
    scores = _scores(run, plain, {d for differences in found.values() for d in differences}, score_dtype or dtype)
    comparisons = []
    for num_drafted, answers in with_drafts.items():
        verdicts = [_judge(d, scores, epsilon, plain, answers, run) for d in found[num_drafted]]
        comparisons.append(_comparison(num_drafted, run, plain, answers, verdicts))
    return comparisons


def _differences(run: Run, plain: dict[str, Any], answers: dict[str, Any]) -> list[Difference]:
    found = (
        first_difference(str(i), plain["answers"][str(i)]["token_ids"], answers["answers"][str(i)]["token_ids"])
        for i in range(len(run.prompts))
    )
    return [difference for difference in found if difference is not None]


def _scores(run: Run, plain: dict[str, Any], differences: set[Difference], dtype: str) -> dict[str, dict[int, float]]:
    """Log-probabilities after each common prefix, by `_score_id`; also that of the target's best token."""
    requests: list[dict[str, Any]] = []
    for difference in sorted(differences, key=lambda d: (int(d.prompt_id), d.position, str(d.dflash_token))):
        if difference.plain_token is not None and difference.dflash_token is not None:
            prefix = _prefix(run, plain, difference)
            tokens = [difference.plain_token, difference.dflash_token]
            sampling = {"logprob_token_ids": tokens}
            requests.append({"id": _score_id(difference, prefix), "prompt_ids": prefix, "sampling": sampling})
    if not requests:
        return {}
    answers = run.scores(requests, dtype)["answers"]
    return {
        request["id"]: {int(token): logprob for token, logprob in answers[request["id"]]["logprobs"][0].items()}
        for request in requests
    }


def _prefix(run: Run, plain: dict[str, Any], difference: Difference) -> list[int]:
    answer = plain["answers"][difference.prompt_id]["token_ids"]
    return [*run.prompts[int(difference.prompt_id)].token_ids, *answer[: difference.position]]


def _score_id(difference: Difference, prefix: list[int]) -> str:
    what = [prefix, difference.plain_token, difference.dflash_token]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _judge(
    difference: Difference,
    scores: dict[str, dict[int, float]],
    epsilon: float,
    plain: dict[str, Any],
    answers: dict[str, Any],
    run: Run,
) -> Verdict:
    in_runs = [_logprobs_at(kind["answers"][difference.prompt_id], difference.position) for kind in (plain, answers)]
    logprobs = scores.get(_score_id(difference, _prefix(run, plain, difference)), {})
    return judge(difference, logprobs, epsilon, *in_runs)


def _logprobs_at(answer: dict[str, Any], position: int) -> dict[int, float] | None:
    places = answer.get("logprobs") or []
    return {int(token): logprob for token, logprob in places[position].items()} if position < len(places) else None


def _comparison(
    num_drafted: int, run: Run, plain: dict[str, Any], answers: dict[str, Any], verdicts: list[Verdict]
) -> Comparison:
    from vllm_dflash.training.served import without_tokens_behind_the_end

    differences = {verdict.difference.prompt_id: verdict.difference for verdict in verdicts}
    token_ids = {str(i): plain["answers"][str(i)]["token_ids"] for i in range(len(run.prompts))}
    measured = [answers["answers"][id] for id in token_ids]
    return Comparison(
        num_speculative_tokens=num_drafted,
        num_answers=len(token_ids),
        num_tokens=sum(map(len, token_ids.values())),
        num_compared=sum(num_compared(differences.get(id), ids) for id, ids in token_ids.items()),
        num_cycles=sum(len(answer["accepted"]) for answer in measured),
        num_drafted=sum(sum(answer["drafted"]) for answer in measured),
        num_accepted=sum(sum(without_tokens_behind_the_end(a["accepted"], len(a["token_ids"]))) for a in measured),
        verdicts=tuple(verdicts),
        facts=answers["facts"],
    )
