"""A budget of tokens for thinking: at its end the closing words are forced, wherever in a block that is."""

from __future__ import annotations

import pytest
from engine_pairs import SETTINGS, Pair
from oracle_drafts import LENGTHS, K, random_prompts
from tiny_bytes import byte_tokenizer

pytest_plugins = ["engine_pairs"]

#: What opens a thought stands at the end of each prompt; what closes it is one token, or several.
START = "<|im_start|>"
ENDS = {"one token": "<|im_end|>", "six tokens": "enough"}


@pytest.fixture(params=list(ENDS.values()), ids=list(ENDS))
def thinking(request, engine, byte_target, byte_drafter):
    """Engines for a target that thinks, and the tokens that end its thoughts."""
    reasoning = {"reasoning_start_str": START, "reasoning_end_str": request.param}
    settings = SETTINGS | {"reasoning_config": reasoning}
    monkeypatch = pytest.MonkeyPatch()
    dflash = engine(byte_target, drafter=byte_drafter, num_drafted=K, **settings)
    yield (
        Pair(engine(byte_target, **settings), dflash, monkeypatch),
        byte_tokenizer().encode(request.param, add_special_tokens=False),
    )
    monkeypatch.undo()


@pytest.mark.feature("thinking_token_budget", "greedy text equals plain's; ends of one and six tokens")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_thoughts_end_where_their_budget_ends(thinking, lengths):
    pair, end = thinking
    pair.schedule(lengths)
    prompts = [[*prompt, 3] for prompt in random_prompts(8)]
    budgets = [0, 1, 2, 5, 8, 9, 20, None]
    sampling = [{"max_tokens": 48, "ignore_eos": True, "thinking_token_budget": budget} for budget in budgets]
    outputs = pair.compare(prompts, sampling)
    for output, budget in zip(outputs, budgets):
        tokens = list(output.outputs[0].token_ids)
        if budget is not None:
            assert tokens[budget : budget + len(end)] == end, f"budget {budget}"
    assert sum(accepted > 1 for _, accepted in pair.oracle.patterns.elements()) > 10
