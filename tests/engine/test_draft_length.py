"""Draft lengths that change from step to step leave text, distribution and later drafts as they are."""

from __future__ import annotations

import random

import pytest
from test_cpu_backend import dflash, p_value, plain_texts, sample  # noqa: F401  (fixtures)
from test_reference import compare_drafts, load_reference
from tiny_models import write_tiny_drafter
from vllm.exceptions import VLLMValidationError

from vllm_dflash.draft_length import DraftLengthController, ScheduledLengths
from vllm_dflash.length_control import LengthControl

K = 7
PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]
SCHEDULES = {"on and off": [7, 0, 3, 0, 7], "random": random.Random(0).choices(range(K + 1), k=50), "off": [0]}


@pytest.fixture
def scheduled(monkeypatch):
    """Gives an engine lengths that are decided beforehand, for one test."""

    def schedule(served, lengths: list[int]):
        control = LengthControl(ScheduledLengths(lengths), learns=True)
        monkeypatch.setattr(served.runner.drafter, "lengths", control)
        return served

    return schedule


@pytest.fixture(scope="module")
def served(engine, tiny_target, tiny_drafter):
    return engine(tiny_target, drafter=tiny_drafter, num_drafted=K)


@pytest.fixture(scope="module")
def deciding(engine, tiny_target, tmp_path_factory):
    """An engine that decides by itself, for a drafter that is never right, whatever its config.json says."""
    drafter = write_tiny_drafter(tmp_path_factory.mktemp("promising") / "drafter", acceptance_rates=[0.8, 0.4])
    return engine(tiny_target, drafter=drafter, num_drafted=K, draft_length="auto")


def test_acceptance_starts_from_what_the_checkpoint_records(deciding):
    estimate = deciding.runner.drafter.lengths.lengths.acceptance
    assert estimate._first_rates.tolist() == [0.8] + [0.5] * (K - 1)


@pytest.mark.parametrize("lengths", SCHEDULES.values(), ids=SCHEDULES)
def test_greedy_text_is_the_targets_whatever_the_lengths(engine, served, scheduled, tiny_target, lengths):
    plain = engine(tiny_target).token_ids(PROMPTS, max_tokens=40)
    assert scheduled(served, lengths).token_ids(PROMPTS, max_tokens=40) == plain


def test_drafts_have_the_scheduled_lengths(served, scheduled):
    (result,) = scheduled(served, [7, 0, 3, 0, 7]).generate(PROMPTS[:1], max_tokens=10)
    assert [len(draft.tokens) for draft in result.drafts][:5] == [7, 0, 3, 0, 7]


def test_shorter_drafts_are_the_beginning_of_the_block(served, scheduled, tiny_target, tiny_drafter):
    """Context K/V are written in every step, and the bidirectional block stays whole: what is left out are heads."""
    results = scheduled(served, [3, 0, 5, 0, 0, 1]).generate(PROMPTS, max_tokens=40)
    longest = max((draft.tokens for result in results for draft in result.drafts), key=len)
    assert len(longest) == 5
    reference = load_reference(tiny_target, tiny_drafter)
    full = scheduled(served, [7]).generate(PROMPTS, max_tokens=40)
    assert compare_drafts(full, *reference)[2] == []
    for short, whole in zip(results, full):
        by_anchor = {draft.anchor_position: draft.tokens for draft in whole.drafts}
        for draft in short.drafts:
            expected = by_anchor.get(draft.anchor_position, draft.tokens)
            assert draft.tokens == expected[: len(draft.tokens)]


def test_drafts_behind_many_plain_steps_are_made_from_the_whole_context(served, scheduled, tiny_target, tiny_drafter):
    """Context K/V of plain steps wait and are written together; requests come and go meanwhile."""
    scheduled(served, [0] * 19 + [K]).generate(PROMPTS, max_tokens=5)  # these end with rows that wait
    results = served.generate([[*prompt, 6] for prompt in PROMPTS], max_tokens=60)
    num_cycles, _, differences = compare_drafts(results, *load_reference(tiny_target, tiny_drafter), num_masks=K)
    assert num_cycles > len(PROMPTS)
    assert differences == []


def test_sampled_text_has_the_plain_distribution_whatever_the_lengths(dflash, plain_texts, scheduled):  # noqa: F811
    texts, num_accepted = sample(scheduled(dflash, [3, 0, 1, 2, 0, 3]))
    assert num_accepted > 100
    assert p_value(plain_texts, texts) > 1e-3


def test_a_hopeless_drafter_is_switched_off(engine, deciding, tiny_target):
    controller = deciding.runner.drafter.lengths.lengths
    assert isinstance(controller, DraftLengthController)
    plain = engine(tiny_target).token_ids(PROMPTS, max_tokens=100)
    assert deciding.token_ids(PROMPTS, max_tokens=100) == plain
    counters = controller.counters
    assert counters.steps >= 90
    assert counters.steps_off > 0.7 * counters.steps
    # The first step has no time and is not counted, but its drafts are verified.
    assert counters.accepted <= counters.verified <= counters.drafted + K * len(PROMPTS)
    assert 0.1 < counters.predicted_over_measured < 10


def test_a_seed_gives_one_text_alone_and_among_others(deciding):
    """Lengths follow time and neighbours; those of seeded requests do not, or their random numbers would move."""
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
    alone = deciding.token_ids(PROMPTS[:1], **sampling)[0]
    deciding.generate(PROMPTS[1:], max_tokens=30)  # what is learnt from others in between must not matter
    together = deciding.token_ids([*PROMPTS, PROMPTS[0]], **sampling)
    assert together[0] == together[-1] == alone


@pytest.mark.parametrize(
    ("extra_args", "longest"), [(None, K), ({"dflash": False}, 0), ({"dflash_max_draft": 2}, 2), ({"dflash": True}, K)]
)
def test_a_request_bounds_its_own_drafts(engine, served, tiny_target, extra_args, longest):
    results = served.generate(PROMPTS, max_tokens=16, extra_args=extra_args)
    assert max(len(draft.tokens) for result in results for draft in result.drafts) == longest
    assert [r.token_ids for r in results] == engine(tiny_target).token_ids(PROMPTS, max_tokens=16)


def test_a_request_with_a_bad_bound_is_refused(served):
    with pytest.raises(VLLMValidationError, match="'dflash_max_draft' is -1; give a whole number"):
        served.generate(PROMPTS[:1], max_tokens=4, extra_args={"dflash_max_draft": -1})
    assert len(served.token_ids(PROMPTS[:1], max_tokens=4)[0]) == 4
