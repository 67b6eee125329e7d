"""Run in a process of its own: serve where `triton` cannot be imported, and print the texts and the draft counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.modules["triton"] = None  # type: ignore[assignment]  # what `import` takes for a module that is not there
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import conftest  # noqa: E402, F401  (sets the environment)
from engines import Engine  # noqa: E402


def main(target: str, drafter: str, prompts: str) -> None:
    """Import every module of the package, and serve."""
    import vllm_dflash.fused
    import vllm_dflash.triton_kernels.draft_inputs  # noqa: F401

    served = Engine(Path(target), Path(drafter), 7)
    results = served.generate(json.loads(prompts), max_tokens=24)
    assert sys.modules["triton"] is None
    assert not any(name.startswith("triton.") for name in sys.modules)
    answer = {"texts": [r.token_ids for r in results], "drafts": [len(r.drafts) for r in results]}
    print("answer: " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
