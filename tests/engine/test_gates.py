"""Requests that cannot use a draft get none, and disturb neither their neighbours nor the cache."""

from __future__ import annotations

import itertools

import pytest
from test_reference import compare_drafts, load_reference

MAX_LEN, K = 64, 4
SETTINGS = {"num_drafted": K, "max_model_len": MAX_LEN}
LONG, SHORT = list(range(10, 50)), [3, 5, 7]


@pytest.fixture(scope="module")
def served(engine, tiny_target, tiny_drafter):
    return engine(tiny_target, drafter=tiny_drafter, **SETTINGS)


def test_one_long_request_does_not_stop_the_others(served, engine, tiny_target, tiny_drafter):
    """Issue in vLLM: near the maximum length of one request, drafting stops for the whole batch."""
    budgets = [MAX_LEN - len(LONG), 50]
    plain = [
        engine(tiny_target, max_model_len=MAX_LEN).token_ids([p], max_tokens=n)[0]
        for p, n in zip((LONG, SHORT), budgets)
    ]
    long, short = served.generate_together([LONG, SHORT], budgets, arrivals=[0, 0])
    assert [long.token_ids, short.token_ids] == plain

    for draft in [*long.drafts, *short.drafts]:
        # A block needs its anchor's position and K more.
        assert bool(draft.tokens) == (draft.anchor_position <= MAX_LEN - K - 1), draft
    assert {bool(draft.tokens) for draft in long.drafts} == {True, False}
    # Context K/V went on being written for both, or these drafts would differ.
    assert compare_drafts([long, short], *load_reference(tiny_target, tiny_drafter))[2] == []


@pytest.mark.parametrize("short_of_end", [0, 1, K, K + 1])
def test_requests_end_at_or_just_before_the_maximum_length(served, engine, tiny_target, short_of_end):
    num_tokens = MAX_LEN - len(LONG) - short_of_end
    plain = engine(tiny_target, max_model_len=MAX_LEN).token_ids([LONG], max_tokens=num_tokens)
    assert served.token_ids([LONG], max_tokens=num_tokens) == plain
    assert len(plain[0]) == num_tokens


def test_prompt_chunks_get_no_drafts_and_later_drafts_see_all_context(engine, tiny_target, tiny_drafter):
    chunked = engine(tiny_target, drafter=tiny_drafter, num_drafted=K, max_num_batched_tokens=32, max_model_len=256)
    prompts = [[(7 * i + j) % 120 + 4 for i in range(100)] for j in range(3)]
    results = chunked.generate(prompts, max_tokens=16)
    assert [r.token_ids for r in results] == engine(tiny_target, max_model_len=256).token_ids(prompts, max_tokens=16)
    for result in results:
        assert all(draft.tokens == [] for draft in result.drafts if draft.anchor_position < len(result.prompt_ids))
    assert compare_drafts(results, *load_reference(tiny_target, tiny_drafter))[2] == []


def test_one_token_prompt_joins_running_requests(served, engine, tiny_target, monkeypatch):
    """The scheduler pads such a request with drafts of -1; the rejection sampler must get tokens."""
    verified = []
    calculate = served.runner._calc_spec_decode_metadata

    def calculate_and_record(*arguments):
        metadata = calculate(*arguments)
        verified.extend(metadata.draft_token_ids.tolist())
        return metadata

    monkeypatch.setattr(served.runner, "_calc_spec_decode_metadata", calculate_and_record)
    prompts = [SHORT, [11, 2, 90], [9]]
    plain = [engine(tiny_target, max_model_len=MAX_LEN).token_ids([p], max_tokens=24)[0] for p in prompts]
    results = served.generate_together(prompts, [24, 24, 24], arrivals=[0, 0, 4])
    assert [result.token_ids for result in results] == plain
    assert min(verified) >= 0


def test_no_drafts_when_a_step_asks_for_none(served, engine, tiny_target, tiny_drafter, monkeypatch):
    """K = 0 skips the block but writes context K/V, so that drafting resumes as if it had never stopped."""
    proposer, schedule, num_query_rows = served.runner.drafter, itertools.cycle([4, 0, 3, 0, 4]), []
    propose, run_queries = proposer.propose, proposer.run_queries

    def propose_by_schedule(num_speculative_tokens, **arguments):
        return propose(num_speculative_tokens=next(schedule), **arguments)

    def count_query_rows(rows, *arguments):
        num_query_rows.append(len(rows.query_ids))
        return run_queries(rows, *arguments)

    monkeypatch.setattr(proposer, "propose", propose_by_schedule)
    monkeypatch.setattr(proposer, "run_queries", count_query_rows)
    results = served.generate([SHORT], max_tokens=40)
    plain = engine(tiny_target, max_model_len=MAX_LEN).token_ids([SHORT], max_tokens=40)
    assert [result.token_ids for result in results] == plain
    assert num_query_rows[:5] == [5, 0, 5, 0, 5], "a bidirectional block stays whole where fewer drafts are asked for"
    assert compare_drafts(results, *load_reference(tiny_target, tiny_drafter), num_masks=4)[2] == []
