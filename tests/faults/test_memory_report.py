"""The line about memory at start-up is right, and a drafter takes no more of the KV cache than its layers' share."""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file

from vllm_dflash.memory_report import DrafterMemory, drafter_memory


@pytest.mark.case("F35")
def test_drafter_takes_its_share_and_no_more(engine, tiny_target, tiny_drafter):
    served = engine(tiny_target, drafter=tiny_drafter, num_drafted=4, max_num_batched_tokens=32, max_model_len=256)
    memory = drafter_memory(served.runner.drafter)

    # fp32: 4 bytes x keys and values x 2 heads x 32, in each of 3 and 4 layers.
    assert (memory.kv_per_token, memory.target_kv_per_token) == (3 * 512, 4 * 512)
    stored = sum(tensor.nbytes for tensor in load_file(tiny_drafter / "model.safetensors").values())
    assert memory.weights == stored + 64 * 4  # vLLM's model has an embedding for masks, in case a checkpoint does

    context = served.runner.compilation_config.static_forward_context
    allocated = sum(layer.kv_cache.nbytes for layer in context.values())
    assert memory.kv_tokens * (memory.kv_per_token + memory.target_kv_per_token) == allocated
    # The floor: a cache of as many bytes for the target's layers alone, less the share of the drafter's layers.
    assert memory.kv_tokens_without == allocated // (4 * 512)
    assert memory.kv_tokens >= 4 / 7 * memory.kv_tokens_without - 1


def test_line_for_the_log():
    line = DrafterMemory(3 * 2**20, 100, 300, 3000).line()
    assert "3.0 MiB" in line
    assert re.findall(r"[\d,]+ (?:bytes|tokens)", line) == ["100 bytes", "3,000 tokens"]
    assert "would hold 4,000 without" in line
