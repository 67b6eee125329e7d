"""Acceptance of this plugin and of vLLM's native DFlash with the same drafters, in one run.

    python bench/bench_acceptance.py

Two drafters: the shipped one, whose K-norm weights are near 1 in every layer, and the same function written with
other weights: layer 1's K-norm times 4 and its Q-norm divided by 4, which leaves every attention score as it is. What
differs between the two is only whether the server normalises each layer's context keys by that layer's weight.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from setting import DRAFTER, append_csv, circumstances, question, set_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=7, metavar="K")
    options = parser.parse_args()
    set_environment()

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        rescaled = write_rescaled(Path(scratch) / "rescaled")
        for label, drafter in (("shipped", DRAFTER), ("rescaled K-norm", rescaled)):
            for engine, enabled in (("native", False), ("ours", True)):
                tau, by_slot = measure(drafter, enabled, options)
                slots = " ".join(f"{rate:.2f}" for rate in by_slot)
                print(f"{label:<16} {engine:<7} tau {tau:.2f}   accepted by slot: {slots}", flush=True)
                result = {"drafter": label, "engine": engine, "tau": f"{tau:.3f}", "by_slot": slots}
                rows.append(result | setting(options))
    append_csv("acceptance", rows)


def write_rescaled(folder: Path, factor: float = 4.0) -> Path:
    """The shipped drafter, equal as a function: layer 1's K-norm times `factor`, its Q-norm divided by it."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors = load_file(DRAFTER / "model.safetensors")
    tensors["layers.1.self_attn.k_norm.weight"] *= factor
    tensors["layers.1.self_attn.q_norm.weight"] /= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((DRAFTER / "config.json").read_text())
    return folder


def measure(drafter: Path, enabled: bool, options: argparse.Namespace) -> tuple[float, list[float]]:
    """(tau, acceptance rate of each slot) over all prompts."""
    from vllm import LLM, SamplingParams

    from vllm_dflash.targets import target_folder

    llm = LLM(
        str(target_folder("smollm2")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": options.num_speculative_tokens,
        },
        additional_config={"dflash": {"enabled": enabled, "draft_length": "fixed"}},
        use_tqdm_on_load=False,
    )
    conversations = [[{"role": "user", "content": question(i, i)}] for i in range(options.prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    llm.chat(conversations, sampling, use_tqdm=False)
    metrics: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    by_slot = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return 1 + accepted / drafts, [count / drafts for count in by_slot]


def setting(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "K": options.num_speculative_tokens,
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "questions": "word problems of bench/setting.py; chat template; greedy; float32",
        **circumstances(),
    }


if __name__ == "__main__":
    main()
