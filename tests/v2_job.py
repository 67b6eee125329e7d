"""Run by engine/test_v2_runner.py in a process of its own: engines of vLLM's V2 runner, one JSON line at the end."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton_interpreter

PROMPTS = [[3, 5, 7], list(range(20, 60))]
K, TOKENS = 7, 6
SETTINGS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256,
    "seed": 0, "skip_tokenizer_init": True, "use_tqdm_on_load": False,
}  # fmt: skip


class Recorded:
    """A speculating engine whose steps are kept: K, passes over blocks, drafts by request and tokens known."""

    def __init__(self, target: str, drafter: str) -> None:
        from vllm import LLM

        speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": K}
        self.llm = LLM(target, speculative_config=speculative, **SETTINGS)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.speculator = self.runner.speculator
        self.steps: list[dict[str, Any]] = []
        self._propose, self._run_model = self.speculator.propose, self.speculator._run_model
        self.speculator.propose, self.speculator._run_model = self.propose, self.run_model
        self.num_passes = 0

    def run_model(self, *args: Any, **named: Any) -> Any:
        self.num_passes += 1
        return self._run_model(*args, **named)

    def propose(self, batch: Any, *args: Any, **named: Any) -> Any:
        passes = self.num_passes
        drafts = self._propose(batch, *args, **named)
        length = named["num_speculative_tokens"]
        tokens = [row[:length] for row in drafts.tolist()]
        verified = {}
        for request, rows in zip(batch.req_ids, batch.num_scheduled_tokens.tolist()):
            verified[request.partition("-")[0]] = rows
        self.steps.append({"k": length, "passes": self.num_passes - passes, "drafts": tokens, "rows": verified})
        return drafts

    def ask(self, lengths: list[int] | None, extra_args: dict[str, Any] | None = None) -> dict[str, Any]:
        from vllm_dflash.draft_length import DraftRows, ScheduledStepLengths
        from vllm_dflash.step_lengths import StepLengths

        own = self.scheduler.dynamic_sd_lookup
        if lengths is not None:
            chooser = ScheduledStepLengths(lengths)
            self.scheduler.dynamic_sd_lookup = StepLengths(self.scheduler, chooser, (0, 1, 3, K), DraftRows(K))
        self.steps = []
        texts = texts_of(self.llm, extra_args)
        counters = self.scheduler.dynamic_sd_lookup.chooser.counters
        self.scheduler.dynamic_sd_lookup = own
        return {"texts": texts, "steps": self.steps, "counted": counters.steps}


def texts_of(llm: Any, extra_args: dict[str, Any] | None = None) -> list[list[int]]:
    """Greedy texts of all prompts."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, extra_args=extra_args
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(target: str, drafter: str) -> None:
    triton_interpreter.install()
    from vllm import LLM

    plain = texts_of(LLM(target, **SETTINGS))
    served = Recorded(target, drafter)
    report = {
        "runner": type(served.runner).__module__,
        "speculator": type(served.speculator).__name__,
        "table": served.scheduler.vllm_config.speculative_config.num_speculative_tokens_per_batch_size,
        "chooser": type(served.scheduler.dynamic_sd_lookup.chooser).__name__,
        "plain": plain,
        "whole": served.ask([K]),
        "changing": served.ask([K, 0, 3, 0, K]),
        "bounded": served.ask([3], {"dflash_max_draft": 1}),
        "decided": served.ask(None),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
