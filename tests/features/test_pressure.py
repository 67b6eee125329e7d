"""Small token budgets, a small cache and shared prefixes change when things are computed, never what."""

from __future__ import annotations

from typing import Any

import pytest
from oracle_drafts import LENGTHS, K, random_prompts

pytest_plugins = ["engine_pairs"]

PROMPTS = random_prompts(8, lengths=(45, 20, 33, 64))
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60}
#: Eight pages of 32 tokens, where each request ends up with three or four.
CRAMPED = {
    "max_model_len": 160,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 9,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": False,
}
TINY_BUDGET = CRAMPED | {"num_gpu_blocks_override": 41, "max_num_batched_tokens": 32}


@pytest.fixture
def cramped(make_pair):
    return make_pair(CRAMPED)


@pytest.fixture
def preempted(cramped, monkeypatch) -> list[str]:
    """Requests that lose their place, as it happens."""
    scheduler = cramped.dflash.llm.llm_engine.engine_core.engine_core.scheduler
    preempt, ids = scheduler._preempt_request, []

    def preempt_and_note(request, *rest, **named):
        ids.append(request.request_id)
        return preempt(request, *rest, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt_and_note)
    return ids


@pytest.mark.feature("preemption", "with pages for two requests of eight; greedy text equals plain's with room")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_preempted_requests_give_the_same_text(cramped, preempted, lengths):
    cramped.schedule(lengths)
    cramped.compare(PROMPTS, ENDLESS)  # plain vLLM has room for all
    assert len(preempted) > 1
    assert sum(accepted > 0 for _, accepted in cramped.oracle.patterns.elements()) > 20


def test_preempted_requests_keep_penalties_and_logprobs(cramped, preempted):
    sampling = ENDLESS | {"presence_penalty": 2.0, "frequency_penalty": 1.0, "logprobs": 1}
    outputs = cramped.compare(PROMPTS, sampling)
    for output, plain in zip(outputs, cramped.plain_answers(PROMPTS, sampling)):
        mine, its = output.outputs[0].cumulative_logprob, plain.outputs[0].cumulative_logprob
        assert mine == pytest.approx(its, abs=60 * 1e-3)
    assert len(preempted) > 1


@pytest.mark.feature("chunked prefill", "budgets of 32 tokens a step, drafts included; text and logprobs equal plain's")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_prompts_in_small_chunks_give_the_same_text(make_pair, lengths):
    chunked = make_pair(TINY_BUDGET)
    chunked.schedule(lengths)
    chunked.compare(PROMPTS, [ENDLESS | ({"prompt_logprobs": 1} if i % 2 else {}) for i in range(len(PROMPTS))])
    assert {0, K} <= {accepted for _, accepted in chunked.oracle.patterns}


@pytest.mark.feature("prefix caching", "hits equal plain's; drafts of a cached prompt equal those of the first time")
@pytest.mark.case("F1", "F2")
def test_cached_prompts_hit_as_without_speculation_and_draft_the_same(pair):
    [prefix] = random_prompts(1, lengths=[96], seed=4)
    prompts = [[*prefix, 9], [*prefix, 9], [*prefix, 17, 23, 31], prefix, prefix[:70]]
    # One after the other, so that each finds what those before it have left. The oracle knows nothing of them.
    served = [pair.dflash.generate([prompt], max_tokens=30)[0] for prompt in prompts]
    expected = [pair.plain.generate([prompt], max_tokens=30)[0] for prompt in prompts]
    assert [result.token_ids for result in served] == [result.token_ids for result in expected]
    hits = [result.num_cached_tokens for result in expected]
    assert hits[:3] == [0, 96, 96]
    assert [result.num_cached_tokens for result in served] == hits
    # The random drafter's tokens depend on the context K/V of the whole prefix: computed and cached ones agree.
    first, second, *_ = served
    assert [draft.tokens for draft in second.drafts] == [draft.tokens for draft in first.drafts]
    assert {len(draft.tokens) for draft in first.drafts} >= {K}


@pytest.mark.case("F41")
def test_a_drafter_with_fewer_positions_does_not_shorten_the_target(engine, tmp_path, byte_target, pair):
    from tiny_bytes import VOCAB
    from tiny_models import write_tiny_drafter

    reach = 64
    drafter = write_tiny_drafter(tmp_path / "short", vocab_size=VOCAB, max_position_embeddings=reach)
    served = engine(byte_target, drafter=drafter, num_drafted=K, max_model_len=160, max_num_seqs=4)
    prompts = random_prompts(3, lengths=[20, 50, 100])
    results = served.generate(prompts, max_tokens=59)
    expected = pair.plain_answers(prompts, {"ignore_eos": True, "max_tokens": 59})
    assert [r.token_ids for r in results] == [list(o.outputs[0].token_ids) for o in expected]
    for result in results:
        for draft in result.drafts:
            assert bool(draft.tokens) == (draft.anchor_position + K < reach), draft
    assert [any(draft.tokens for draft in result.drafts) for result in results] == [True, True, False]
