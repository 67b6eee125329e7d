"""Thousands of random requests with drafts, held against plain vLLM's answers to the same requests.

    .venv/bin/python tests/faults/soak.py --requests 10000
    .venv/bin/python tests/faults/soak.py --only 0-4711        one request again, with the others of its wave

Waves of requests share one engine with a tiny target and a cache that is too small for them. Where the target alone
decides a text, all of it must be equal, with its log-probabilities and the reason why it ended; a seeded sample must
come out the same a second time. Differences at near ties of the target are named, not counted as wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import conftest  # noqa: F401  (the environment)

import numpy as np
from cache_canary import CacheCanary
from soak_engine import Answer, SoakEngine
from soak_requests import SoakRequest, soak_request
from tiny_models import write_tiny_drafter, write_tiny_target

from vllm_dflash.draft_length import ScheduledLengths
from vllm_dflash.length_control import LengthControl

WAVE = 250
#: How draft lengths are decided; waves take turns. "auto" is the product's controller on this machine.
MODES = ("fixed", "auto", "scheduled")
_SCHEDULE = [7, 0, 3, 7, 1, 0, 0, 5]
_TOLERANCE = 1e-3  # of log-probabilities
_TIE = 1e-4  # between the two best log-probabilities: less is within what another batch shape does in fp32


@dataclass
class Report:
    """Sums over all waves; memory in MiB."""

    requests: int = 0
    compared: int = 0  # whose text the target alone decides
    repeated: int = 0  # seeded samples that were drawn twice
    wrong: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0
    pages_checked: int = 0  # pages of the cache that had to stay as they were, over checked steps and layers
    tokens: int = 0
    verified: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    memory: list[tuple[int, float]] = field(default_factory=list)  # (requests so far, resident MiB)
    seconds: float = 0.0

    @property
    def slope(self) -> float:
        """MiB per 1,000 requests over the second half; 0 with fewer than three points there."""
        half = [point for point in self.memory if point[0] >= self.requests / 2]
        if len(half) < 3:
            return 0.0
        return float(np.polyfit([1e-3 * n for n, _ in half], [mib for _, mib in half], 1)[0])

    def text(self) -> str:
        """All of it, for people."""
        drafted = ", ".join(f"{mode} {self.accepted[mode]:,} of {self.verified[mode]:,}" for mode in MODES)
        thousands = [point for i, point in enumerate(self.memory) if i == 0 or point[0] % 1000 == 0]
        memory = ", ".join(f"{n:,}: {mib:.0f}" for n, mib in thousands)
        return (
            f"{self.requests:,} requests, {self.compared:,} held against plain vLLM, {self.repeated:,} seeded ones "
            f"repeated; {len(self.wrong)} wrong, {len(self.ties)} near ties\n"
            f"{self.aborted:,} aborted, {self.preemptions:,} preemptions, {self.steps:,} steps, "
            f"{self.tokens:,} tokens, {self.seconds:.0f} s\n"
            f"accepted drafts: {drafted}\n"
            f"cache pages found untouched: {self.pages_checked:,}\n"
            f"resident MiB after requests: {memory}; slope {self.slope:+.2f} MiB per 1,000 over the second half"
        )


class Soak:
    """A plain and a speculating engine, and what was seen so far."""

    def __init__(self, folder: Path, check_every: int) -> None:
        # As small as can be: two layers each, of which the drafter reads the first.
        target = write_tiny_target(folder / "target", num_layers=2)
        features = {"mask_token_id": 0, "target_layer_ids": [0]}
        drafter = write_tiny_drafter(
            folder / "drafter", num_hidden_layers=2, num_target_layers=2, dflash_config=features
        )
        self.target = target
        self.plain = SoakEngine(target)
        self.drafting = SoakEngine(target, drafter, draft_length="auto")
        self.canary = CacheCanary(self.drafting.runner, check_every)
        self.report = Report()
        self.with_new_parameters = takes_new_parameters(self.drafting)
        self._judge: SoakEngine | None = None
        self._controls = {
            "fixed": LengthControl(ScheduledLengths([7]), learns=False),
            "auto": self.drafting.runner.drafter.lengths,
            "scheduled": LengthControl(ScheduledLengths(_SCHEDULE), learns=True),
        }

    def wave(self, seeds: list[str], mode: str) -> None:
        """One request for each seed; lengths of drafts are decided by `mode`."""
        started = time.perf_counter()
        requests = [soak_request(seed, self.with_new_parameters) for seed in seeds]
        expected = self.plain.run(requests)
        control = self._controls[mode]
        self.drafting.runner.drafter.lengths = control
        self.drafting.expect(requests, expected)
        got = self.drafting.run(requests, with_aborts=True)
        self._compare(requests, expected, got)
        if mode != "scheduled":  # whose lengths depend on the step, so on the company
            self._repeat(requests, got)
        report = self.report
        report.requests += len(requests)
        report.aborted += sum(answer.was_aborted for answer in got)
        report.preemptions += sum(answer.num_preemptions for answer in got)
        report.tokens += sum(len(tokens) for answer in got for tokens in answer.token_ids)
        report.steps, report.pages_checked = self.drafting.num_steps, self.canary.pages_checked
        # A control counts from its start, over all of its waves.
        report.verified[mode], report.accepted[mode] = (
            control.lengths.counters.verified,
            control.lengths.counters.accepted,
        )
        report.wrong += self.canary.take_problems()
        report.seconds += time.perf_counter() - started
        report.memory.append((report.requests, resident_mib()))

    def _compare(self, requests: list[SoakRequest], expected: list[Answer], got: list[Answer]) -> None:
        for request, right, answer in zip(requests, expected, got):
            problem = difference(right, answer) if request.is_greedy else malformed(request, answer)
            self.report.compared += request.is_greedy
            if problem is None:
                continue
            line = f"request {request.seed}: {problem}"
            is_tie = request.is_greedy and self._is_tie(request, right, answer)
            (self.report.ties if is_tie else self.report.wrong).append(line)

    def _repeat(self, requests: list[SoakRequest], got: list[Answer]) -> None:
        """Seeded samples once more, in other company. A preempted request draws anew for what it had drafted."""
        again = [
            i
            for i, (request, answer) in enumerate(zip(requests, got))
            if "seed" in request.sampling and not request.is_greedy and not answer.was_aborted
        ]
        repeated = self.drafting.run([requests[i] for i in again])
        for i, answer in zip(again, repeated):
            if answer.num_preemptions or got[i].num_preemptions:
                continue
            self.report.repeated += 1
            if (problem := difference(got[i], answer)) is not None:
                self.report.wrong.append(f"request {requests[i].seed}, drawn twice: {problem}")

    def _is_tie(self, request: SoakRequest, right: Answer, answer: Answer) -> bool:
        """Were the first tokens that differ equally good, after penalties and all that changes logits?"""
        if self._judge is None:
            self._judge = SoakEngine(self.target, logprobs_mode="processed_logprobs")
        alone = dataclasses.replace(request, sampling=request.sampling | {"logprobs": 2})
        [judged] = self._judge.run([alone])
        for ours, its, rows in zip(answer.token_ids, right.token_ids, judged.logprobs):
            place = next((i for i, (a, b) in enumerate(zip(ours, its)) if a != b), None)
            if place is not None:
                best = sorted((rows or [])[place].values(), reverse=True) if place < len(rows or []) else []
                return len(best) > 1 and best[0] - best[1] < _TIE
        return False


def difference(right: Answer, answer: Answer) -> str | None:
    """What is not as it should be; an aborted request has the beginning of the right text."""
    for n, (tokens, expected) in enumerate(zip(answer.token_ids, right.token_ids)):
        if answer.was_aborted and answer.reasons[n][0] is None:
            expected = expected[: len(tokens)]
        elif answer.reasons[n] != right.reasons[n] and tokens == expected:
            return f"sequence {n} ends for {answer.reasons[n]}, not for {right.reasons[n]}"
        if tokens != expected:
            place = next(
                (i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), min(len(tokens), len(expected))
            )
            return f"sequence {n} differs at token {place}: {tokens[place:][:5]}, not {expected[place:][:5]}"
        problem = _other_logprobs(right.logprobs[n], answer.logprobs[n])
        if problem is not None:
            return f"sequence {n}: {problem}"
    return _other_logprobs(right.prompt_logprobs, answer.prompt_logprobs)


def _other_logprobs(right: list | None, given: list | None) -> str | None:
    if given is None or right is None:
        # An aborted request may not have come to them.
        return None if given is None else "log-probabilities that nobody asked for"
    for place, (expected, row) in enumerate(zip(right, given)):
        if not expected or not row:
            continue
        # Ranks next to each other may change places; what both name must be equal.
        common = expected.keys() & row.keys()
        off = [token for token in common if abs(expected[token] - row[token]) > _TOLERANCE]
        if off or len(row) != len(expected) or not common:
            return f"log-probabilities at {place} are {row}, not {expected}"
    return None


def malformed(request: SoakRequest, answer: Answer) -> str | None:
    """What a sampled answer cannot be, whatever the target's distribution."""
    sampling = request.sampling
    allowed = set(sampling.get("allowed_token_ids", range(10**6)))
    if sampling.get("min_tokens") and allowed.issubset(sampling.get("stop_token_ids", [])):
        allowed = set(range(10**6))  # nothing is allowed before the minimum, and vLLM then takes any token
    banned = {words[0] for words in request.bad_words if len(words) == 1}
    for tokens, (reason, _) in zip(answer.token_ids, answer.reasons):
        if not answer.was_aborted and reason is None:
            return "it never ended"
        if len(tokens) > sampling["max_tokens"] or (reason == "length" and len(tokens) < sampling["max_tokens"]):
            return f"{len(tokens)} tokens with reason {reason!r} where {sampling['max_tokens']} were asked for"
        if reason == "stop" and len(tokens) <= sampling.get("min_tokens", 0):
            return f"it stopped after {len(tokens)} tokens, before min_tokens {sampling['min_tokens']}"
        if not allowed.issuperset(tokens) or banned.intersection(tokens):
            return f"forbidden tokens in {tokens}"
    return None


