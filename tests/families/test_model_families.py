"""Greedy text of targets of many families is their own, with long and short drafts, accepted and rejected ones."""

from __future__ import annotations

import pytest

pytest_plugins = ["family_engines"]

PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]
DENSE = [
    pytest.param(
        "llama", marks=pytest.mark.feature("Llama target", "greedy text; drafts of 1, 7 and changing lengths")
    ),
    pytest.param(
        "qwen2", marks=pytest.mark.feature("Qwen2 target", "greedy text; drafts of 1, 7 and changing lengths")
    ),
    pytest.param(
        "mistral",
        marks=pytest.mark.feature("Mistral target, sliding window", "greedy text; drafts of 1, 7 and changing lengths"),
    ),
    pytest.param("phi3", marks=pytest.mark.feature("Phi-3 target", "greedy text; drafts of 1, 7 and changing lengths")),
    pytest.param(
        "granite", marks=pytest.mark.feature("Granite target", "greedy text; drafts of 1, 7 and changing lengths")
    ),
    pytest.param(
        "gemma4", marks=pytest.mark.feature("Gemma 4 target", "greedy text; drafts of 1, 7 and changing lengths")
    ),
]
EXPERTS = [
    pytest.param(
        "qwen3_moe", marks=pytest.mark.feature("Qwen3-MoE target", "greedy text; drafts of 1, 7 and changing lengths")
    ),
    pytest.param(
        "gpt_oss", marks=pytest.mark.feature("GPT-OSS target", "greedy text; drafts of 1, 7 and changing lengths")
    ),
]
LENGTHS = {"K = 1": [1], "K = 7": [7], "changing lengths": [7, 0, 3, 0, 7]}


@pytest.mark.case("F32")
@pytest.mark.parametrize("family", DENSE)
def test_text_is_the_targets(engine, family_target, family_drafter, with_oracle, family):
    compare(engine, family_target(family), family_drafter, with_oracle)


@pytest.mark.usefixtures("expert_group")
@pytest.mark.parametrize("family", EXPERTS)
def test_text_of_experts_is_the_targets(engine, family_target, family_drafter, with_oracle, family):
    """GPT-OSS has sliding and full layers besides the drafter's: vLLM alone spreads those over KV-cache groups."""
    compare(engine, family_target(family), family_drafter, with_oracle)


def compare(engine, target, drafter, with_oracle) -> None:
    """Equal texts under each schedule, from the drafter's own drafts and from ones that are mostly right."""
    plain = engine(target).token_ids(PROMPTS, max_tokens=40)
    assert min(len(set(text)) for text in plain[:3]) > 5, "a text that repeats itself proves little"
    served = engine(target, drafter=drafter, num_drafted=7)
    own = served.generate(PROMPTS, max_tokens=40)
    assert [result.token_ids for result in own] == plain
    assert all(len(draft.tokens) == 7 for result in own for draft in result.drafts[:10])
    for lengths in LENGTHS.values():
        oracle = with_oracle(served, lengths)
        for prompt, text in zip(PROMPTS, plain):
            oracle.learn(prompt, text)
        assert served.token_ids(PROMPTS, max_tokens=40) == plain
        assert {drafted for drafted, _ in oracle.patterns} == set(lengths) - {0}
        assert {accepted for _, accepted in oracle.patterns} >= {0, 1}
