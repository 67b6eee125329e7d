"""One draft length per step, set by the scheduler: what the V2 runner and asynchronous scheduling use.

Neither runs on a CPU as it is, so a V1 engine is led onto the same path; test_v2_runner.py runs the V2 runner itself.
"""

from __future__ import annotations

import pytest
from engines import Engine
from oracle_drafts import OracleDrafts
from vllm import envs
from vllm.engine.arg_utils import EngineArgs

from vllm_dflash import step_lengths
from vllm_dflash.draft_length import DraftRows, ScheduledStepLengths, StepLengthController
from vllm_dflash.step_lengths import LADDER, StepLengths, why_fixed

K = 7
PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]
SEEDED = {"temperature": 1.0, "seed": 5, "max_tokens": 24}


@pytest.fixture(scope="module")
def served(tiny_target, tiny_drafter):
    """An engine whose scheduler decides; it is not shared, because others of this kind do not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_lengths, "is_per_step", lambda vllm_config: True)
        yield Engine(tiny_target, tiny_drafter, num_drafted=K, draft_length="auto")


@pytest.fixture
def scheduler(served):
    return served.llm.llm_engine.engine_core.engine_core.scheduler


@pytest.fixture
def scheduled(served, scheduler, monkeypatch):
    """Gives the engine lengths that are decided beforehand, for one test."""

    def schedule(lengths: list[int]) -> StepLengths:
        chosen = StepLengths(scheduler, ScheduledStepLengths(lengths), (0, 1, 3, K), DraftRows(K))
        monkeypatch.setattr(scheduler, "dynamic_sd_lookup", chosen)
        return chosen

    return schedule


@pytest.fixture
def known(engine, served, tiny_target, monkeypatch):
    """Plain texts, most of whose tokens are drafted right from here on."""
    plain = engine(tiny_target).token_ids(PROMPTS, max_tokens=40)
    oracle = OracleDrafts(served)
    for prompt, text in zip(PROMPTS, plain):
        oracle.learn(prompt, text)
    monkeypatch.setattr(served.runner, "take_draft_token_ids", oracle.take_draft_token_ids)
    return plain


def test_the_scheduler_decides_and_the_proposer_follows(served, scheduler):
    assert isinstance(scheduler.dynamic_sd_lookup.chooser, StepLengthController)
    assert scheduler.dynamic_sd_lookup.ladder == (0, 1, 3, 7)
    assert served.runner.drafter.lengths.lengths.schedule == (K,)


@pytest.mark.parametrize("lengths", [[7, 0, 3, 0, 7], [1, 7, 7, 0, 0, 0, 3]], ids=str)
def test_greedy_text_is_the_targets_whatever_the_lengths(served, scheduled, known, lengths):
    chosen = scheduled(lengths)
    results = served.generate(PROMPTS, max_tokens=40)
    assert [result.token_ids for result in results] == known
    drafted = [len(draft.tokens) for draft in results[0].drafts]
    assert drafted[:5] == lengths[:5]
    counters = chosen.chooser.counters
    assert counters.accepted == sum(result.num_accepted for result in results) > 20
    assert counters.verified > counters.accepted


def test_shorter_drafts_are_the_beginning_of_the_block(served, scheduled):
    """The bidirectional block stays whole, and context K/V are written in steps without drafts too."""
    scheduled([7])
    whole = served.generate(PROMPTS, max_tokens=30)
    scheduled([3, 0, 1, 0, 0, 7])
    short = served.generate(PROMPTS, max_tokens=30)
    compared = 0
    for one, other in zip(short, whole):
        by_anchor = {draft.anchor_position: draft.tokens for draft in other.drafts}
        for draft in one.drafts:
            if draft.tokens and draft.anchor_position in by_anchor:
                assert draft.tokens == by_anchor[draft.anchor_position][: len(draft.tokens)]
                compared += 1
    assert compared > 20


def test_a_hopeless_drafter_is_switched_off(engine, served, scheduler, tiny_target):
    plain = engine(tiny_target).token_ids(PROMPTS, max_tokens=100)
    before = scheduler.dynamic_sd_lookup.chooser.counters.steps_off
    results = served.generate(PROMPTS, max_tokens=100)
    assert [result.token_ids for result in results] == plain
    assert sum(len(draft.tokens) > 0 for draft in results[0].drafts) > 0
    assert scheduler.dynamic_sd_lookup.chooser.counters.steps_off - before > 60


def test_a_seed_gives_one_text_alone_and_beside_any_lengths(served, scheduled):
    """With a seeded request in the batch the scheduled lengths do not apply, to it or to others."""
    scheduled([7])
    alone = served.token_ids(PROMPTS[:1], **SEEDED)[0]
    scheduled([0, 3, 1])
    results = served.generate(PROMPTS, **SEEDED)
    assert results[0].token_ids == alone
    assert {len(draft.tokens) for draft in results[0].drafts[:-1]} == {K}


@pytest.mark.parametrize(("extra_args", "longest"), [({"dflash": False}, 0), ({"dflash_max_draft": 2}, 2)])
def test_a_request_bounds_its_own_drafts(engine, served, scheduled, tiny_target, extra_args, longest):
    chosen = scheduled([7])
    texts = served.token_ids(PROMPTS, max_tokens=16, extra_args=extra_args)
    assert texts == engine(tiny_target).token_ids(PROMPTS, max_tokens=16)
    counters = chosen.chooser.counters
    # All four draft in each step but the last.
    assert counters.verified == longest * 4 * 15


# ---- what the V2 runner is told before it captures graphs


@pytest.fixture
def configured(tiny_target, tiny_drafter, monkeypatch):
    """vLLM's config for the V2 runner, which asks for a Triton that this machine may lack."""
    monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", True)  # the environment may be cached by now
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)

    def configure(speculative=None, **arguments):
        speculative = {"method": "dflash", "model": str(tiny_drafter)} | (speculative or {})
        settings = {"max_model_len": 256, "max_num_seqs": 8, "enforce_eager": True, "skip_tokenizer_init": True}
        arguments = settings | arguments
        return EngineArgs(model=str(tiny_target), speculative_config=speculative, **arguments).create_engine_config()

    return configure


