"""Where the time of one draft-verify cycle goes, on a CPU.

    python bench/profile_cycle.py --concurrency 1 --num-speculative-tokens 3
    python bench/profile_cycle.py --concurrency 8 --num-speculative-tokens 7 --native

Medians over the cycles of one run, in milliseconds. Parts are timed inside each other: "draft step" is the whole of
`propose`, and the lines below it are its parts. Wall clock, so only meaningful where kernels are synchronous.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

from setting import DRAFTER, circumstances, question, set_environment

#: label -> (how to reach the owner from the model runner, name of the method)
PARTS = {
    "target pass": ("", "_model_forward"),
    "target head": ("model", "compute_logits"),
    "accept or reject": ("", "_sample"),
    "draft step": ("drafter", "propose"),
    "  fuse features": ("drafter.model", "combine_hidden_states"),
    "  context K/V": ("drafter.model", "precompute_and_store_context_kv"),
    "  attention metadata": ("drafter", "build_per_group_and_layer_attn_metadata"),
    "  block pass": ("drafter.model", "forward"),
    "  head and argmax": ("drafter", "_greedy_sample"),
    "next tokens": ("drafter", "prepare_next_token_ids_padded"),
    "rejected rows": ("drafter", "prepare_inputs_padded"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--native", action="store_true", help="profile vLLM's own DFlash instead")
    options = parser.parse_args()
    set_environment()
    from vllm import LLM, SamplingParams

    from vllm_dflash.targets import target_folder

    llm = LLM(
        str(target_folder("smollm2")),
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=options.concurrency,
        speculative_config={
            "method": "dflash",
            "model": str(DRAFTER),
            "num_speculative_tokens": options.num_speculative_tokens,
        },
        additional_config={"dflash": {"enabled": not options.native, "draft_length": "fixed"}},
        use_tqdm_on_load=False,
    )
    conversations = [[{"role": "user", "content": question(1, i)}] for i in range(options.concurrency)]
    core = llm.llm_engine.engine_core.engine_core
    times: dict[str, list[float]] = defaultdict(list)
    llm.chat(conversations, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)  # warm up
    runner = core.model_executor.driver_worker.worker.model_runner
    for label, (path, name) in PARTS.items():
        owner = runner
        for attribute in filter(None, path.split(".")):
            owner = getattr(owner, attribute)
        time_calls(owner, name, times[label])
    time_calls(core, "step_fn", times["whole step"])
    llm.chat(conversations, SamplingParams(temperature=0, max_tokens=options.max_tokens), use_tqdm=False)
    report(times, options)


def time_calls(owner: Any, name: str, into: list[float]) -> None:
    """Time an object's method from now on."""
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - started)

    setattr(owner, name, timed)


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    facts = circumstances()
    print(f"{'native' if options.native else 'ours'}, K = {options.num_speculative_tokens}, ", end="")
    print(f"concurrency {options.concurrency}, {options.dtype}, ", end="")
    print(f"{facts['machine']}, vLLM {facts['vllm']}, {facts['commit']}")
    whole = statistics.median(times["whole step"])
    for label in ("whole step", *PARTS):
        calls = times[label][1:]  # the first is the prompt
        if calls:
            median = statistics.median(calls)
            print(f"{label:<24}{1000 * median:>9.2f} ms {100 * median / whole:>5.1f} %   n = {len(calls)}")


if __name__ == "__main__":
    main()
