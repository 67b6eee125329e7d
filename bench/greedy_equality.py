"""Whether a GPU gives the same greedy tokens with DFlash as without: SmolLM2 and its shipped drafter, a few questions.

    python bench/greedy_equality.py        # exits with 1 and shows the first difference if they are not the same

Both engines share the GPU, in float32, where equal tokens are a matter of arithmetic and not of luck.
"""

from __future__ import annotations

import argparse
from typing import Any

from setting import DRAFTER, question, set_environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--num-speculative-tokens", type=int, default=7, metavar="K")
    options = parser.parse_args()
    set_environment()
    speculative = {
        "method": "dflash",
        "model": str(DRAFTER),
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    plain, dflash = (tokens(one, options) for one in (None, speculative))
    for number, (expected, actual) in enumerate(zip(plain, dflash)):
        if expected != actual:
            first = next(i for i, pair in enumerate(zip(expected, actual)) if pair[0] != pair[1])
            print(f"question {number} differs at token {first}: {expected[first]} without, {actual[first]} with DFlash")
            return 1
    print(f"{len(plain)} answers of {options.max_tokens} tokens are the same with and without DFlash")
    return 0


def tokens(speculative: dict[str, Any] | None, options: argparse.Namespace) -> list[list[int]]:
    """Greedy tokens of every question."""
    from vllm import LLM, SamplingParams

    from vllm_dflash.targets import target_folder

    llm = LLM(
        str(target_folder("smollm2")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=options.prompts,
        gpu_memory_utilization=0.3,  # the first engine may still hold its share when the second starts
        speculative_config=speculative,
        use_tqdm_on_load=False,
    )
    conversations = [[{"role": "user", "content": question(0, i)}] for i in range(options.prompts)]
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.chat(conversations, sampling, use_tqdm=False)]


if __name__ == "__main__":
    raise SystemExit(main())
