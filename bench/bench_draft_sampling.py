"""Acceptance of drafts that are taken, drawn, or whichever is measured to be better, by temperature, in one run.

    python bench/bench_draft_sampling.py --data gsm8k.jsonl mt_bench.jsonl

One engine with the shipped drafter and a fixed K; each setting answers the same prompts with the same number of tokens,
sampled without a seed. Rows of `--data` have a "prompt"; without it, the word problems of bench/setting.py are asked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from setting import DRAFTER, append_csv, circumstances, question, set_environment

WAYS = {"taken": (False, False), "drawn": (True, False), "auto": (False, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", type=Path, default=[], help="prompts, as JSON lines")
    parser.add_argument("--prompts", type=int, default=24, help="of each file (default 24)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--num-speculative-tokens", type=int, default=3, metavar="K")
    options = parser.parse_args()
    set_environment()

    served = Served(options.num_speculative_tokens)
    rows = []
    for name, prompts in prompt_sets(options.data, options.prompts).items():
        for temperature in options.temperatures:
            for way, (is_drawn, chooses) in WAYS.items():
                tau, cycles = served.measure(prompts, temperature, options, is_drawn, chooses)
                print(f"{name:<12} T={temperature:<4} {way:<6} tau {tau:.3f} in {cycles} cycles", flush=True)
                setting = {"data": name, "temperature": temperature, "top_p": options.top_p, "drafts": way}
                result = {"tau": f"{tau:.4f}", "cycles": cycles, "prompts": len(prompts)}
                rest = {"K": options.num_speculative_tokens, "max_tokens": options.max_tokens}
                rows.append(setting | result | rest | circumstances())
    append_csv("draft_sampling", rows)


def prompt_sets(files: list[Path], count: int) -> dict[str, list[str]]:
    """The first prompts of each file, by its name."""
    if not files:
        return {"problems": [question(i, i) for i in range(count)]}
    return {file.stem: [json.loads(line)["prompt"] for line in file.read_text().splitlines()[:count]] for file in files}


class Served:
    """One engine in this process, whose way of drafting is changed between measurements."""

    def __init__(self, num_speculative_tokens: int) -> None:
        from vllm import LLM

        from vllm_dflash.targets import target_folder

        speculative = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": num_speculative_tokens}
        self.llm = LLM(
            str(target_folder("smollm2")),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=24,
            disable_log_stats=False,
            speculative_config=speculative,
            additional_config={"dflash": {"draft_length": "fixed"}},
            use_tqdm_on_load=False,
        )
        core: Any = self.llm.llm_engine.engine_core
        self.proposer = core.engine_core.model_executor.driver_worker.worker.model_runner.drafter

    def measure(
        self, prompts: list[str], temperature: float, options: argparse.Namespace, is_drawn: bool, chooses: bool
    ) -> tuple[float, int]:
        """(tau, cycles) over all prompts, starting without knowledge of earlier ones."""
        from vllm import SamplingParams

        from vllm_dflash.draft_sampling import DraftSampling

        self.proposer.sampling.sampling = DraftSampling(is_drawn, chooses)
        before = self._counters()
        sampling = SamplingParams(
            temperature=temperature, top_p=options.top_p, max_tokens=options.max_tokens, ignore_eos=True
        )
        self.llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling, use_tqdm=False)
        cycles, accepted = (now - then for now, then in zip(self._counters(), before))
        return 1 + accepted / cycles, int(cycles)

    def _counters(self) -> tuple[float, float]:
        values: dict[str, Any] = {metric.name: metric for metric in self.llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        drafts, accepted = (values[name].value for name in names)
        return drafts, accepted


if __name__ == "__main__":
    main()
