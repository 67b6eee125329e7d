"""Cached prompts keep their acceptance, because context K/V are cached with them, and their cache hits."""

from __future__ import annotations

import pytest
from conftest import WORD_PROBLEMS
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def long_prompt(smollm2) -> list[int]:
    """A chat message of a little over 500 tokens: many word problems, of which one is to be solved."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    message = "\n".join(["Here are some word problems.", *WORD_PROBLEMS[1:16], f"Solve this one: {WORD_PROBLEMS[0]}"])
    chat = [{"role": "user", "content": f"{message}\nPlease reason step by step."}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_repeated_prompt_keeps_acceptance_and_hits(engine, smollm2, drafter, long_prompt):
    settings = {"max_model_len": 1024}
    plain = engine(smollm2, **settings)
    dflash = engine(smollm2, drafter=drafter, num_drafted=3, **settings)
    plain_hits = [plain.generate([long_prompt], max_tokens=1)[0].num_cached_tokens for _ in range(2)]
    first, second = (dflash.generate([long_prompt], max_tokens=64)[0] for _ in range(2))
    assert plain_hits == [0, 384]  # three whole pages
    assert [first.num_cached_tokens, second.num_cached_tokens] == plain_hits
    assert second.token_ids == first.token_ids
    assert second.acceptance_length == pytest.approx(first.acceptance_length, rel=0.05)
    assert first.acceptance_length > 1.1


def test_shared_prefix_with_a_new_end_is_drafted_from_the_same_context(engine, tiny_target, tiny_drafter):
    from test_reference import compare_drafts, load_reference

    dflash = engine(tiny_target, drafter=tiny_drafter, num_drafted=4, max_model_len=1024, block_size=32)
    prefix = [(5 * i) % 120 + 4 for i in range(96)]
    dflash.generate([[*prefix, 9]], max_tokens=4)
    [result] = dflash.generate([[*prefix, 17, 23, 31]], max_tokens=48)
    assert result.num_cached_tokens == 96
    assert compare_drafts([result], *load_reference(tiny_target, tiny_drafter))[2] == []


def test_a_page_filled_by_plain_steps_is_shared_with_its_context(engine, tiny_target, tiny_drafter):
    from test_reference import compare_drafts, load_reference

    dflash = engine(tiny_target, drafter=tiny_drafter, num_drafted=4, max_model_len=1024, block_size=32)
    prompt = [(7 * i) % 120 + 4 for i in range(50)]
    [first] = dflash.generate([prompt], max_tokens=20, extra_args={"dflash": False})
    [second] = dflash.generate([[*prompt, *first.token_ids, 17]], max_tokens=48)
    assert second.num_cached_tokens == 64
    assert compare_drafts([second], *load_reference(tiny_target, tiny_drafter))[2] == []
