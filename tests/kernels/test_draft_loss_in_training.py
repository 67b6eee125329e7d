"""The trainer's loss with the kernel of `draft_loss` equals the loss without it, and so do all gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_models import HIDDEN, drafter_config, drafter_tensors
from tiny_rows import drawn_row
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.loss import SlotLabels, slot_cross_entropy
from vllm_dflash.training.model import Drafter
from vllm_dflash.training.settings import TrainSettings
from vllm_dflash.training.step import TargetTables, row_loss
from vllm_dflash.triton_kernels import draft_loss as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: float32: sums over 128 logits in another order, and on through the drafter's layer.
TOLERANCE = 1e-5
#: The logits' gradient is rounded to bfloat16, to within 2^-9 of each value, at two places that differ.
BFLOAT16_TOLERANCE = 2**-7


@pytest.fixture
def switch(monkeypatch):
    """Says whether the kernel is to run, which otherwise depends on the device."""
    return lambda is_on: monkeypatch.setattr(kernels, "has_kernel", lambda hidden: is_on)


@pytest.mark.parametrize(
    ("changes", "has_lm_head"),
    [({"soft_labels": 3, "soft_share": 0.4}, False), ({"soft_labels": 3, "loss_negatives": 20}, True)],
    ids=["soft labels", "soft labels, random negatives, own head"],
)
def test_row_loss_is_the_same_with_and_without_kernel(changes, has_lm_head, switch):
    generator = torch.Generator().manual_seed(0)
    row = drawn_row("..xxxxxxx.xxx", feature_size=2 * HIDDEN, top_k=3).to(torch.device(DEVICE))
    column = torch.arange(128) - 28  # the drafter cannot draft the first 28 tokens
    ends = (torch.randn(128, HIDDEN, generator=generator), torch.randn(100, HIDDEN, generator=generator))
    tables = TargetTables(*(one.to(DEVICE) for one in (*ends, column.clamp_min(-1))))
    config = drafter_config(num_hidden_layers=1, draft_vocab_size=100)
    drafter = Drafter(DFlashConfig.from_dict(config, "tiny"), has_lm_head=has_lm_head)
    drafter.load_state_dict(drafter_tensors(config), strict=False)
    drafter.to(DEVICE)
    settings = TrainSettings(target="t", output="o", draft_block_size=5, max_anchors=2, **changes)
    results, gradients = [], []
    for is_on in (False, True):
        switch(is_on)
        results.append(row_loss(drafter, row, tables, settings, "sdpa", 0))
        gradients.append(torch.autograd.grad(results[-1].loss, list(drafter.parameters())))
    without, found = results
    assert without.labelled.sum() >= 4
    torch.testing.assert_close(found.loss, without.loss, rtol=TOLERANCE, atol=0)
    assert found.correct.tolist() == without.correct.tolist()
    for (name, _), one, wanted in zip(drafter.named_parameters(), gradients[1], gradients[0], strict=True):
        assert (one - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), f"gradient of {name}"


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_in_autocast_products_are_narrow_with_and_without_kernel(is_trained, switch):
    """Hidden states in float32, as the drafter's last norm gives them; a frozen head in bfloat16, an own one not."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(num, 12, generator=generator, device=DEVICE).requires_grad_() for num in (3, 40))
    if not is_trained:
        head = head.detach().bfloat16()
    tokens = torch.tensor([5, 39, 0], device=DEVICE)
    labels = SlotLabels(tokens[:, None], torch.ones(3, 1, device=DEVICE), tokens)
    offsets = torch.linspace(-1, 1, 40, device=DEVICE)

    def ran(is_on: bool) -> list[Tensor]:
        switch(is_on)
        with torch.autocast(DEVICE, torch.bfloat16):
            losses, _ = slot_cross_entropy(hidden, head, labels, offsets)
        return [losses, *torch.autograd.grad(losses.sum(), [hidden, head][: 1 + is_trained])]

    for name, one, wanted in zip(["losses", "d_hidden", "d_head"], ran(True), ran(False)):
        assert one.dtype == torch.float32, name
        tolerance = TOLERANCE if name == "losses" else BFLOAT16_TOLERANCE
        assert (one - wanted).abs().max() <= tolerance * wanted.abs().max(), name
