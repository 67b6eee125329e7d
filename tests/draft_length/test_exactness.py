"""Sampled output keeps the target's distribution, whatever lengths the controller chooses.

A small speculative sampler: the target is a Markov chain over five tokens; the drafter predicts two positions from the
anchor with distributions of its own, which depend on the anchor only, as a DFlash block's do. Drafts are sampled, and
accepted or replaced by the usual rule with the draft's probabilities. The first two tokens behind the anchor are
compared with the chain's exact distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import chisquare

from vllm_dflash.draft_length import CostModel, DraftLengthController, StepSize, TimedStep
from vllm_dflash.draft_length.terms import INDEX, NAMES, TOKENS

V, K, R, ROUNDS = 5, 2, 100, 250
RNG = np.random.default_rng(5)
TARGET = RNG.dirichlet(np.full(V, 0.8), V)  # [anchor, token]
#: [anchor, position, token]: the target's marginals, mixed with something else.
DRAFT = 0.7 * np.stack([TARGET, TARGET @ TARGET], 1) + 0.3 * RNG.dirichlet(np.full(V, 0.3), (V, K))

Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]  # anchors [R], drafts [R, K] -> lengths [R]


def sample(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token from each row."""
    return (probabilities.cumsum(-1) < rng.random((*probabilities.shape[:-1], 1))).sum(-1).clip(max=V - 1)


def speculative_step(
    anchors: np.ndarray, drafts: np.ndarray, lengths: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [R, K + 1] and accepted [R]; tokens beyond accepted + 1 are not generated and -1."""
    tokens = np.full((len(anchors), K + 1), -1)
    accepted, is_going, last = np.zeros(len(anchors), dtype=np.int64), np.full(len(anchors), True), anchors
    for j in range(K + 1):
        is_verified = is_going & (j < lengths)
        p, q, drafted = TARGET[last], DRAFT[anchors, min(j, K - 1)], drafts[:, min(j, K - 1)]
        rows = np.arange(len(anchors))
        is_right = is_verified & (rng.random(len(anchors)) < p[rows, drafted] / q[rows, drafted])
        residual = np.where(is_verified[:, None], np.maximum(p - q, 0), p)  # p itself: the bonus token
        last = np.where(is_right, drafted, sample(residual / residual.sum(1, keepdims=True), rng))
        tokens[is_going, j] = last[is_going]
        accepted += is_right
        is_going = is_right
    return tokens, accepted


def p_value(choose: Choose, learn: Callable[[np.ndarray, np.ndarray], None] = lambda lengths, accepted: None) -> float:
    """That the first two tokens of every step have the target's distribution, given their anchors."""
    rng = np.random.default_rng(1)
    counts = np.zeros((V, V, V))
    anchors = np.arange(R) % V
    for _ in range(ROUNDS):
        drafts = sample(DRAFT[anchors], rng)
        lengths = choose(anchors, drafts)
        tokens, accepted = speculative_step(anchors, drafts, lengths, rng)
        learn(lengths, accepted)
        second = np.where(tokens[:, 1] >= 0, tokens[:, 1], sample(TARGET[tokens[:, 0]], rng))
        np.add.at(counts, (anchors, tokens[:, 0], second), 1)
    exact = TARGET[:, :, None] * TARGET[None] * (R * ROUNDS / V)
    common = exact > 5
    rare = [counts[~common].sum()], [exact[~common].sum()]
    observed, expected = np.append(counts[common], rare[0]), np.append(exact[common], rare[1])
    return float(chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


def test_lengths_of_the_controller_keep_the_distribution():
    # A verified token costs a part of what a token brings, so that lengths 0, 1 and 2 all occur.
    prices = np.full(len(NAMES), 1e-6)
    prices[INDEX["step"]], prices[TOKENS] = 30.0, 0.33
    controller = DraftLengthController(K, CostModel(prices))
    ids, contexts, caps = [str(r) for r in range(R)], np.zeros(R, dtype=np.int64), np.full(R, K)
    used: list[int] = []
    decision = None

    def choose(anchors: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        nonlocal decision
        plan = controller.plan(ids, contexts, caps)
        confidences = DRAFT[anchors].max(-1)[plan.drafting, : plan.num_positions]
        decision = controller.choose(plan, confidences)
        lengths = np.zeros(R, dtype=np.int64)
        lengths[plan.drafting] = decision.lengths
        used.extend(lengths)
        return lengths

    def learn(lengths: np.ndarray, accepted: np.ndarray) -> None:
        assert decision is not None
        rows = [int(i) for i in decision.request_ids]
        size = StepSize(R, R + int(lengths.sum()), int(lengths.sum()), 0, 0, len(rows), len(rows) * 3, len(rows) * K)
        step = TimedStep(size, 30 + 0.33 * size.num_tokens)
        controller.observe(decision, lengths[rows], accepted[rows], step)

    assert p_value(choose, learn) > 1e-3
    shares = np.bincount(used, minlength=K + 1) / len(used)
    assert (shares > 0.004).all(), f"some length hardly occurred, so it was not tested: {shares}"


def test_lengths_by_the_sampled_token_would_not():
    """The same sampler, verifying only sampled tokens that the drafter finds likely: the test above can fail."""

    def choose(anchors: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        own = np.take_along_axis(DRAFT[anchors], drafts[..., None], -1)[..., 0]
        return (own > 0.4).cumprod(1).sum(1)

    assert p_value(choose) < 1e-9
