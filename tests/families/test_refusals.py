"""What cannot work with a drafter is refused before anything is loaded, by name and with the repair."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dflash import refusals
from vllm_dflash.step_lengths import why_fixed

pytest_plugins = ["family_engines"]

PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100, 5]]


@pytest.mark.feature("Gemma 3 target", "refused by name: vLLM's class hands out no hidden states")
def test_a_target_without_hidden_states_is_refused(engine, family_target, family_drafter, monkeypatch):
    from vllm.model_executor.model_loader import base_loader

    monkeypatch.setattr(base_loader.BaseModelLoader, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match="Gemma3ForCausalLM, does not hand them out .* without a speculative config"):
        engine(family_target("gemma3"), drafter=family_drafter, num_drafted=7)


@pytest.mark.case("F40")
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
@pytest.mark.feature("Hybrid target (Mamba, GDN) on a CPU", "refused by name: vLLM corrupts the states")
def test_recurrent_targets_are_refused_on_a_cpu(engine, family_target, family_drafter, family):
    with pytest.raises(ValueError, match="has recurrent layers, .* Serve it on a GPU, or leave the speculative config"):
        engine(family_target(family), drafter=family_drafter, num_drafted=7)


@pytest.mark.case("F40")
def test_vllms_cpu_backend_corrupts_mamba_states(engine, family_target, family_drafter, monkeypatch):
    """The reason of the refusal: even whole blocks change texts. When this fails, Mamba can be served."""
    target, settings = family_target("nemotron_h"), {"enable_prefix_caching": False}
    outputs = logprobs(engine(target, **settings), PROMPTS)
    monkeypatch.setattr(refusals, "check_recurrent_states", lambda *_: None)
    served = engine(target, drafter=family_drafter, num_drafted=7, **settings)
    assert largest_gap(outputs, served.token_ids(PROMPTS, max_tokens=24)) > 1


@pytest.mark.case("F40")
def test_elsewhere_recurrent_targets_get_whole_blocks():
    """On GPUs vLLM keeps the states right for steps without drafts too; all the same they are not sought."""
    config: Any = SimpleNamespace(
        additional_config={},
        model_config=SimpleNamespace(is_hybrid=True),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: False, enable_adaptive_verification=False
        ),
    )
    assert why_fixed(config) == "the target's recurrent layers are verified with whole blocks"
    config.model_config.is_hybrid = False
    assert why_fixed(config) is None
    config.parallel_config.data_parallel_size = 2
    assert "data-parallel ranks" in str(why_fixed(config))


@pytest.mark.slow
@pytest.mark.case("F40")
@pytest.mark.usefixtures("expert_group")
def test_vllms_cpu_backend_corrupts_gdn_states_without_whole_blocks(
    engine, family_target, family_drafter, with_oracle, monkeypatch
):
    """The same for gated delta networks, which are right (but for ties: they exist in bf16 only) with whole blocks."""
    target = family_target("qwen3_next")
    settings = {"enable_prefix_caching": False, "dtype": "bfloat16"}
    outputs = logprobs(engine(target, **settings), PROMPTS)
    monkeypatch.setattr(refusals, "check_recurrent_states", lambda *_: None)
    served = engine(target, drafter=family_drafter, num_drafted=7, **settings)
    assert largest_gap(outputs, served.token_ids(PROMPTS, max_tokens=24)) < 0.3
    with_oracle(served, [0])
    assert largest_gap(outputs, served.token_ids(PROMPTS, max_tokens=24)) > 1


def logprobs(plain, prompts: list[list[int]]) -> list[list[tuple[int, dict[int, float]]]]:
    """Each token of each greedy answer with the log-probabilities of all tokens there."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24, detokenize=False, logprobs=20)
    outputs = plain.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [
        [
            (token, {other: entry.logprob for other, entry in entries.items()})
            for token, entries in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)
        ]
        for output in outputs
    ]


def largest_gap(expected: list[list[tuple[int, dict[int, float]]]], texts: list[list[int]]) -> float:
    """By how much the target prefers its own token to the other one, at the first difference of each text."""
    gaps = [0.0]
    for steps, text in zip(expected, texts):
        for (token, entries), other in zip(steps, text):
            if token != other:
                gaps.append(entries[token] - entries.get(other, min(entries.values())))
                break
    return max(gaps)


@pytest.mark.case("F23")
@pytest.mark.feature("pipeline parallel", "refused: features stay on earlier stages")
def test_pipeline_parallel_is_refused(engine, tiny_target, tiny_drafter):
    with pytest.raises(ValueError, match=r"pipeline_parallel_size is 2, but .* Use tensor_parallel_size instead"):
        engine(tiny_target, drafter=tiny_drafter, num_drafted=7, pipeline_parallel_size=2)


@pytest.mark.case("F39")
@pytest.mark.feature("KV connectors and KV offloading", "refused: they bring no hidden states")
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "ExampleConnector"),
        ({"kv_offloading_size": 1.0}, "native KV offloading"),
    ],
)
def test_kv_connectors_are_refused(engine, tiny_target, tiny_drafter, settings, name):
    with pytest.raises(ValueError, match=f"the KV connector '{name}' brings keys and values .* Leave the connector"):
        engine(tiny_target, drafter=tiny_drafter, num_drafted=7, **settings)


@pytest.mark.slow  # vLLM inspects the model in a process of its own, and does not remember that it failed
@pytest.mark.feature("Qwen3.5 target on a CPU", "vLLM's own message: it needs torchvision")
def test_qwen3_5_cannot_be_served_without_torchvision(engine, family_target, family_drafter):
    """vLLM's classes for it share a module with those for images. When this fails, it belongs to the other families."""
    with pytest.raises(ValueError, match=r"Model architectures \['Qwen3_5ForCausalLM'\] failed to be inspected"):
        engine(family_target("qwen3_5"), drafter=family_drafter, num_drafted=7)


def test_refusals_are_about_dflash_only(engine, family_target):
    """The same settings without a drafter get vLLM's own answer, or a server."""
    served = engine(family_target("nemotron_h"), enable_prefix_caching=False)
    assert len(served.token_ids([[3, 5, 7]], max_tokens=4)[0]) == 4
