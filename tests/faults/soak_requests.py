"""Random requests, each made from its own seed alone, so that one that fails can be made again by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

#: Tokens that a request can have at most, prompt included. No multiple of the cache's pages of 32 tokens, so that the
#: last page of a full request ends with slots that nothing may write.
MAX_LEN = 180
VOCAB_SIZE = 128
_SHARED = [random.Random(f"prefix {i}").choices(range(3, VOCAB_SIZE), k=32 + 16 * i) for i in range(5)]


@dataclass(frozen=True)
class SoakRequest:
    """One request and what becomes of it. Steps are the engine's."""

    seed: str
    prompt: list[int]
    sampling: dict[str, Any]  # of SamplingParams
    bad_words: list[list[int]]  # as tokens; there is no tokenizer
    max_draft: int | None
    priority: int  # lower ones go first
    gap: int  # steps since the request before it
    abort_after: int | None  # steps since it arrived

    @property
    def is_greedy(self) -> bool:
        """Is its text decided by the target alone?"""
        return self.sampling["temperature"] == 0 or self.sampling.get("top_k") == 1

    def parameters(self, speculates: bool) -> Any:
        """vLLM's SamplingParams; what it says about drafts is left out where there are none."""
        from vllm import SamplingParams

        limit = {} if self.max_draft is None or not speculates else {"dflash_max_draft": self.max_draft}
        parameters = SamplingParams(detokenize=False, extra_args=limit or None, **self.sampling)
        parameters._bad_words_token_ids = self.bad_words or None
        return parameters


def soak_request(seed: str, with_new_parameters: bool) -> SoakRequest:
    """The request of this seed; `with_new_parameters` adds min_p and logit_bias to the mix."""
    rng = random.Random(seed)
    prompt = _prompt(rng)
    room = MAX_LEN - len(prompt)
    length = min(room, _length(rng, room))
    sampling: dict[str, Any] = {"max_tokens": length, "ignore_eos": rng.random() < 0.6, "temperature": 0.0}
    if rng.random() < 0.25:
        sampling |= _sampled(rng)
    bad_words = []
    if rng.random() < 0.6:
        sampling |= _penalties(rng) | _ends(rng, length) | _reports(rng)
        if rng.random() < 0.15:
            bad_words = [rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 1, 2, 3])) for _ in range(rng.randrange(1, 9))]
        elif rng.random() < 0.1:
            sampling["allowed_token_ids"] = sorted(rng.sample(range(VOCAB_SIZE), rng.choice([1, 5, 60])))
    new = _new_parameters(rng)
    return SoakRequest(
        seed=seed,
        prompt=prompt,
        sampling=sampling | (new if with_new_parameters else {}),
        bad_words=bad_words,
        max_draft=rng.choice([0, 1, 2, 4]) if rng.random() < 0.15 else None,
        priority=rng.choice([0, 0, 0, 1, 5]),
        # Bursts that fill the cache, and pauses in which the engine runs dry.
        gap=0 if rng.random() < 0.8 else rng.choice([1, 1, 2, 3, 10]),
        abort_after=rng.randrange(30) if rng.random() < 0.1 else None,
    )


def _prompt(rng: random.Random) -> list[int]:
    kind = rng.random()
    if kind < 0.08:
        return [rng.randrange(3, VOCAB_SIZE)]
    if kind < 0.45:  # continues one that many have; some are nothing but a beginning of it
        shared = rng.choice(_SHARED)
        own = rng.choice([0, 1, 5, 30])
        return (shared[: rng.choice([32, 33, 64, len(shared)])] + rng.choices(range(3, VOCAB_SIZE), k=own))[:MAX_LEN]
    if kind < 0.53:  # leaves room for a few tokens only
        return rng.choices(range(3, VOCAB_SIZE), k=MAX_LEN - rng.choice([1, 2, 6, 7, 8, 9, 15]))
    return rng.choices(range(3, VOCAB_SIZE), k=rng.randrange(2, 50))


def _length(rng: random.Random, room: int) -> int:
    """Tokens to generate: mostly few; sometimes as many as fit, or all but a few of them."""
    kind = rng.random()
    if kind < 0.6:
        return rng.randrange(1, 17)
    return rng.randrange(16, 60) if kind < 0.95 else max(1, room - rng.choice([0, 0, 1, 7, 8]))


def _sampled(rng: random.Random) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": rng.choice([0.3, 1.0, 1.5])}
    if rng.random() < 0.4:
        sampling["top_k"] = rng.choice([1, 5, 40])
    if rng.random() < 0.3:
        sampling["top_p"] = rng.choice([0.5, 0.95])
    if rng.random() < 0.5:
        sampling["seed"] = rng.randrange(1000)
    if rng.random() < 0.3:  # vLLM wants temperature for this; with top_k 1 all sequences are the greedy one
        sampling |= {"n": rng.choice([2, 3]), "top_k": rng.choice([1, 5])}
    return sampling


def _penalties(rng: random.Random) -> dict[str, Any]:
    names = {"repetition_penalty": [0.8, 1.3], "presence_penalty": [-1.0, 1.5], "frequency_penalty": [-0.5, 0.7]}
    return {name: rng.choice(values) for name, values in names.items() if rng.random() < 0.2}


def _ends(rng: random.Random, length: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    if rng.random() < 0.3:
        sampling["stop_token_ids"] = sorted(rng.sample(range(VOCAB_SIZE), rng.choice([1, 4, 12])))
    if rng.random() < 0.3:
        sampling["min_tokens"] = rng.randrange(length + 1)
    return sampling


def _reports(rng: random.Random) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    if rng.random() < 0.25:
        sampling["logprobs"] = rng.choice([0, 1, 5])
    if rng.random() < 0.08:
        sampling["prompt_logprobs"] = 1
    return sampling


def _new_parameters(rng: random.Random) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    if rng.random() < 0.1:
        sampling["min_p"] = rng.choice([0.05, 0.3])
    if rng.random() < 0.1:
        biased = rng.sample(range(VOCAB_SIZE), rng.choice([1, 3]))
        sampling["logit_bias"] = {token: rng.choice([-100.0, -2.0, 2.0, 5.0]) for token in biased}
    return sampling
