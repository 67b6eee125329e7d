"""Offline generation with DFlash through vLLM's `LLM`, on the embedded demo target.

    python examples/offline_generate.py

Works on a CPU and on a GPU. For your own pair, pass the target's and the drafter's folder or Hugging Face name:

    python examples/offline_generate.py Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_dflash.targets import target_folder

QUESTIONS = [
    "A farmer has 12 cows and twice as many sheep. How many animals are there? Please reason step by step.",
    "Write a Python function that returns the largest of three numbers.",
]


def main(target: str, drafter: str) -> None:
    llm = LLM(
        target,
        speculative_config={
            "method": "dflash",
            "model": drafter,
        },  # K defaults to what the drafter was trained for
        max_model_len=1024,
        enforce_eager=True,  # starts faster; leave it out where speed matters more
        disable_log_stats=False,
    )
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))):
        print(f"\n> {question}\n{output.outputs[0].text}")

    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafts, accepted = (counters[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    tau = (
        f"{1 + accepted / drafts:.2f}" if drafts else "none"
    )  # on a busy machine drafts may not pay, and there are none
    print(f"\nAcceptance length: {tau} tokens per cycle with drafts, over {drafts} of them.")


if __name__ == "__main__":  # vLLM starts its engine in a process that imports this file again
    shipped = str(Path(__file__).parent / "drafters" / "smollm2-135m-instruct-dflash")
    target, drafter = sys.argv[1:3] if len(sys.argv) > 2 else (str(target_folder("smollm2")), shipped)
    main(target, drafter)
