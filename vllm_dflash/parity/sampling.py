"""Tokens drawn with drafts against the distribution that the target gives them.

Each prompt is answered many times by an engine with drafts. The first token of an answer comes from the prompt's own
pass, where nothing is drafted, and is no evidence. Of every later one we ask whether it is distributed as it should
be after the prompt and the tokens that were drawn before it in this very answer: oracle.py, fit.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dflash.parity.fit import SMALLEST_P, Fit
from vllm_dflash.parity.oracle import Sampling, next_token_probabilities
from vllm_dflash.parity.prompts import Prompt
from vllm_dflash.parity.runs import Run

#: How much rounding may move a cut (min_p, top_k, top_p), as a fraction: float32's for logits, see compare.EPSILON.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Drawn:
    """One K and its draws."""

    num_speculative_tokens: int
    num_samples: int  # per prompt
    num_positions: int
    num_accepted: int  # of the tested places, those whose token was a draft that the target accepted
    num_cycles: int
    fit: Fit
    facts: dict[str, Any]

    @property
    def is_bug(self) -> bool:
        """Is this no accident?"""
        return self.fit.p_value < SMALLEST_P


def compare_samples(
    run: Run,
    drafts: Sequence[int],
    num_samples: int,
    num_positions: int,
    sampling: Sampling,
    load_target: Callable[[], Any],
) -> list[Drawn]:
    """Draw with each of `drafts` and test.

    Args:
        run: asks its engines for its own sampling parameters.
        num_samples: answers per prompt.
        num_positions: first tokens of an answer that are looked at, at least 2.
        sampling: what the draws are held against.
        load_target: gives what has `after(prompt_ids, continuations)`, see TargetLogits; called when all engines are
            gone, because a GPU may not hold both.

    Raises:
        EngineDied: an engine ended without its answers.
    """
    requests = sample_requests(run.prompts, num_samples)
    found = {num_drafted: run.answers(num_drafted, requests) for num_drafted in drafts}
    target = load_target()
    results = []
    for num_drafted, drawn in found.items():
        answers = {request["id"]: drawn["answers"][request["id"]] for request in requests}
        results.append(
            Drawn(
                num_speculative_tokens=num_drafted,
                num_samples=num_samples,
                num_positions=num_positions,
                num_accepted=sum(accepted_places(answer["accepted"], num_positions) for answer in answers.values()),
                num_cycles=sum(len(answer["accepted"]) for answer in answers.values()),
                fit=check_samples(run.prompts, answers, num_positions, sampling, target.after, run.seed),
                facts=drawn["facts"],
            )
        )
    return results


def sample_requests(prompts: Sequence[Prompt], num_samples: int) -> list[dict[str, Any]]:
    """Requests for `num_samples` answers to each prompt; ids are "prompt:sample"."""
    return [
        {"id": f"{i}:{sample}", "prompt_ids": list(prompt.token_ids)}
        for i, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def check_samples(
    prompts: Sequence[Prompt],
    answers: dict[str, Any],
    num_positions: int,
    sampling: Sampling,
    logits_after: Callable[[Sequence[int], Sequence[tuple[int, ...]]], Any],
    seed: int = 0,
) -> Fit:
    """Hold drawn answers against the distribution that `sampling` gives.

    Args:
        answers: by "prompt:sample", each with its token ids.
        logits_after: see TargetLogits.after.
    """
    following: dict[int, dict[tuple[int, ...], Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for name, answer in answers.items():
        token_ids = tuple(answer["token_ids"][:num_positions])
        for position in range(1, len(token_ids)):
            following[int(name.partition(":")[0])][token_ids[:position]][token_ids[position]] += 1
    fit = Fit(seed)
    for number in sorted(following):
        prompt_ids, counts = prompts[number].token_ids, following[number]
        for prefix, logits in logits_after(prompt_ids, sorted(counts)):
            strict, generous = (
                next_token_probabilities(logits, prompt_ids, prefix, sampling, r) for r in (-ROUNDING, ROUNDING)
            )
            fit.add(counts[prefix], strict, generous)
    return fit


def accepted_places(accepted: Sequence[int], num_positions: int) -> int:
    """Places of an answer, from its second to `num_positions`, whose token was an accepted draft.

    Args:
        accepted: drafts accepted in each cycle; each cycle adds one token of the target's own behind them.
    """
    place, found = 1, 0
    for num_accepted in accepted:
        found += max(0, min(place + num_accepted, num_positions) - place)
        place += num_accepted + 1
    return found
