"""`vllm-dflash demo`: the same questions with and without DFlash, in two vLLM engines of one process.

Both engines answer each question in turn, so that whatever else the machine does falls on both alike.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

QUESTIONS = (
    "A baker sells 24 muffins in the morning and half as many in the afternoon. Each muffin costs $3. How much money "
    "does the baker earn that day?",
    "Tom has 5 boxes with 12 pencils in each. He gives 17 pencils to his sister. How many pencils does he have left?",
    "A train travels 60 miles per hour for 2 hours and then 40 miles per hour for 3 hours. How many miles does it "
    "travel in total?",
    "Anna reads 15 pages every day. Her book has 225 pages. How many weeks does she need to finish it?",
)
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."

#: Plain speeds that differ between questions by more than this factor mean that the machine is busy.
STEADY = 1.5

#: Read by vLLM at import. One process holds both engines; float32 makes equal text a matter of arithmetic, not luck.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # vLLM would leave one core idle, half of a small machine
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Answer:
    """One question's answer by one engine."""

    text: str
    token_ids: tuple[int, ...]
    seconds: float
    num_cycles: int  # target passes after the prompt's, with drafts or without
    num_accepted: int


def run_demo(model: str | None, draft_model: str | None, num_speculative_tokens: int, max_tokens: int) -> int:
    """Answer, compare, print; returns 0 if every text is the same with DFlash, else 1."""
    from vllm_dflash.targets import target_folder

    # vLLM logs to both standard streams; the console keeps the terminal while they go to a file.
    console = Console(file=os.fdopen(os.dup(1), "w", encoding="utf-8"))
    target = model or str(target_folder("smollm2"))
    drafter = draft_model or str(example_drafter())
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": num_speculative_tokens}
    console.print(f"target   {target}\ndrafter  {drafter}\nK        {num_speculative_tokens} drafted tokens per cycle")

    descriptor, log = tempfile.mkstemp(prefix="vllm-dflash-demo-", suffix=".log")
    with _standard_streams_to(descriptor, log):
        plain = _start(console, "without DFlash", target, None, max_tokens)
        dflash = _start(console, "with DFlash", target, speculative, max_tokens)
        pairs = []
        for number, question in enumerate(QUESTIONS, 1):
            with console.status(f"question {number} of {len(QUESTIONS)} ..."):
                pairs.append((_ask(plain, question, max_tokens), _ask(dflash, question, max_tokens)))
        acceptance = _acceptance_by_position(dflash)
    console.print()
    console.print(_table(pairs))
    console.print(f"\nFirst answer: {pairs[0][1].text.strip()[:200]} ...\n", markup=False, highlight=False)
    console.print(_advice(pairs, acceptance, num_speculative_tokens), highlight=False)
    console.print(f"vLLM's log: {log}", highlight=False)
    return 0 if all(without.token_ids == with_.token_ids for without, with_ in pairs) else 1


def example_drafter() -> Path:
    """Folder of the drafter that ships with the repository.

    Raises:
        FileNotFoundError: this is an installation without the repository around it.
    """
    folder = Path(__file__).resolve().parent.parent / "examples" / "drafters" / "smollm2-135m-instruct-dflash"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the example drafter is not at {folder}; pass --draft-model, or run from a clone of the repository."
        )
    return folder


def _start(console: Console, label: str, target: str, speculative: dict[str, Any] | None, max_tokens: int) -> Any:
    """An engine that has produced its first token."""
    started = time.perf_counter()
    with console.status(f"starting vLLM {label} ..."):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm import LLM

            llm = LLM(
                target,
                dtype="float32",
                enforce_eager=True,
                max_model_len=512,
                max_num_seqs=4,
                disable_log_stats=False,
                speculative_config=speculative,
                use_tqdm_on_load=False,
            )
        _ask(llm, "Say hello.", 1)
    console.print(f"vLLM {label}: first token after {time.perf_counter() - started:.0f} s", highlight=False)
    return llm