@pytest.mark.parametrize(
    ("most_requests", "table"),
    [
        (8, [(1, 1, 0), (2, 2, 1), (3, 3, 3), (4, 8, 7)]),
        (3, [(1, 1, 0), (2, 2, 3), (3, 3, 7)]),
        (2, [(1, 1, 0), (2, 2, 7)]),
        (1, [(1, 1, 7)]),
    ],
)
def test_v2_captures_graphs_for_every_length(configured, most_requests, table):
    config = configured(max_num_seqs=most_requests)
    assert config.use_v2_model_runner
    assert config.speculative_config.num_speculative_tokens_per_batch_size == table
    assert why_fixed(config) is None


@pytest.mark.parametrize(
    ("speculative", "arguments", "reason"),
    [
        (
            {"num_speculative_tokens_per_batch_size": [(1, 4, 7), (5, 8, 1)]},
            {},
            "num_speculative_tokens_per_batch_size gives the lengths",
        ),
        ({}, {"additional_config": {"dflash": {"draft_length": "fixed"}}}, "as additional_config"),
    ],
)
def test_a_users_own_choice_wins(configured, speculative, arguments, reason):
    config = configured(speculative, **arguments)
    table = config.speculative_config.num_speculative_tokens_per_batch_size
    assert table == speculative.get("num_speculative_tokens_per_batch_size")
    assert not hasattr(config.speculative_config, LADDER)
    assert reason in str(why_fixed(config))


def test_adaptive_verification_wins(configured):
    config = configured()
    config.speculative_config.enable_adaptive_verification = True
    assert "enable_adaptive_verification" in str(why_fixed(config))


def test_v1_gets_no_table_because_it_would_lose_its_graphs(configured, monkeypatch):
    monkeypatch.setitem(vars(envs), "VLLM_USE_V2_MODEL_RUNNER", False)
    config = configured()
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
