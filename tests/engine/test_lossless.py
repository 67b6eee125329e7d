"""Text with DFlash is the text without, whatever the drafter and K."""

from __future__ import annotations

import pytest

TINY_PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]


@pytest.mark.parametrize("num_drafted", [1, 4, 7])
def test_random_drafter_leaves_greedy_text_unchanged(engine, tiny_target, tiny_drafter, num_drafted):
    plain = engine(tiny_target).token_ids(TINY_PROMPTS, max_tokens=48)
    with_dflash = engine(tiny_target, drafter=tiny_drafter, num_drafted=num_drafted)
    assert with_dflash.token_ids(TINY_PROMPTS, max_tokens=48) == plain


def test_smollm2_greedy_text_is_unchanged_and_drafts_are_accepted(engine, smollm2, drafter, smollm2_prompts):
    plain = engine(smollm2).token_ids(smollm2_prompts[:6], max_tokens=64)
    results = engine(smollm2, drafter=drafter).generate(smollm2_prompts[:6], max_tokens=64)
    assert [result.token_ids for result in results] == plain
    accepted = sum(result.num_accepted for result in results)
    cycles = sum(len(result.drafts) for result in results)
    assert 1 + accepted / cycles > 1.3
