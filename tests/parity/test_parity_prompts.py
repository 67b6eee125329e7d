"""Prompts: built in, from rows, with and without a chat template."""

from __future__ import annotations

import json

import pytest

from vllm_dflash.parity.prompts import BUILT_IN, load_prompts, prompts_hash


def test_built_in_prompts_are_many_and_different(smollm2):
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 200
    prompts = load_prompts(str(smollm2), None, 200)
    assert len({prompt.token_ids for prompt in prompts}) == 200


def test_rows_are_spread_over_the_file_and_long_ones_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"id": f"r{i}", "prompt_ids": [3] * (1 + i)}) for i in range(10)))
    assert [p.id for p in load_prompts("nobody needs a tokenizer", str(file), 5)] == ["r0", "r2", "r4", "r6", "r8"]
    assert [p.id for p in load_prompts("", str(file), 9, max_prompt_tokens=3)] == ["r0", "r1", "r2"]
    file.write_text(json.dumps({"prompt_ids": [3] * 4}))
    with pytest.raises(ValueError, match="no prompt with at most 3 tokens"):
        load_prompts("", str(file), 5, max_prompt_tokens=3)


def test_chat_template_is_the_default(tmp_path, smollm2):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Hello"}))
    [chat], [text] = load_prompts(str(smollm2), str(file), 1), load_prompts(str(smollm2), str(file), 1, chat=False)
    assert len(chat.token_ids) > len(text.token_ids) == 1
    assert prompts_hash([chat]) != prompts_hash([text])


def test_a_row_that_asks_nothing_is_refused(tmp_path, smollm2):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"answer": 5}))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: has \['answer'\]; it needs 'prompt'"):
        load_prompts(str(smollm2), str(file), 1)