def _ask(llm: Any, question: str, max_tokens: int) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    accepted = _num_accepted(llm)
    started = time.perf_counter()
    [output] = llm.chat([{"role": "user", "content": question + INSTRUCTION}], sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    accepted = _num_accepted(llm) - accepted
    completion = output.outputs[0]
    num_tokens = len(completion.token_ids)
    # vLLM also counts accepted tokens behind the end of the answer, at most one pass's.
    return Answer(completion.text, tuple(completion.token_ids), seconds, max(num_tokens - 1 - accepted, 1), accepted)


def _num_accepted(llm: Any) -> int:
    """Accepted drafts since the engine started."""
    return _counter(llm, "vllm:spec_decode_num_accepted_tokens")


def _counter(llm: Any, name: str) -> int:
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return int(values.get(name, 0))


def _acceptance_by_position(llm: Any) -> list[float]:
    drafts = _counter(llm, "vllm:spec_decode_num_drafts")
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            return [count / max(drafts, 1) for count in metric.values]
    return []


def _table(pairs: list[tuple[Answer, Answer]]) -> Table:
    table = Table(title="greedy decoding, one request at a time")
    for column in (
        "question",
        "tokens",
        "cycles",
        "tau",
        "tok/s without",
        "tok/s with",
        "speed-up",
        "same text",
    ):
        table.add_column(column, justify="right")
    for number, (without, with_) in enumerate(pairs, 1):
        table.add_row(str(number), *_row([(without, with_)]), "yes" if without.token_ids == with_.token_ids else "NO")
    same = sum(without.token_ids == with_.token_ids for without, with_ in pairs)
    table.add_section()
    table.add_row("all", *_row(pairs), "yes" if same == len(pairs) else f"{same} of {len(pairs)}")
    return table


def _row(pairs: list[tuple[Answer, Answer]]) -> list[str]:
    tokens = sum(len(with_.token_ids) for _, with_ in pairs)
    cycles = sum(with_.num_cycles for _, with_ in pairs)
    rate_without = statistics.median(len(without.token_ids) / without.seconds for without, _ in pairs)
    rate_with = statistics.median(len(with_.token_ids) / with_.seconds for _, with_ in pairs)
    return [
        str(tokens),
        str(cycles),
        f"{_tau(pairs):.2f}",
        f"{rate_without:.1f}",
        f"{rate_with:.1f}",
        f"{_speed_up(pairs):.2f}x",
    ]


def _speed_up(pairs: list[tuple[Answer, Answer]]) -> float:
    """Median over questions, so that one question during which the machine was busy does not decide."""
    return statistics.median(
        (len(with_.token_ids) / with_.seconds) / (len(without.token_ids) / without.seconds) for without, with_ in pairs
    )


def _tau(pairs: list[tuple[Answer, Answer]]) -> float:
    cycles = sum(with_.num_cycles for _, with_ in pairs)
    return 1 + sum(with_.num_accepted for _, with_ in pairs) / max(cycles, 1)


def _advice(pairs: list[tuple[Answer, Answer]], acceptance: list[float], num_drafted: int) -> str:
    rates = [len(without.token_ids) / without.seconds for without, _ in pairs]
    slots = ", ".join(f"{rate:.0%}" for rate in acceptance)
    why = (
        f"In a cycle the drafter guesses up to {num_drafted} tokens at once from the target's own hidden states; the "
        f"target checks them in one pass and keeps the first right ones (accepted by slot: {slots}), so "
        f"{_tau(pairs):.2f} tokens cost one pass."
    )
    if max(rates) > STEADY * min(rates):
        return (
            f"{why}\nAdvice: plain vLLM's own speed varied from {min(rates):.1f} to {max(rates):.1f} tok/s, so "
            f"something else is using this machine; run the demo again when it is idle."
        )
    if _speed_up(pairs) >= 1:
        return f"{why}\nAdvice: this pays here; leave it on, and train a drafter on your own answers for more."
    return (
        f"{why}\nAdvice: checking drafts costs this machine about what {_tau(pairs):.2f} tokens per pass save, so few "
        f"are made; a drafter trained on your own answers is right more often."
    )


@contextlib.contextmanager
def _standard_streams_to(log_descriptor: int, log: str) -> Iterator[None]:
    """Send file descriptors 1 and 2, which C++ code also writes to, into a log; on an error show its last lines."""
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for descriptor in saved:
        os.dup2(log_descriptor, descriptor)
    try:
        yield
    except BaseException:
        _restore(saved)
        print("".join(Path(log).read_text().splitlines(keepends=True)[-20:]), file=sys.stderr)
        raise
    else:
        _restore(saved)


def _restore(saved: dict[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, copy in saved.items():
        os.dup2(copy, descriptor)
        os.close(copy)