def takes_new_parameters(engine: SoakEngine) -> bool:
    """Are min_p and logit_bias served with speculation?"""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        parameters = SamplingParams(max_tokens=1, min_p=0.1, logit_bias={3: 1.0}, detokenize=False)
        engine.llm.generate({"prompt_token_ids": [3, 4]}, parameters, use_tqdm=False)
    except (ValueError, VLLMValidationError):
        return False
    return True


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(
    soak: Soak,
    first: int,
    num_requests: int,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
    wave: int = WAVE,
) -> Report:
    """Requests `first` to `first + num_requests` of a seed, wave by wave; a wave takes its number's mode."""
    for start in range(first, first + num_requests, wave):
        numbers = range(start, min(start + wave, first + num_requests))
        before = len(soak.report.wrong)
        soak.wave([f"{seed}-{number}" for number in numbers], MODES[start // wave % len(MODES)])
        for problem in soak.report.wrong[before:]:
            tell(problem)
        if soak.report.requests % 1000 == 0:
            tell(f"-- {soak.report.text()}")
    return soak.report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a request that failed, as SEED-NUMBER: its wave again, and then it alone")
    parser.add_argument("--check-every", type=int, default=10, help="steps between two looks at the cache")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), arguments.check_every)
        if arguments.only is None:
            report = run(
                soak, arguments.first, arguments.requests, arguments.seed, lambda line: print(line, flush=True)
            )
        else:
            seed, number = map(int, arguments.only.split("-"))
            run(soak, number - number % WAVE, WAVE, seed, lambda line: print("in its wave:", line))
            soak.wave([arguments.only], MODES[number // WAVE % len(MODES)])
            report = soak.report
    print(report.text())
    for line in report.ties:
        print("near tie:", line)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
