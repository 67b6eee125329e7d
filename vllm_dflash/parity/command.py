"""`vllm-dflash parity`: is text with drafts the target's own, token by token or draw by draw?

    greedy     answers without drafts and with K of them; each first difference is a tie or a BUG: greedy.py, compare.py
    sampling   drawn tokens against the distribution they must have, by chi-square: sampling.py, oracle.py, fit.py

Every engine runs in a process of its own (child.py, answers.py), one after the other. The exit code is 1 on a bug.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm_dflash.parity.compare import EPSILON
from vllm_dflash.parity.oracle import Sampling
from vllm_dflash.parity.prompts import load_prompts
from vllm_dflash.parity.runs import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    shown = "(default %(default)s)"
    parser.add_argument("--model", required=True, help="target: a folder or Hub name")
    parser.add_argument("--draft", required=True, help="DFlash drafter: a folder or Hub name")
    parser.add_argument("--prompts", metavar="F", help="rows with prompt, messages or prompt_ids; default: built in")
    parser.add_argument("--num-prompts", type=_positive, metavar="N", help="spread over the rows (50; sampling: 3)")
    parser.add_argument("--max-prompt-tokens", type=_positive, metavar="N", help="leave longer prompts out")
    parser.add_argument("--no-chat-template", action="store_true", help="text as it is")
    parser.add_argument(
        "--num-speculative-tokens", type=_positive, nargs="+", metavar="K", help="runs (default 1 3 7 15; sampling: 3)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end of the answer")
    parser.add_argument("--draft-length", choices=("fixed", "auto"), default="fixed", help=f"see README {shown}")
    parser.add_argument("--dtype", help="of the target, as vLLM takes it (auto; sampling: float32, as the oracle)")
    parser.add_argument("--max-num-seqs", type=_positive, metavar="N", help="requests at a time (8; sampling: 64)")
    parser.add_argument("--seed", type=int, default=0, help=f"of the engines {shown}")
    parser.add_argument("--engine", type=_mapping, default={}, metavar="JSON", help="more arguments of vLLM's LLM")
    parser.add_argument(
        "--speculative", type=_mapping, default={}, metavar="JSON", help="more keys of vLLM's speculative_config"
    )
    parser.add_argument("--work", metavar="FOLDER", help="keep answers here, and go on with those that are there")
    parser.add_argument("--json", metavar="FILE", help="write the report")

    greedy = parser.add_argument_group("greedy answers")
    greedy.add_argument("--max-tokens", type=_positive, default=256, help=f"tokens per answer {shown}")
    greedy.add_argument("--epsilon", type=float, help=f"largest distance of a tie; default by dtype: {EPSILON}")
    greedy.add_argument("--score-dtype", help="of the engine that scores differences; default: the target's")
    greedy.add_argument("--logprobs", action="store_true", help="record log-probabilities in the runs too")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--sampling", action="store_true", help="test drawn tokens instead")
    sampling.add_argument("--num-samples", type=_positive, default=2000, help=f"answers per prompt {shown}")
    sampling.add_argument("--num-positions", type=_positive, default=4, help=f"first tokens looked at {shown}")
    for parameter in fields(Sampling):
        kind = {"int": int, "float": float}.get(str(parameter.type), _mapping)
        sampling.add_argument(f"--{parameter.name.replace('_', '-')}", type=kind, help="as vLLM's SamplingParams")


def run(options: argparse.Namespace) -> int:
    """Compare and report; 1 on a bug, else 0."""
    sampling = sampling_of(options)
    with _exit_at_sigterm(), _work_folder(options.work) as work:
        if options.json and not Path(options.json).resolve().parent.is_dir():
            raise ValueError(f"'{options.json}' cannot be written: its folder does not exist; make it first.")
        requested = options.num_speculative_tokens or ([3] if options.sampling else [1, 3, 7, 15])
        drafts, notes = usable_drafts(options.model, options.draft, requested)
        for note in notes:
            print(note)
        if options.sampling:
            return _run_sampling(options, sampling, work, drafts, notes)
        return _run_greedy(options, work, drafts, notes)


def sampling_of(options: argparse.Namespace) -> Sampling:
    """Sampling parameters as given.

    Raises:
        ValueError: they are given without --sampling, or leave nothing to test.
    """
    given = {p.name: getattr(options, p.name) for p in fields(Sampling) if getattr(options, p.name) is not None}
    if given and not options.sampling:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{names}: greedy answers have no such parameters; add --sampling to test drawn ones.")
    if options.sampling and options.num_positions < 2:
        raise ValueError("--num-positions 1 leaves only the token that is drawn before any draft; give at least 2.")
    if given.get("temperature") == 0:
        raise ValueError("--temperature 0 draws nothing; leave --sampling out to compare greedy answers.")
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): float(bias) for token, bias in given["logit_bias"].items()}
    return Sampling(**given)


def _run_greedy(options: argparse.Namespace, work: Path, drafts: list[int], notes: list[str]) -> int:
    from vllm_dflash.parity.greedy import compare_greedy
    from vllm_dflash.parity.report import greedy_report, print_greedy, write_report

    sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": options.ignore_eos}
    if options.logprobs:
        sampling["logprobs"] = 5
    settings = _run(options, work, drafts, sampling, 50, 8, options.max_tokens)
    comparisons = compare_greedy(settings, drafts, options.epsilon, options.score_dtype)
    report = greedy_report(settings, comparisons, notes, options)
    print_greedy(report)
    write_report(options.json, report)
    return 1 if any(comparison.num_bugs for comparison in comparisons) else 0


def _run_sampling(
    options: argparse.Namespace, sampling: Sampling, work: Path, drafts: list[int], notes: list[str]
) -> int:
    from vllm_dflash.parity.report import print_sampling, sampling_report, write_report
    from vllm_dflash.parity.sampling import compare_samples
    from vllm_dflash.parity.target_logits import TargetLogits

    parameters = sampling.to_dict() | {"ignore_eos": options.ignore_eos}
    settings = _run(options, work, drafts, parameters, 3, 64, options.num_positions)
    drawn = compare_samples(
        settings, drafts, options.num_samples, options.num_positions, sampling, lambda: TargetLogits(options.model)
    )
    report = sampling_report(settings, drawn, notes, options)
    print_sampling(report)
    write_report(options.json, report)
    return 1 if any(one.is_bug for one in drawn) else 0


def usable_drafts(model: str, draft: str, requested: list[int]) -> tuple[list[int], list[str]]:
    """K of each run without repeats, and a sentence for each that is not what was asked for.

    Raises:
        ValueError: the drafter cannot be read or is not for this target.
        FileNotFoundError: there is no such target.
    """
    from vllm_dflash.speculative_config import read_drafter
    from vllm_dflash.training.target_features import load_target_config, target_shape

    shape = target_shape(model, load_target_config(model))
    config = read_drafter({"method": "dflash", "model": draft}, None, None)
    if config is None:  # a variant that vLLM serves itself
        return sorted(set(requested)), []
    config.check_target(shape)
    used, notes = [], []
    for wanted in dict.fromkeys(requested):
        possible, warning = config.resolve_num_speculative_tokens(wanted)
        if warning is not None:
            notes.append(warning + (f" That run is the one of K = {possible}." if possible in used else ""))
        if possible not in used:
            used.append(possible)
    return used, notes


def _run(
    options: argparse.Namespace,
    work: Path,
    drafts: list[int],
    sampling: dict[str, Any],
    num_prompts: int,  # where the user names no number
    max_num_seqs: int,  # the same
    max_tokens: int,
) -> Run:
    count = options.num_prompts or num_prompts
    chat = not options.no_chat_template
    prompts = load_prompts(options.model, options.prompts, count, chat, options.max_prompt_tokens)
    if len(prompts) < count and options.num_prompts:
        print(f"There are {len(prompts)} prompts, fewer than the {count} asked for.")
    return Run(
        model=options.model,
        draft=options.draft,
        work=work,
        prompts=prompts,
        sampling=sampling,
        max_tokens=max_tokens,
        dtype=options.dtype or ("float32" if options.sampling else "auto"),
        max_num_seqs=options.max_num_seqs or max_num_seqs,
        draft_length=options.draft_length,
        seed=options.seed,
        largest_draft=max(drafts),
        engine=options.engine,
        speculative=options.speculative,
    )


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Leave by an exception, so that engines end with us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _work_folder(given: str | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="vllm-dflash-parity-") as folder:
            yield Path(folder)
    else:
        Path(given).mkdir(parents=True, exist_ok=True)
        yield Path(given)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small; give at least 1.")
    return number


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mapping; give one like '{{\"block_size\": 32}}'.")
    return value
