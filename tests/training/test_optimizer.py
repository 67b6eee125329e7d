"""Which parameters which optimiser gets, and the learning rate over a run."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from vllm_dflash.training.optimizer import learning_rate_factor, make_optimizers, set_learning_rate


def test_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    literals = {0.0: 0.0, 0.05: 0.5, 0.1: 1.0, 0.325: 0.853553, 0.55: 0.5, 0.775: 0.146447, 1.0: 0.0}
    for progress, expected in literals.items():
        assert learning_rate_factor(progress, 0.1) == pytest.approx(expected, abs=1e-6), progress


def test_learning_rate_without_warmup_or_behind_the_end() -> None:
    assert learning_rate_factor(0.0, 0.0) == 1.0
    assert learning_rate_factor(0.5, 0.0) == pytest.approx(0.5)
    assert learning_rate_factor(1.2, 0.0) == 0.0  # a schedule planned in minutes ends a little late
    assert learning_rate_factor(0.5, 1.0) == 0.5
    assert learning_rate_factor(1.0, 1.0) == 1.0


def test_learning_rate_never_jumps() -> None:
    factors = [learning_rate_factor(i / 1000, 0.04) for i in range(1001)]
    assert max(abs(a - b) for a, b in pairwise(factors)) < 0.026


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        "matrix": nn.Parameter(torch.randn(6, 4)),
        "norm": nn.Parameter(torch.randn(4)),
        "bias": nn.Parameter(torch.randn(6)),
        "frozen": nn.Parameter(torch.randn(3, 3), requires_grad=False),
    }


def optimised(kind: str, gradient: float, **changes: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values before and after one step with equal gradients everywhere."""
    of_name = parameters()
    before = {name: p.detach().clone() for name, p in of_name.items()}
    settings = {"lr": 0.01, "beta2": 0.95, "weight_decay": 0.5} | changes
    for p in of_name.values():
        p.grad = torch.full_like(p, gradient) if p.requires_grad else None
    for optimizer in make_optimizers(of_name.values(), kind, **settings):
        optimizer.step()
    return before, {name: p.detach() for name, p in of_name.items()}


@pytest.mark.parametrize(("kind", "lr"), [("adamw", 0.01), ("muon", 0.2)])
def test_weight_decay_shrinks_matrices_only(kind: str, lr: float) -> None:
    """Without a gradient a step is decay alone: 1 - lr * 0.5. Muon's learning rate is 20 times the one given."""
    before, after = optimised(kind, gradient=0.0)
    torch.testing.assert_close(after["matrix"], before["matrix"] * (1 - lr * 0.5))
    for name in ("norm", "bias", "frozen"):
        assert after[name].equal(before[name]), name


def test_adamw_moves_every_entry_by_the_learning_rate_at_first() -> None:
    before, after = optimised("adamw", gradient=3.0, weight_decay=0.0)
    for name in ("matrix", "norm", "bias"):
        torch.testing.assert_close(before[name] - after[name], torch.full_like(before[name], 0.01))
    assert after["frozen"].equal(before["frozen"])


def test_muon_takes_the_matrices_and_adamw_the_vectors() -> None:
    of_name = parameters()
    muon, adamw = make_optimizers(of_name.values(), "muon", lr=0.01, beta2=0.9, weight_decay=0.5)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    taken = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in (muon, adamw)]
    assert [[p is of_name[n] for p, n in zip(ps, ns)] for ps, ns in zip(taken, (["matrix"], ["norm", "bias"]))] == [
        [True],
        [True, True],
    ]
    assert adamw.param_groups[0]["betas"] == (0.9, 0.9)


def test_muon_moves_a_matrix_by_the_learning_rate_in_every_direction() -> None:
    """The update is nearly orthogonal: its singular values are all about lr * 20 * sqrt(6 / 4), whatever the gradient's
    own are; torch's five Newton-Schulz steps leave them between 0.7 and 1.2 of that."""
    of_name = parameters()
    before = of_name["matrix"].detach().clone()
    scale = torch.tensor([5.0, 2.0, 1.0, 0.5])
    of_name["matrix"].grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)) * scale
    for optimizer in make_optimizers([of_name["matrix"], of_name["norm"]], "muon", 0.001, 0.95, 0.0):
        optimizer.step()
    moved = torch.linalg.svdvals(before - of_name["matrix"].detach()) / (0.001 * 20 * 1.5**0.5)
    assert moved.min() > 0.6
    assert moved.max() < 1.3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_learning_rates_are_shares_of_their_peaks(kind: str) -> None:
    """Set many times: factors do not pile up, and every group keeps its own peak, also through a checkpoint."""
    optimizers = make_optimizers(parameters().values(), kind, 0.01, 0.95, 0.5)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert peaks == ([0.01, 0.01] if kind == "adamw" else [0.2, 0.01])
    for factor in (0.5, 0.25, 0.0, 1.0, 0.1):
        set_learning_rate(optimizers, factor)
        found = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert found == pytest.approx([factor * peak for peak in peaks])
    restored = make_optimizers(parameters().values(), kind, 0.01, 0.95, 0.5)
    for new, old in zip(restored, optimizers):
        new.load_state_dict(old.state_dict())
    set_learning_rate(restored, 1.0)
    assert [group["lr"] for optimizer in restored for group in optimizer.param_groups] == pytest.approx(peaks)
