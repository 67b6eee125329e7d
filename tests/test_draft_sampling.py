"""Drafts that are drawn: from what, how they are accepted, and when drawing is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_dflash.draft_sampling import CANDIDATES, AcceptanceRecord, Candidates, DraftSampling, Sampling, draft_probs

#: Few enough tokens that every one is a candidate.
VOCABULARY = 12


def candidates(logits: torch.Tensor) -> Candidates:
    """As the drafter gives them for logits [rows, vocabulary]."""
    largest, tokens = logits.topk(min(CANDIDATES, logits.shape[1]))
    return Candidates(largest, tokens, logits.logsumexp(-1))


def proposed(
    sampling: DraftSampling, logits: torch.Tensor, settings: list[Sampling], num_positions: int
) -> torch.Tensor:
    """Drafts [requests, positions] of requests "0", "1", ..., whose anchors stand at 10, 11, ..."""
    num_requests = len(settings)
    draws, keeps_all = sampling.begin_step(settings)
    ids = [str(i) for i in range(num_requests)]
    drafted = sampling.propose(candidates(logits), ids, settings, 10 + np.arange(num_requests), draws, keeps_all)
    return drafted.view(num_requests, num_positions)


@pytest.mark.parametrize(
    "setting",
    [
        Sampling(0.3),
        Sampling(1.7, top_k=3),
        Sampling(1.0, top_p=0.6),
        Sampling(0.8, min_p=0.2),
        Sampling(1.2, top_k=7, top_p=0.7, min_p=0.05),
        Sampling(1.0, top_k=-1, top_p=1.0),
    ],
    ids=str,
)
def test_draft_distribution_follows_the_requests_parameters(setting):
    """Against vLLM's functions for the target, in its order: temperature, min_p, then top-k and top-p."""
    torch.manual_seed(1)
    logits = torch.randn(50, VOCABULARY) * 3
    scaled = logits / setting.temperature
    probs = scaled.softmax(-1)
    scaled = scaled.masked_fill(probs < setting.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    top_k = setting.top_k if setting.top_k > 0 else VOCABULARY
    expected = apply_top_k_top_p_pytorch(scaled, torch.full((50,), top_k), torch.full((50,), setting.top_p)).softmax(-1)
    given = candidates(logits)
    ours = torch.zeros_like(expected).scatter_(1, given.tokens, draft_probs(given.logits, [setting] * 50))
    torch.testing.assert_close(ours, expected)


@pytest.mark.case("F13")
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_drawn_drafts_leave_the_targets_distribution_and_are_accepted_as_often_as_theory_says(temperature):
    """40,000 requests with one draft each, through vLLM's own accept-or-reject step."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(2)
    num_requests = 40_000
    draft_logits, target_logits = torch.randn(VOCABULARY), torch.randn(VOCABULARY)
    setting = Sampling(temperature)
    sampling = DraftSampling(is_drawn=True, chooses=False)
    drafts = proposed(sampling, draft_logits.expand(num_requests, -1), [setting] * num_requests, 1)
    metadata = SpecDecodeMetadata.make_dummy(drafts.tolist(), torch.device("cpu"))
    ids = [str(i) for i in range(num_requests)]
    q = sampling.verified_probs(ids, metadata.num_draft_tokens, metadata.draft_token_ids, VOCABULARY)
    assert q is not None
    torch.testing.assert_close(q[0], (draft_logits / temperature).softmax(-1))
    output = rejection_sampler.rejection_sample(
        metadata.draft_token_ids,
        metadata.num_draft_tokens,
        metadata.max_spec_len,
        metadata.cu_num_draft_tokens,
        q,
        (target_logits / temperature).expand(num_requests, -1).contiguous(),
        torch.zeros(num_requests, 1, dtype=torch.int32),
        _AllRandom(num_requests),
    )
    p = (target_logits / temperature).softmax(-1)
    counts = torch.bincount(output[:, 0].long(), minlength=VOCABULARY)
    assert stats.chisquare(counts.numpy(), (p / p.sum() * num_requests).double().numpy(), sum_check=False).pvalue > 1e-3
    accepted, theory = float((output[:, 1] >= 0).float().mean()), float(torch.minimum(p, q[0]).sum())
    assert accepted == pytest.approx(theory, abs=4 * (0.25 / num_requests) ** 0.5)


class _AllRandom:
    """What `rejection_sample` reads of SamplingMetadata."""

    all_greedy, all_random, max_num_logprobs = False, True, None

    def __init__(self, num_requests: int) -> None:
        self.temperature = torch.ones(num_requests)
        self.generators: dict[int, torch.Generator] = {}


def test_only_sampled_requests_draw_and_only_their_rows_have_a_distribution():
    torch.manual_seed(3)
    logits = torch.randn(9, VOCABULARY)
    sampling = DraftSampling(is_drawn=True, chooses=False)
    settings = [Sampling(0.0), Sampling(1.0), Sampling(0.0)]
    drafts = proposed(sampling, logits, settings, 3)
    assert torch.equal(drafts[[0, 2]], logits.argmax(-1).view(3, 3)[[0, 2]])
    verified = torch.cat([drafts[0, :2], drafts[1, :2], drafts[2, :1]]).int()
    q = sampling.verified_probs(["0", "1", "2"], [2, 2, 1], verified, VOCABULARY)
    assert q is not None
    one_hot = torch.nn.functional.one_hot(verified.long(), VOCABULARY).float()
    assert torch.equal(q[[0, 1, 4]], one_hot[[0, 1, 4]])
    torch.testing.assert_close(q[2:4], logits[3:5].softmax(-1))


def test_tokens_that_were_not_drawn_have_all_of_their_distribution():
    """The scheduler may verify placeholders for a request that drew something else before."""
    sampling = DraftSampling(is_drawn=True, chooses=False)
    (drafts,) = proposed(sampling, torch.zeros(2, VOCABULARY), [Sampling(1.0)], 2)
    others = (drafts + 1) % VOCABULARY
    q = sampling.verified_probs(["0"], [2], torch.stack([drafts[0], others[1]]), VOCABULARY)
    assert q is not None
    torch.testing.assert_close(q[0], torch.full((VOCABULARY,), 1 / VOCABULARY))
    assert torch.equal(q[1], torch.nn.functional.one_hot(others[1], VOCABULARY).float())


def test_distributions_last_until_the_request_drafts_again_or_is_gone():
    sampling = DraftSampling(is_drawn=True, chooses=False)
    (drafts,) = proposed(sampling, torch.zeros(2, VOCABULARY), [Sampling(1.0)], 2)
    assert sampling.verified_probs(["0"], [0], drafts[:0], VOCABULARY) is None
    assert sampling.verified_probs(["0"], [2], drafts, VOCABULARY) is not None
    sampling.keep_only(["0"])
    assert sampling.verified_probs(["0"], [2], drafts, VOCABULARY) is not None
    sampling.keep_only([])
    assert sampling.verified_probs(["0"], [2], drafts, VOCABULARY) is None


@pytest.mark.case("F50")
def test_a_seed_draws_the_same_at_a_position_whatever_the_neighbours():
    sampling = DraftSampling(is_drawn=True, chooses=False)
    seeded, other = Sampling(1.0, seed=7), Sampling(1.0)
    logits = torch.zeros(1, VOCABULARY)
    alone = proposed(sampling, logits.expand(8, -1), [seeded], 8)[0]
    beside = proposed(sampling, logits.expand(24, -1), [seeded, other, Sampling(1.0, seed=8)], 8)
    assert torch.equal(beside[0], alone)
    assert not torch.equal(beside[1], alone)
    assert not torch.equal(beside[2], alone)
    assert len(set(alone.tolist())) > 2  # positions have numbers of their own
    draws, keeps = sampling.begin_step([seeded])
    later = sampling.propose(candidates(logits.expand(4, -1)), ["0"], [seeded], np.array([14]), draws, keeps)
    assert torch.equal(later, alone[4:])  # position 15 is position 15, from whichever anchor it is drafted


def test_drawing_is_chosen_where_it_is_accepted_more_often():
    """q = p: drawn tokens are always accepted; the most probable one with its probability. And the reverse."""
    torch.manual_seed(4)
    flat = torch.randn(3, VOCABULARY) * 0.3
    peaked = torch.full((3, VOCABULARY), -5.0).scatter_(1, flat.argmax(-1, keepdim=True), 5.0)
    for target, is_better in ((flat, True), (peaked, False)):
        sampling = DraftSampling(is_drawn=not is_better, chooses=True)
        setting = Sampling(1.0)
        for _ in range(400):
            draws, keeps_all = sampling.begin_step([setting])
            sampling.propose(candidates(flat), ["0"], [setting], np.array([5]), draws, keeps_all)
            if sampling.wants(["0"]):
                sampling.learn(["0"], [setting], [3], [2], target.softmax(-1))
        assert sampling.draws(setting) is is_better
        assert sampling.draws(Sampling(1.0, seed=1)) is not is_better  # seeds keep what they began with
        assert sampling.draws(Sampling(0.2)) is not is_better  # nothing is known of this temperature


def test_expected_tokens_are_sums_of_products_over_reached_positions():
    record = AcceptanceRecord(draws_better=False)
    for _ in range(40):
        record.add(0, 0.5, 0.8)
        record.add(1, 0.4, 0.25)
    assert record.expected_tokens() == pytest.approx((0.5 + 0.2, 0.8 + 0.2))
    assert record.draws_better
    for _ in range(10):
        record.add(2, 0.9, 0.9)  # too few to count
    assert record.expected_tokens() == pytest.approx((0.7, 1.0))


def test_ways_that_are_about_equal_do_not_alternate():
    record = AcceptanceRecord(draws_better=False)
    for _ in range(200):
        record.add(0, 0.60, 0.61)
    assert not record.draws_better


def test_nothing_of_the_vocabularys_size_is_sorted(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("sorted")

    logits = torch.randn(4, 1000)
    given = candidates(logits)
    monkeypatch.setattr(torch.Tensor, "sort", refuse)
    monkeypatch.setattr(torch, "sort", refuse)
    sampling = DraftSampling(is_drawn=True, chooses=False)
    setting = Sampling(1.0, top_k=20, top_p=0.9)
    draws, keeps_all = sampling.begin_step([setting])
    sampling.propose(given, ["0"], [setting], np.array([3]), draws, keeps_all)
    kept = sampling._kept["0"]
    assert kept.probs.shape == (4, CANDIDATES)
