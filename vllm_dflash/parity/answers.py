"""One vLLM engine in a process of its own: `python -m vllm_dflash.parity.answers JOB.json`.

JOB.json:  {"engine": arguments of LLM, "sampling": of SamplingParams, "max_num_waiting": n, "parent": process id,
            "requests": [{"id", "prompt_ids", "sampling": more of SamplingParams}], "output": FILE}
FILE:      {"facts": what the engine says about itself, "answers": {id: see `_answer`}}

FILE is renamed into place whole, every second in which an answer was finished. Requests whose answers stand in it
already are not asked again, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SECONDS_BETWEEN_WRITES = 1.0


def main(job_file: str) -> int:
    """Answer every request of the job."""
    job = json.loads(Path(job_file).read_text())
    output = Path(job["output"])
    written = json.loads(output.read_text()) if output.exists() else {"answers": {}}
    from vllm import LLM

    # A seed of its own for every start: what an interrupted run has drawn must not be drawn once more.
    seed = job["engine"]["seed"] + len(written["answers"])
    llm = LLM(**job["engine"] | {"seed": seed})
    written["facts"] = facts(llm)
    open_requests = [request for request in job["requests"] if request["id"] not in written["answers"]]
    last_write = time.monotonic()
    for finished in answer_all(llm, job["sampling"], open_requests, job["max_num_waiting"]):
        if os.getppid() != job["parent"]:  # nobody waits for the answers, and another run may write the same file
            sys.exit(f"process {job['parent']}, which asked for these answers, is gone.")
        written["answers"] |= finished
        if finished and time.monotonic() - last_write > _SECONDS_BETWEEN_WRITES:
            _write(output, written)
            last_write = time.monotonic()
    _write(output, written)
    return 0


def answer_all(
    llm: Any, sampling: dict[str, Any], requests: list[dict[str, Any]], max_num_waiting: int
) -> Iterator[dict[str, dict[str, Any]]]:
    """Answer requests (see the module's first lines); yields after every step what it finished, by id."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, waiting, running = llm.llm_engine, requests[::-1], 0
    while waiting or running:
        while waiting and running < max_num_waiting:
            request = waiting.pop()
            settings = sampling | request.get("sampling", {})
            if "logit_bias" in settings:  # JSON has no whole numbers as keys
                settings["logit_bias"] = {int(token): bias for token, bias in settings["logit_bias"].items()}
            parameters = SamplingParams(**settings, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(request["id"], {"prompt_token_ids": request["prompt_ids"]}, parameters)
            running += 1
        finished = {output.request_id: _answer(output.outputs[0]) for output in engine.step() if output.finished}
        running -= len(finished)
        yield finished


def _answer(completion: Any) -> dict[str, Any]:
    """An answer as it is kept: token ids, accepted and drafted tokens per cycle, log-probabilities if asked for."""
    answer = {"token_ids": list(completion.token_ids), "finish": completion.finish_reason}
    measured = getattr(completion, "spec_decode_metrics", None)
    if measured is not None:
        answer |= {"accepted": list(measured.per_step_accepted), "drafted": list(measured.per_step_drafted)}
    if completion.logprobs is not None:
        answer["logprobs"] = [
            {str(token): entry.logprob for token, entry in place.items()} for place in completion.logprobs
        ]
    return answer


def facts(llm: Any) -> dict[str, Any]:
    """What the engine settled on."""
    config = llm.llm_engine.vllm_config
    speculative = config.speculative_config
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else None,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    from vllm_dflash.atomic import write_atomically

    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(content)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
