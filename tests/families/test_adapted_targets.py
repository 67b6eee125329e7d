"""Targets with LoRA adapters, with int8 weights, and with another KV cache."""

from __future__ import annotations

import pytest
import torch
from adapted import RANK, write_adapter, write_int8_target

pytest_plugins = ["family_engines"]

PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]
WITH_LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def texts(served, prompts: list[list[int]], adapters: list) -> list[list[int]]:
    """Greedy answers, each of the target with the adapter beside it."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = served.llm.generate(inputs, sampling, use_tqdm=False, lora_request=adapters)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.case("F38")
@pytest.mark.feature("LoRA on the target", "two adapters and none in one batch, greedy text of the same without us")
def test_adapters_share_a_batch(engine, tiny_target, tiny_drafter, with_oracle, tmp_path):
    from vllm.lora.request import LoRARequest

    first, second = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, seed=number)))
        for number, name in enumerate(("a", "b"), 1)
    )
    prompts, adapters = PROMPTS * 3, [None] * 4 + [first] * 4 + [second] * 4
    plain = texts(engine(tiny_target, **WITH_LORA), prompts, adapters)
    base = engine(tiny_target).token_ids(PROMPTS, max_tokens=40)
    assert plain[:4] == base
    assert all(text not in base for text in plain[4:])
    served = engine(tiny_target, drafter=tiny_drafter, num_drafted=7, **WITH_LORA)
    assert texts(served, prompts, adapters) == plain
    oracle = with_oracle(served, [7, 0, 3, 0, 7])
    for prompt, text in zip(prompts, plain):
        oracle.learn(prompt, text)
    # Without the base this time: once adapters have run, vLLM's CPU backend adds them to requests without one, also
    # where there is no speculation.
    assert texts(served, prompts[4:], adapters[4:]) == plain[4:]
    assert {drafted for drafted, _ in oracle.patterns} == {3, 7}
    assert {accepted for _, accepted in oracle.patterns} >= {0, 1, 2, 3}


@pytest.mark.case("F38")
def test_the_drafter_is_the_same_with_adapters_loaded(engine, tiny_target, tiny_drafter):
    """Embeddings and head are shared with the target; wrapped for LoRA, they must not read the target's row mapping."""
    served = engine(tiny_target, drafter=tiny_drafter, num_drafted=7, **WITH_LORA)
    without = engine(tiny_target, drafter=tiny_drafter, num_drafted=7)
    assert [r.drafts for r in served.generate(PROMPTS, max_tokens=24)] == [
        r.drafts for r in without.generate(PROMPTS, max_tokens=24)
    ]


@pytest.mark.case("F21")
@pytest.mark.feature("int8 target (compressed-tensors W8A8)", "greedy text, long and short drafts")
def test_quantised_target(engine, tiny_target, tiny_drafter, with_oracle, tmp_path_factory):
    target = write_int8_target(tiny_target, tmp_path_factory.mktemp("int8") / "target")
    plain = engine(target).token_ids(PROMPTS, max_tokens=40)
    served = engine(target, drafter=tiny_drafter, num_drafted=7)
    own = served.generate(PROMPTS, max_tokens=40)
    assert [result.token_ids for result in own] == plain
    assert all(len(draft.tokens) == 7 for result in own for draft in result.drafts[:10])
    oracle = with_oracle(served, [7, 0, 3, 0, 7])
    for prompt, text in zip(PROMPTS, plain):
        oracle.learn(prompt, text)
    assert served.token_ids(PROMPTS, max_tokens=40) == plain
    assert {accepted for _, accepted in oracle.patterns} >= {0, 1, 2, 3}


@pytest.mark.case("F19")
@pytest.mark.feature("fp8 KV cache", "greedy text; without AVX-512, vLLM's own message")
def test_fp8_kv_cache(engine, tiny_target, tiny_drafter):
    settings = {"kv_cache_dtype": "fp8"}
    if not torch.cpu._is_avx512_supported():
        with pytest.raises(NotImplementedError, match="FP8 KV cache on CPU requires x86 with AVX-512 or AMX"):
            engine(tiny_target, drafter=tiny_drafter, num_drafted=7, **settings)
        return
    plain = engine(tiny_target, **settings).token_ids(PROMPTS, max_tokens=24)
    served = engine(tiny_target, drafter=tiny_drafter, num_drafted=7, **settings)
    results = served.generate(PROMPTS, max_tokens=24)
    assert [result.token_ids for result in results] == plain
    assert all(result.drafts for result in results)
