"""A vLLM engine in this process that records what is drafted for each request in each cycle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Draft:
    """What one request got in one cycle."""

    anchor_position: int  # position of the last known token
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished request."""

    prompt_ids: list[int]
    token_ids: list[int]
    drafts: list[Draft]
    num_cached_tokens: int  # prompt tokens taken from the prefix cache

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the target agreed with, recomputed from the texts."""
        tokens, accepted = self.prompt_ids + self.token_ids, 0
        for draft in self.drafts:
            following = tokens[draft.anchor_position + 1 :]
            matches = [a == b for a, b in zip(draft.tokens, following)]
            accepted += matches.index(False) if False in matches else len(matches)
        return accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per cycle with drafts, bonus token included."""
        used = [draft for draft in self.drafts if draft.tokens]
        return 1 + self.num_accepted / max(len(used), 1)


class Engine:
    """`LLM` with recording. `num_drafted` None means K from the checkpoint; `drafter` None means no speculation."""

    def __init__(
        self,
        target: Path,
        drafter: Path | None = None,
        num_drafted: int | None = None,
        native: bool = False,
        draft_length: str = "fixed",
        speculative: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        from vllm import LLM

        if drafter is not None:
            speculative = {"method": "dflash", "model": str(drafter), **(speculative or {})}
            if num_drafted is not None:
                speculative["num_speculative_tokens"] = num_drafted
        settings: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "seed": 0,
            "use_tqdm_on_load": False,
            "skip_tokenizer_init": True,
            "additional_config": {"dflash": {"enabled": not native, "draft_length": draft_length}},
        }
        settings |= arguments
        # Room for every request at full length and no more: the engines of a session are all alive at once, and
        # vLLM would give each of them a gigabyte.
        pages_per_request = -(-settings["max_model_len"] // settings.get("block_size", 128))
        settings.setdefault("num_gpu_blocks_override", 1 + settings["max_num_seqs"] * pages_per_request)
        self.llm = LLM(str(target), speculative_config=speculative, **settings)
        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self._drafts: dict[str, list[Draft]] = {}
        self._record(core.model_executor)

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Result]:
        """Answers in order; greedy, exactly `max_tokens` long, unless `sampling` says otherwise."""
        from vllm import SamplingParams

        parameters = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | sampling
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        self._drafts.clear()
        outputs = self.llm.generate(inputs, SamplingParams(**parameters), use_tqdm=False)
        return [self._result(output) for output in outputs]

    def generate_together(self, prompts: list[list[int]], budgets: list[int], arrivals: list[int]) -> list[Result]:
        """Greedy answers of requests with token budgets of their own, each arriving after so many engine steps."""
        from vllm import SamplingParams

        llm_engine = self.llm.llm_engine
        self._drafts.clear()
        finished: dict[str, Any] = {}
        waiting = sorted(zip(arrivals, range(len(prompts))))
        step = 0
        while waiting or llm_engine.has_unfinished_requests():
            while waiting and waiting[0][0] <= step:
                _, index = waiting.pop(0)
                sampling = SamplingParams(temperature=0, max_tokens=budgets[index], ignore_eos=True, detokenize=False)
                llm_engine.add_request(f"together-{index}", {"prompt_token_ids": prompts[index]}, sampling)
            finished |= {output.request_id: output for output in llm_engine.step() if output.finished}
            step += 1
        return [self._result(finished[f"together-{index}"]) for index in range(len(prompts))]

    def token_ids(self, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        return [result.token_ids for result in self.generate(prompts, **sampling)]

    def _result(self, output: Any) -> Result:
        return Result(
            list(output.prompt_token_ids),
            list(output.outputs[0].token_ids),
            self._drafts.get(output.request_id, []),
            output.num_cached_tokens,
        )

    def _record(self, executor: Any) -> None:
        take = executor.take_draft_token_ids

        def take_and_record() -> Any:
            drafted = take()
            if drafted is not None:
                batch = self.runner.input_batch
                for request, tokens in zip(drafted.req_ids, drafted.draft_token_ids):
                    known = int(batch.num_tokens_no_spec[batch.req_id_to_index[request]])
                    # vLLM appends a random suffix to the id that the caller knows.
                    external = request.rpartition("-")[0] or request
                    self._drafts.setdefault(external, []).append(Draft(known - 1, [int(token) for token in tokens]))
            return drafted

        executor.take_draft_token_ids = take_and_record
