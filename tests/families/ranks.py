"""Run in a process of its own: serve with several ranks, and print as JSON what they answered and what each one saw.

python tests/families/ranks.py '{"target": ..., "drafter": ..., "prompts": ..., "max_tokens": ..., "settings": {...}}'

"rounds" are several such jobs, one after the other. As one of several data-parallel ranks, which vLLM's own variables
VLLM_DP_* make it, it may have no prompts in a round, and with "exchange" it gets what vLLM's CPU backend lacks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import conftest  # noqa: E402, F401  (sets the environment)

#: Marks the line of the answer among those of vLLM.
ANSWER = "answer: "


def look(worker: Any) -> dict[str, Any]:
    """What one worker drafts with, and what its draft lengths have counted."""
    drafter = worker.model_runner.drafter
    counters = getattr(drafter.lengths.lengths, "counters", None)
    names = ("steps", "steps_off", "drafted", "verified", "accepted")
    return {
        "proposer": type(drafter).__module__,
        "model": type(drafter.model).__module__,
        "decides": type(drafter.lengths.lengths).__name__,
        "counters": {name: getattr(counters, name) for name in names},
    }


def all_gatherv(communicator: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """In place of `DeviceCommunicatorBase.all_gatherv`, which CPUs do not have: rows of all ranks, one rank's each."""
    import torch

    if isinstance(tensors, list):
        return [all_gatherv(communicator, tensor, dim, sizes) for tensor in tensors]
    assert dim == 0
    assert sizes is not None
    padded = tensors.new_zeros(max(sizes), *tensors.shape[1:])
    padded[: len(tensors)] = tensors
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def reduce_scatterv(communicator: Any, tensor: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """In place of `DeviceCommunicatorBase.reduce_scatterv`, likewise: the sum over ranks, this one's rows of it."""
    import torch

    assert dim == 0
    assert sizes is not None
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=communicator.device_group)
    first = sum(sizes[: communicator.rank_in_group])
    return total[first : first + sizes[communicator.rank_in_group]]


def supply_exchange() -> None:
    """Give vLLM's CPU backend the exchange between ranks that experts need."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def serve(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy answers to the prompts, and how many tokens have been drafted since the start."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        ignore_eos=True,
        max_tokens=job["max_tokens"],
        detokenize=False,
        extra_args=job.get("extra_args"),
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": metrics["vllm:spec_decode_num_draft_tokens"],
    }


def main(text: str) -> None:
    """Serve as the JSON says."""
    from vllm import LLM

    job = json.loads(text)
    if job.get("exchange"):
        supply_exchange()
    speculative = {"method": "dflash", "model": job["drafter"], "num_speculative_tokens": 7}
    llm = LLM(
        job["target"],
        speculative_config=speculative,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        num_gpu_blocks_override=16,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **job["settings"],
    )
    rounds = [serve(llm, job | changes) for changes in job.get("rounds", [{}])]
    answer = rounds[0] | {"rounds": rounds, "workers": llm.collective_rpc(look)}
    print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
