"""Engines that run soak requests step by step: arrivals, aborts, drafts that are mostly what the target will say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import Engine
from oracle_drafts import OracleDrafts
from soak_requests import MAX_LEN, SoakRequest

#: Pages for five requests of full length, where sixteen run together: the scheduler has to preempt.
_NUM_PAGES, _PAGE = 1 + 30, 32
K = 7


@dataclass
class Answer:
    """What came back for one request; lists have one entry per sequence."""

    token_ids: list[list[int]]
    reasons: list[tuple[str | None, Any]]  # (finish reason, stop reason); (None, None) while it is not finished
    logprobs: list[list[dict[int, float]] | None]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    was_aborted: bool = False
    num_preemptions: int = 0


class SoakEngine(Engine):
    """An engine of `engines.py` that takes soak requests."""

    def __init__(self, target: Path, drafter: Path | None = None, **arguments: Any) -> None:
        settings: dict[str, Any] = {"max_model_len": MAX_LEN, "block_size": _PAGE, "scheduling_policy": "priority"}
        if drafter is not None:
            settings |= {"num_drafted": K, "num_gpu_blocks_override": _NUM_PAGES, "max_num_seqs": 16}
            # 16 x (1 + K) rows and 16 x K more that vLLM reserves, and few for prompts, which come in chunks. With
            # less, drafts of a request would be cut for the sake of others, and a seed would give other text.
            settings |= {"max_num_batched_tokens": 256}
        else:
            settings |= {"max_num_seqs": 64}
        super().__init__(target, drafter, **(settings | arguments))
        self.speculates = drafter is not None
        self.num_steps = 0
        self.preempted: dict[str, int] = {}  # by request
        self._take_drafts = self.runner.take_draft_token_ids
        self._count_preemptions()

    def expect(self, requests: list[SoakRequest], answers: list[Answer]) -> None:
        """Draft mostly what these requests will be answered, where the target alone decides it."""
        self.runner.take_draft_token_ids = self._take_drafts
        oracle = _GreedyOracle(self)
        for request, answer in zip(requests, answers):
            if request.is_greedy:
                oracle.learn(request.prompt, answer.token_ids[0])
        self.runner.take_draft_token_ids = oracle.take_draft_token_ids

    def run(self, requests: list[SoakRequest], with_aborts: bool = False) -> list[Answer]:
        """Answers in order."""
        engine = self.llm.llm_engine
        self._drafts.clear()
        self.preempted.clear()
        answers = {r.seed: _empty_answer(r.sampling.get("n", 1)) for r in requests}
        events = self._events(requests, with_aborts)
        step = 0
        while events or engine.has_unfinished_requests():
            while events and events[0][0] <= step:
                _, _, request, is_abort = events.pop(0)
                if is_abort:
                    engine.abort_request([request.seed])
                    answers[request.seed].was_aborted = True
                else:
                    parameters = request.parameters(self.speculates)
                    prompt = {"prompt_token_ids": request.prompt}
                    engine.add_request(request.seed, prompt, parameters, priority=request.priority)
            for output in engine.step():
                _take(answers[output.request_id], output)
            step += 1
        self.num_steps += step
        for request in requests:
            answers[request.seed].num_preemptions = self.preempted.get(request.seed, 0)
        return [answers[request.seed] for request in requests]

    def _events(self, requests: list[SoakRequest], with_aborts: bool) -> list[tuple[int, int, SoakRequest, bool]]:
        """(step, number, request, is it an abort), in the order in which they happen."""
        events, arrival = [], 0
        for number, request in enumerate(requests):
            arrival += request.gap if self.speculates else 0
            events.append((arrival, 2 * number, request, False))
            if with_aborts and request.abort_after is not None:
                events.append((arrival + request.abort_after, 2 * number + 1, request, True))
        return sorted(events, key=lambda event: event[:2])

    def _count_preemptions(self) -> None:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def preempt_and_count(request: Any, *arguments: Any, **named: Any) -> Any:
            seed = external_id(request.request_id)
            self.preempted[seed] = self.preempted.get(seed, 0) + 1
            return preempt(request, *arguments, **named)

        scheduler._preempt_request = preempt_and_count


class _GreedyOracle(OracleDrafts):
    """Leaves drafts of sampled requests alone: they may have been drawn, and their distributions are kept."""

    def _block(self, request: str, tokens: list[int]) -> list[int]:
        if self._requests[request].sampling_params.temperature > 0:
            return tokens
        return super()._block(request, tokens)


def external_id(internal_id: str) -> str:
    """The id that the caller gave: vLLM puts the number of the sequence before it, and random characters behind."""
    return re.sub(r"^\d+_", "", internal_id.rpartition("-")[0])


def _empty_answer(num_sequences: int) -> Answer:
    return Answer([[] for _ in range(num_sequences)], [(None, None)] * num_sequences, [None] * num_sequences)


def _take(answer: Answer, output: Any) -> None:
    """Keep the newest state of each sequence; vLLM sends all tokens so far, of one sequence at a time."""
    for sequence in output.outputs:
        answer.token_ids[sequence.index] = list(sequence.token_ids)
        answer.reasons[sequence.index] = (sequence.finish_reason, sequence.stop_reason)
        answer.logprobs[sequence.index] = _values(sequence.logprobs)
    if output.prompt_logprobs:
        answer.prompt_logprobs = _values(output.prompt_logprobs)


def _values(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [row and {token: entry.logprob for token, entry in row.items()} for row in logprobs]
