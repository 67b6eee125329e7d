"""tau as vLLM serves it: real requests, real verification, the lengths that vLLM accepted in every cycle of each.

vLLM counts drafted tokens that the target agreed with before it looks for the end of the answer, so also those behind
it, which nobody gets. They are taken off here; vLLM's own counters (`vllm:spec_decode_*`) keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.training.acceptance import DocumentAcceptance
from vllm_dflash.training.target_features import load_target_config


@dataclass(frozen=True)
class Prompt:
    """A question for the target."""

    id: str
    task: str
    prompt: str
    token_ids: list[int]


@dataclass(frozen=True)
class Served:
    """What became of a prompt."""

    answer: dict[str, Any]  # a row as `regenerate` writes it
    acceptance: DocumentAcceptance


def serve(
    target: str, drafter: str, prompts: Sequence[Prompt], num_drafted: int | None, max_tokens: int, batch_size: int
) -> list[Served]:
    """Have vLLM answer all prompts greedily with DFlash, up to `batch_size` at a time.

    Raises:
        ValueError: drafter and target do not fit (see plugin), or a prompt is too long for the target.
    """
    import torch
    from vllm import LLM, SamplingParams

    max_model_len = _max_model_len(target, prompts, max_tokens)
    speculative: dict[str, Any] = {"method": "dflash", "model": drafter}
    if num_drafted is not None:
        speculative["num_speculative_tokens"] = num_drafted
    llm = LLM(
        target,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        enforce_eager=not torch.cuda.is_available(),
        max_model_len=max_model_len,
        max_num_seqs=batch_size,
        speculative_config=speculative,
        additional_config={"dflash": {"draft_length": "fixed"}},  # the drafter is measured, not what pays here
        per_request_spec_decode_metrics="detailed",
    )
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = llm.generate([{"prompt_token_ids": p.token_ids} for p in prompts], sampling)
    return [_served(prompt, output.outputs[0]) for prompt, output in zip(prompts, outputs)]


def write_answers(path: Path, served: Sequence[Served]) -> None:
    """Keep what was served as rows that `eval` and `train` read."""
    import json

    from vllm_dflash.atomic import write_atomically

    rows = [json.dumps(one.answer) for one in served]
    write_atomically(path, lambda temporary: temporary.write_text("\n".join(rows) + "\n"))


def without_tokens_behind_the_end(accepted: Sequence[int], answer_len: int) -> tuple[int, ...]:
    """Accepted tokens of each cycle, less those behind the end of an answer of `answer_len` tokens.

    The first token comes from the prompt's pass, then a cycle with r accepted tokens gives r + 1, the last of which
    is the target's own.
    """
    behind_the_end = 1 + sum(run + 1 for run in accepted) - answer_len
    if not accepted or behind_the_end <= 0:
        return tuple(accepted)
    last = accepted[-1]
    return (*accepted[:-1], min(last, last + 1 - behind_the_end))


def _max_model_len(target: str, prompts: Sequence[Prompt], max_tokens: int) -> int:
    limit = load_target_config(target).get_text_config().max_position_embeddings
    longest = max(prompts, key=lambda p: len(p.token_ids))
    if len(longest.token_ids) >= limit:
        raise ValueError(
            f"prompt '{longest.id}' has {len(longest.token_ids)} tokens, but target '{target}' takes {limit} with the "
            f"answer; leave it out."
        )
    return min(len(longest.token_ids) + max_tokens + 32, limit)  # a block has to fit behind the last token


def _served(prompt: Prompt, completion: Any) -> Served:
    answer = {
        "id": prompt.id,
        "source": prompt.task,
        "prompt": prompt.prompt,
        "response": completion.text,
        "finish": completion.finish_reason,
        "prompt_ids": prompt.token_ids,
        "response_ids": list(completion.token_ids),
    }
    measured = completion.spec_decode_metrics
    runs = without_tokens_behind_the_end(measured.per_step_accepted, len(completion.token_ids))
    return Served(answer, DocumentAcceptance(prompt.id, prompt.task, runs, measured.num_spec_tokens))
