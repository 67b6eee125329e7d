"""The draft pass that is planned is about as good as the best one there is, against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vllm_dflash.draft_length import CostModel
from vllm_dflash.draft_length.plan import best_draft_pass
from vllm_dflash.draft_length.terms import HEADS, INDEX, NAMES, QUERIES, TOKEN_KNOTS, TOKENS

BLOCK, CONTEXT = 6, 100
#: Milliseconds that a token adds to a target pass, by how many there are.
MACHINES = {
    "linear, as a CPU": np.full(len(TOKEN_KNOTS), 0.15),
    "flat, then rising, as a GPU": np.where(TOKEN_KNOTS < 8, 0.002, 0.1),
    "rising, then flat, as with experts": np.where(TOKEN_KNOTS < 8, 0.3, 0.002),
}


def cost_model(milliseconds: np.ndarray) -> CostModel:
    prices = np.full(len(NAMES), 1e-9)
    prices[[INDEX["step"], INDEX["draft"], INDEX["stored"]]] = 1e-3, 1e-4, 2e-5
    prices[TOKENS] = 1e-3 * milliseconds
    prices[QUERIES], prices[HEADS] = 2e-6, 1e-5
    return CostModel(prices)


def best_rate(cost: CostModel, survival: np.ndarray) -> float:
    """Of all lengths of all requests; the draft pass is for those that verify, and as wide as the longest needs."""
    num_requests, num_positions = survival.shape
    rates = []
    for lengths in itertools.product(range(num_positions + 1), repeat=num_requests):
        num_drafting = sum(length > 0 for length in lengths)
        seconds = cost.one_token_seconds(num_requests, num_requests * CONTEXT)
        seconds += cost.storing_seconds(num_requests, is_plain=num_drafting == 0)
        seconds += float(cost.token_seconds(np.array(num_requests + sum(lengths))))
        seconds += sum(lengths) * (CONTEXT * cost.price("attended") + cost.price("stored_row"))
        contexts = np.array(num_drafting * CONTEXT)
        seconds += float(cost.draft_pass_seconds(np.array(num_drafting), max(lengths), BLOCK, contexts))
        tokens = num_requests + sum(row[:length].sum() for row, length in zip(survival, lengths))
        rates.append(tokens / seconds)
    return max(rates)


@pytest.mark.parametrize("machine", MACHINES)
def test_planned_pass_is_about_the_best_of_all(machine):
    cost, rng = cost_model(MACHINES[machine]), np.random.default_rng(0)
    for case in range(30):
        shape = [(1, 5), (2, 5), (3, 4)][case % 3]
        survival = np.cumprod(rng.beta(3, 1, shape), 1)
        contexts = np.full(shape[0], CONTEXT)
        prospect = best_draft_pass(survival[:, None], contexts, cost, BLOCK)
        best = best_rate(cost, survival)
        # What its positions allow, which is what is chosen from once the block is drafted.
        allowed = np.where(np.arange(shape[1]) < prospect.num_positions, survival, 0.0)
        assert best_rate(cost, allowed) == pytest.approx(best, rel=0.005)
        assert prospect.rate <= best * (1 + 1e-9)
        assert max(prospect.rate, prospect.plain_rate) == pytest.approx(best, rel=0.02)


def test_positions_that_cost_next_to_nothing_are_drafted():
    """The first rows call for experts, later ones find them loaded: on average a row is dear, one more is not."""
    cost = cost_model(MACHINES["rising, then flat, as with experts"])
    survival = np.cumprod(np.full((2, 5), 0.7), 1)
    assert best_draft_pass(survival[:, None], np.full(2, CONTEXT), cost, BLOCK).num_positions == 5
