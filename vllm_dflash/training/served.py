"""tau as vLLM serves it: real requests, real verification, vLLM's own counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

_NUM_DRAFTS, _NUM_ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Prompt:
    """A question for the target."""

    id: str
    task: str
    prompt: str
    token_ids: list[int]


@dataclass(frozen=True)
class ServedBatch:
    """Some prompts of one task that were served together."""

    task: str
    answers: list[dict[str, Any]]  # rows as `regenerate` writes them
    num_cycles: int
    num_accepted: int
    accepted_by_position: list[int]


def serve(
    target: str, drafter: str, prompts: Sequence[Prompt], num_drafted: int | None, max_tokens: int, batch_size: int
) -> list[ServedBatch]:
    """Have vLLM answer all prompts greedily with DFlash, `batch_size` of a task at a time.

    vLLM counts accepted tokens per engine, not per request, so a batch is the smallest unit that can be told apart.

    Raises:
        ValueError: drafter and target do not fit; see plugin.
    """
    import torch
    from vllm import LLM, SamplingParams

    speculative: dict[str, Any] = {"method": "dflash", "model": drafter}
    if num_drafted is not None:
        speculative["num_speculative_tokens"] = num_drafted
    llm = LLM(
        target,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        enforce_eager=not torch.cuda.is_available(),
        max_model_len=max(len(p.token_ids) for p in prompts) + max_tokens + 32,
        max_num_seqs=batch_size,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    served, before = [], _counters(llm)
    with tqdm(total=len(prompts), unit="prompt") as progress:
        for batch in _batches(prompts, batch_size):
            outputs = llm.generate([{"prompt_token_ids": p.token_ids} for p in batch], sampling, use_tqdm=False)
            after = _counters(llm)
            change = [b - a for a, b in zip(before, after)]
            answers = [_row(prompt, output.outputs[0]) for prompt, output in zip(batch, outputs)]
            served.append(ServedBatch(batch[0].task, answers, change[0], change[1], change[2:]))
            before = after
            progress.update(len(batch))
    return served


def write_answers(path: Path, served: Sequence[ServedBatch]) -> None:
    """Keep what was served as rows that `eval` and `train` read."""
    import json

    from vllm_dflash.training.atomic import write_atomically

    rows = [json.dumps(row) for batch in served for row in batch.answers]
    write_atomically(path, lambda temporary: temporary.write_text("\n".join(rows) + "\n"))


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    by_task = defaultdict(list)
    for prompt in prompts:
        by_task[prompt.task].append(prompt)
    for group in by_task.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _row(prompt: Prompt, completion: Any) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "source": prompt.task,
        "prompt": prompt.prompt,
        "response": completion.text,
        "finish": completion.finish_reason,
        "prompt_ids": prompt.token_ids,
        "response_ids": list(completion.token_ids),
    }


def _counters(llm: Any) -> list[int]:
    """Cycles, accepted tokens, and accepted tokens of each slot, since the engine started."""
    found: dict[str, list[int]] = {_NUM_DRAFTS: [0], _NUM_ACCEPTED: [0], _BY_POSITION: []}
    for metric in llm.get_metrics():
        if metric.name in found:
            values = metric.values if hasattr(metric, "values") else [metric.value]
            found[metric.name] = [int(v) for v in values]
    return [*found[_NUM_DRAFTS], *found[_NUM_ACCEPTED], *found[_BY_POSITION]]
