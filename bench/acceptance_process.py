"""Text that drafts are accepted on, for bench/simulate.py: a synthetic process, or recorded traces.

Synthetic: request r has a difficulty mu_r; along its text runs a further difficulty d_t (AR(1) over tokens); a block
that starts at token t has, at position j,

    logit q = mu_r + d_{t + j} - slope * (j - 1) + noise        q: the true probability that the target accepts it
    logit p_max = 0.8 * (logit q + noise') + 0.3                what the drafter says: noisy, and miscalibrated

Difficulty belongs to the text, not to the cycle: a policy that advances slowly stays longer in hard text. Requests end
after a fixed number of tokens and are replaced by others.

Recorded: a request's cycles stand at their token offsets; wherever a policy is in the text, the last recorded cycle at
or before that offset says p_max and how far drafts were accepted. Needs traces recorded at a fixed K.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vllm_dflash.draft_length import Trace

RHO = 0.9  # of d_t


@dataclass(frozen=True)
class Process:
    """Parameters of the synthetic process."""

    name: str
    num_positions: int
    difficulty: tuple[tuple[float, float], ...]  # (mean, deviation) of mu_r, kinds of requests in equal parts
    slope: float
    drift: float = 0.7  # deviation of d_t
    noise: float = 0.8
    seen: float = 0.6  # deviation of noise'
    request_tokens: int = 512


#: tau about 8 for one half of the requests (maths, code) and about 4 for the other (chat): the paper's Qwen3 drafters.
QWEN3 = Process("Qwen3 drafter, half maths, half chat", 15, ((2.7, 0.4), (1.45, 0.5)), slope=0.02)
#: Rates as README gives them for the shipped drafter over six tasks: tau 1.74.
SMOLLM2 = Process("SmolLM2 drafter", 7, ((0.45, 0.4), (-0.75, 0.4)), slope=0.3)
#: Random weights: nothing is accepted, whatever the drafter says.
HOPELESS = Process("random drafter", 7, ((-7.0, 0.1),), slope=0.0)


def _evenly_spread(index: int) -> float:
    """The index-th number of a sequence that fills (0, 1) evenly: few requests then stand for many."""
    value, part = 0.0, 0.5
    while index:
        index, bit = divmod(index, 2)
        value += part * bit
        part /= 2
    return value


class SyntheticText:
    """R requests on the synthetic process."""

    def __init__(self, process: Process, num_requests: int, seed: int) -> None:
        self.process, self.num_requests = process, num_requests
        self._rng = np.random.default_rng(seed)
        self._length = process.request_tokens + process.num_positions + 1
        self._count = 0
        self.ids = [""] * num_requests
        # Requests of a running server are at different places of their texts.
        self.offset = np.arange(num_requests) * process.request_tokens // num_requests
        self._logits = np.zeros((num_requests, self._length))
        for row in range(num_requests):
            self._replace(row)

    def _replace(self, row: int) -> None:
        kinds = self.process.difficulty
        mean, deviation = kinds[self._count % len(kinds)]
        difficulty = NormalDist(mean, deviation).inv_cdf(_evenly_spread(self._count // len(kinds) + 1))
        steps = self._rng.normal(0, self.process.drift * np.sqrt(1 - RHO**2), self._length)
        steps[0] /= np.sqrt(1 - RHO**2)
        for i in range(1, self._length):
            steps[i] += RHO * steps[i - 1]
        self._logits[row] = difficulty + steps
        self.ids[row] = str(self._count)
        self._count += 1

    def expected(self) -> np.ndarray:
        """[R, K] probabilities of the next blocks as far as the text decides them, without the noise of a block."""
        # The mean of a sigmoid over normal noise, to a percent.
        return 1 / (1 + np.exp(-self._next_logits() / np.sqrt(1 + np.pi * self.process.noise**2 / 8)))

    def _next_logits(self) -> np.ndarray:
        positions = np.arange(self.process.num_positions)
        logits = self._logits[np.arange(self.num_requests)[:, None], self.offset[:, None] + 1 + positions]
        return logits - self.process.slope * positions

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """True conditional probabilities and the drafter's maximum probabilities [R, K] of the next blocks."""
        process, logits = self.process, self._next_logits()
        logits = logits + self._rng.normal(0, process.noise, logits.shape)
        seen = 0.8 * (logits + self._rng.normal(0, process.seen, logits.shape)) + 0.3
        return 1 / (1 + np.exp(-logits)), 1 / (1 + np.exp(-seen))

    def runs(self, probabilities: np.ndarray) -> np.ndarray:
        """[R] how far the target would accept blocks of these probabilities."""
        return (self._rng.random(probabilities.shape) < probabilities).cumprod(1).sum(1)

    def advance(self, tokens: np.ndarray) -> list[str]:
        """Go on by [R] tokens; ids of requests that finished and were replaced."""
        self.offset = self.offset + tokens
        finished = []
        for row in np.flatnonzero(self.offset >= self.process.request_tokens):
            finished.append(self.ids[row])
            self.offset[row] = 0
            self._replace(row)
        return finished


