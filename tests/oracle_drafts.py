"""Drafts that are right as often as a test wants, so that every pattern of accepting and rejecting occurs.

A random drafter is never right, a trained one seldom in whole blocks; what happens behind an accepted draft would go
untested. Here the drafter runs as always, but the tokens that reach the scheduler are the known continuation of each
text, some altered. Everything behind that is the product: scheduler, verified rows, context K/V.

    pytest_plugins = ["engine_pairs"]           in a test module gives it the fixture `pair`
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from engines import Engine
from tiny_bytes import FIRST_BEYOND_ASCII, VOCAB

K = 7
#: Draft lengths by step, as a controller might choose them; `None` is the whole block in every step.
LENGTHS: dict[str, list[int] | None] = {"whole blocks": None, "changing lengths": [7, 0, 3, 0, 7]}


class OracleDrafts:
    """Replaces the tokens that an engine's drafter proposes, keeping how many there are.

    Each position of a text is drafted right with probability `right`, by a fixed seed: it does not matter which block
    it is in, nor who else is in the batch. Where no known text continues a request, the drafter's tokens stay.
    """

    def __init__(self, engine: Engine, right: float = 0.7, seed: int = 0) -> None:
        self.right, self.seed = right, seed
        self.patterns: Counter[tuple[int, int]] = Counter()  # (drafted, accepted) of each block but a request's last
        self._batch, self._requests = engine.runner.input_batch, engine.runner.requests
        self._answers: dict[tuple[int, ...], list[list[int]]] = {}
        self._pending: dict[str, tuple[int, list[int]]] = {}
        self._take = engine.runner.take_draft_token_ids

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember one answer to a prompt, as token ids; there may be several."""
        answers = self._answers.setdefault(tuple(prompt), [])
        if list(answer) not in answers:
            answers.append(list(answer))

    def take_draft_token_ids(self) -> Any:
        """In place of the runner's method of this name."""
        drafted = self._take()
        if drafted is None:
            return None
        blocks = [self._block(request, tokens) for request, tokens in zip(drafted.req_ids, drafted.draft_token_ids)]
        return dataclasses.replace(drafted, draft_token_ids=blocks)

    def continuation(self, prompt: Sequence[int], answer: Sequence[int], length: int) -> list[int]:
        """What is known to follow, at most `length` tokens, with errors; empty where nothing is known."""
        num_known = len(answer)
        matching = [known for known in self._answers.get(tuple(prompt), []) if known[:num_known] == list(answer)]
        following = max(matching, key=len, default=[])[num_known : num_known + length]
        return [self._maybe_altered(token, (*prompt, i)) for i, token in enumerate(following, num_known)]

    def _block(self, request: str, tokens: list[int]) -> list[int]:
        index = self._batch.req_id_to_index[request]
        text = self._batch.token_ids_cpu[index, : self._batch.num_tokens_no_spec[index]].tolist()
        self._count(request, text)
        num_prompt = len(self._requests[request].prompt_token_ids)
        block = self.continuation(text[:num_prompt], text[num_prompt:], len(tokens))
        block += tokens[len(block) :]
        self._pending[request] = (len(text), block)
        return block

    def _count(self, request: str, text: list[int]) -> None:
        start, block = self._pending.pop(request, (0, []))
        following = text[start:]
        if block and following:
            self.patterns[len(block), len(following) - 1] += 1

    def _maybe_altered(self, token: int, place: tuple[int, ...]) -> int:
        generator = random.Random(hash((self.seed, *place)))  # of whole numbers: the same in every process
        if generator.random() < self.right:
            return token
        return (token + 1 + generator.randrange(self._batch.vocab_size - 1)) % self._batch.vocab_size


def ask(engine: Engine, prompts: list[list[int]], sampling: Any) -> list[Any]:
    """vLLM's own outputs, in order; greedy and at most 40 tokens long unless `sampling` says otherwise."""
    from vllm import SamplingParams

    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    parameters = [SamplingParams(**({"temperature": 0.0, "max_tokens": 40} | one)) for one in each]
    return engine.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)


def answers(output: Any) -> list[tuple[Any, ...]]:
    """All that a user sees of an output but its log-probabilities."""
    return [(c.index, list(c.token_ids), c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def random_prompts(
    count: int, lengths: Sequence[int] = (3, 5, 17, 40), seed: int = 0, ascii_only: bool = False
) -> list[list[int]]:
    """Prompts without special tokens, and with `ascii_only` without half characters either."""
    generator = random.Random(seed)
    beyond = FIRST_BEYOND_ASCII if ascii_only else VOCAB
    return [[generator.randrange(5, beyond) for _ in range(lengths[i % len(lengths)])] for i in range(count)]
