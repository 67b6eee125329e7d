"""Run in a process of its own: serve with several ranks, and print as JSON what they answered and what each one saw.

python tests/families/ranks.py '{"target": ..., "drafter": ..., "prompts": ..., "max_tokens": ..., "settings": {...}}'
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


def main(text: str) -> None:
    """Serve as the JSON says."""
    from vllm import LLM, SamplingParams

    job = json.loads(text)
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
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=job["max_tokens"], detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    answer = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": metrics["vllm:spec_decode_num_draft_tokens"],
        "workers": llm.collective_rpc(look),
    }
    print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