class RecordedText:
    """R requests that replay a trace; requests of the trace are taken in turn."""

    def __init__(self, trace: Trace, num_requests: int, seed: int) -> None:
        self.num_requests, self._num_positions = num_requests, trace.num_speculative_tokens
        cycles: dict[str, list[tuple[tuple[float, ...], int]]] = {}
        last = {cycle.id: number for number, line in enumerate(trace.steps) for cycle in line.cycles}
        for number, line in enumerate(trace.steps):
            for cycle in line.cycles:
                if cycle.verified == 0 and number == last[cycle.id]:
                    continue  # the request ended before these drafts were verified
                if cycle.verified != cycle.drafted:
                    raise ValueError(
                        f"the trace verified {cycle.verified} of {cycle.drafted} drafts of request {cycle.id}, so what"
                        ' else would have been accepted is not known; record it with draft length "fixed".'
                    )
                if cycle.drafted == trace.num_speculative_tokens:
                    cycles.setdefault(cycle.id, []).append((cycle.p_max, cycle.accepted))
        if not cycles:
            raise ValueError("the trace has no cycle with a whole block; record it with draft length fixed at K.")
        self._texts = [
            (np.array([p for p, _ in text]), np.array([a for _, a in text]), np.cumsum([0] + [1 + a for _, a in text]))
            for text in cycles.values()
        ]
        self._count = num_requests + seed
        self._text = [(row + seed) % len(self._texts) for row in range(num_requests)]
        self.ids = [str(row) for row in range(num_requests)]
        lengths = [int(self._texts[text][2][-1]) for text in self._text]
        self.offset = np.array([row * length // num_requests for row, length in enumerate(lengths)])

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """As SyntheticText.blocks; the probabilities are 1 as far as the record was accepted, then 0."""
        confidences = np.empty((self.num_requests, self._num_positions))
        accepted = np.empty(self.num_requests, dtype=np.int64)
        for row, text in enumerate(self._text):
            p_max, runs, offsets = self._texts[text]
            index = int(np.searchsorted(offsets, self.offset[row], side="right")) - 1
            confidences[row], accepted[row] = p_max[index], runs[index]
        return (np.arange(self._num_positions) < accepted[:, None]).astype(float), confidences

    def expected(self) -> np.ndarray:
        """As SyntheticText.expected; a record knows nothing but the outcome."""
        return self.blocks()[0]

    def runs(self, probabilities: np.ndarray) -> np.ndarray:
        """[R] recorded acceptance."""
        return probabilities.sum(1).astype(np.int64)

    def advance(self, tokens: np.ndarray) -> list[str]:
        """As SyntheticText.advance."""
        self.offset = self.offset + tokens
        finished = []
        for row in range(self.num_requests):
            if self.offset[row] >= self._texts[self._text[row]][2][-1]:
                finished.append(self.ids[row])
                self.offset[row], self._text[row] = 0, self._count % len(self._texts)
                self.ids[row] = str(self._count)
                self._count += 1
        return finished
