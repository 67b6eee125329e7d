"""Tokens per second while all requests of a batch are being decoded, of one engine or of several in turn.

Prompts are left out, which cost the same with any draft length, and so is the end: requests of one length end together
without speculation and one after the other with it, and a server would have filled their places.

Engines that are compared answer the same batch at the same time: the one that has had the least time makes the next
step. A machine that is slower for a second or a minute is then slower for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving_engines import runner_of


@dataclass
class Decoded:
    """A batch that was answered. Seconds are the engine's own."""

    texts: list[list[int]]  # all tokens of each request
    began: list[float]  # when each request had its first token
    ended: list[float]  # and its last one
    tokens: int = 0  # from when every request had one to when the first one ended
    seconds: float = 0.0  # of that time

    @property
    def rate(self) -> float:
        """Tokens per second of the whole batch."""
        return self.tokens / self.seconds


Request = tuple[list[int], Any]  # token ids of the prompt, SamplingParams


def decode(llm: Any, requests: Sequence[Request]) -> Decoded:
    """Answer requests, all at once.

    Raises:
        RuntimeError: a request ended before the last one had a token.
    """
    return decode_in_turn({"": llm}, requests)[""]


def decode_in_turn(engines: Mapping[str, Any], requests: Sequence[Request]) -> dict[str, Decoded]:
    """Answer the same requests by every engine; raises as `decode`."""
    running = {name: _Batch(llm, requests) for name, llm in engines.items()}
    batches = dict(running)
    while running:
        name = min(running, key=lambda name: running[name].seconds)
        if not running[name].step():
            del running[name]
    return {name: batch.decoded() for name, batch in batches.items()}


def greedy(llm: Any, texts: Sequence[str], max_tokens: int, drafts: bool = True) -> list[Request]:
    """User messages as requests of `max_tokens` tokens; without drafts where they are to have none."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args={"dflash": drafts})
    return [(prompt, sampling) for prompt in as_tokens(llm, texts)]


def as_tokens(llm: Any, texts: Sequence[str]) -> list[list[int]]:
    """Chat prompts of user messages."""
    template = llm.get_tokenizer().apply_chat_template
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return [list(template(one, add_generation_prompt=True, return_dict=False)) for one in conversations]


class _Stopwatch:
    """Seconds, as time.perf_counter gives them, that stand still while another engine has its turn."""

    def __init__(self) -> None:
        self._shown = time.perf_counter()
        self._since: float | None = None

    def __call__(self) -> float:
        return self._shown if self._since is None else self._shown + time.perf_counter() - self._since

    def go(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._shown, self._since = self(), None


@dataclass
class _Progress:
    tokens: list[int] = field(default_factory=list)
    began: float | None = None
    ended: float = 0.0
    is_finished: bool = False


class _Batch:
    """Requests that one engine answers, a step at a time."""

    def __init__(self, llm: Any, requests: Sequence[Request]) -> None:
        self._engine, self._watch = llm.llm_engine, _Stopwatch()
        self._started = self._watch()
        # Decided draft lengths follow the time of steps: theirs, not that of the engines in between.
        control = getattr(getattr(runner_of(llm), "drafter", None), "lengths", None)
        if control is not None:
            control.clock = self._watch
        self._requests = {f"{self._started}-{index}": _Progress() for index in range(len(requests))}
        for name, (prompt, sampling) in zip(self._requests, requests):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self._all_began: tuple[int, float] | None = None  # tokens and time
        self._one_ended: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        """How much time this engine has had."""
        return self._watch() - self._started

    def step(self) -> bool:
        """Whether there is more to do."""
        self._watch.go()
        outputs = self._engine.step()
        self._watch.stop()
        now = self._watch()
        for output in outputs:
            request = self._requests[output.request_id]
            request.tokens, request.ended = list(output.outputs[0].token_ids), now
            request.is_finished = output.finished
            request.began = now if request.began is None else request.began
        reached = sum(len(request.tokens) for request in self._requests.values()), now
        if self._all_began is None and all(request.began is not None for request in self._requests.values()):
            self._all_began = reached
        if self._one_ended is None and any(request.is_finished for request in self._requests.values()):
            self._one_ended = reached
        return bool(self._engine.has_unfinished_requests())

    def decoded(self) -> Decoded:
        first, last = self._all_began, self._one_ended
        if first is None or last is None or last[1] <= first[1]:
            raise RuntimeError("a request ended before all had a token; raise --max-tokens.")
        requests = self._requests.values()
        return Decoded(
            texts=[request.tokens for request in requests],
            began=[request.began or 0.0 for request in requests],
            ended=[request.ended for request in requests],
            tokens=last[0] - first[0],
            seconds=last[1] - first[1],
        )
