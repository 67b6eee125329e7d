"""The loss of a packed row against sums over blocks and slots; what a seed decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import HIDDEN, drafter_config, drafter_tensors
from tiny_rows import drawn_row
from torch import Tensor, nn

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.blocks import PackedRow, make_blocks
from vllm_dflash.training.model import Drafter
from vllm_dflash.training.settings import TrainSettings
from vllm_dflash.training.step import StepResult, TargetTables, row_loss

#: float32, sums in another order.
TOLERANCE = 1e-5

ROW = drawn_row("..xxxxxxx.xxx", ".xxxxxxxx", feature_size=2 * HIDDEN, top_k=3)
#: All rows where a block may begin: with more anchors allowed than these, no seed matters.
ANCHORS = [2, 3, 4, 5, 6, 7, 10, 11, 14, 15, 16, 17, 18, 19, 20]
VOCABULARY = [token for token in range(128) if token % 3]


class Target:
    """The two ends of a target, as tables."""

    def __init__(self, vocabulary: list[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(7)
        embedding, head = (torch.randn(128, HIDDEN, generator=generator) for _ in range(2))
        self.vocabulary = list(range(128)) if vocabulary is None else vocabulary
        column = torch.full((128,), -1)
        column[self.vocabulary] = torch.arange(len(self.vocabulary))
        self.tables = TargetTables(embedding, head[self.vocabulary], column)


def settings_of(**changes: Any) -> TrainSettings:
    return TrainSettings(target="t", output="o", draft_block_size=5, loss_decay=2.0, **changes)


def new_drafter(has_lm_head: bool = False, **changes: Any) -> Drafter:
    config = drafter_config(num_hidden_layers=1, **changes)
    drafter = Drafter(DFlashConfig.from_dict(config, "tiny"), has_lm_head=has_lm_head)
    drafter.load_state_dict(drafter_tensors(config), strict=False)
    return drafter


def loss_of(
    drafter: nn.Module, target: Target, settings: TrainSettings, row: PackedRow = ROW, seed: int = 0
) -> StepResult:
    return row_loss(drafter, row, target.tables, settings, "sdpa", seed)


def decay(slot: int, num_labels: int) -> float:
    """Weight of a slot in a block of so many labels."""
    return math.exp(-(slot - 1) / 2)


def loss_by_loops(
    drafter: Drafter, target: Target, soft_share: float = 0.0, weight_of: Callable[[int, int], float] = decay
) -> tuple[Tensor, list[float], list[float]]:
    """Loss; drafts that are right and slots with a label, for each of 4 slots."""
    assert ROW.top_ids is not None
    assert ROW.top_logprobs is not None
    column = {token: index for index, token in enumerate(target.vocabulary)}
    tokens, document, is_supervised = ROW.input_ids.tolist(), ROW.document.tolist(), ROW.loss_mask.tolist()
    head = target.tables.head if drafter.lm_head is None else drafter.lm_head.weight
    hidden = drafter(ROW, make_blocks(ROW, torch.tensor(ANCHORS), 5), target.tables.embedding)
    total, total_weight = torch.tensor(0.0), 0.0
    correct, labelled = [0.0] * 4, [0.0] * 4
    for block, anchor in enumerate(ANCHORS):
        labels: list[int] = []
        for at in range(anchor + 1, min(anchor + 5, len(tokens))):
            if document[at] != document[anchor] or not is_supervised[at]:
                break
            labels.append(tokens[at])
        is_reached = True  # by serving: it ends at a token that the drafter cannot draft
        for slot, token in enumerate(labels, start=1):
            labelled[slot - 1] += 1
            is_reached = is_reached and token in column
            if not is_reached:
                continue
            logits = head @ hidden[block, slot - 1]
            correct[slot - 1] += float(int(logits.argmax()) == column[token])
            losses = -logits.log_softmax(0)
            loss = losses[column[token]]
            before = anchor + slot - 1  # whose likeliest successors are known
            likely = zip(ROW.top_ids[before].tolist(), ROW.top_logprobs[before].exp().tolist())
            shares = {column[t]: share for t, share in likely if t in column}
            if soft_share and shares:
                soft = sum(losses[c] * share for c, share in shares.items()) / sum(shares.values())
                loss = (1 - soft_share) * loss + soft_share * soft
            weight = weight_of(slot, len(labels))
            total, total_weight = total + weight * loss, total_weight + weight
    return total / total_weight, correct, labelled


@pytest.mark.parametrize("has_lm_head", [False, True], ids=["target's head", "own head"])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["all tokens", "reduced vocabulary"])
@pytest.mark.parametrize("soft_share", [0.0, 0.4], ids=["hard", "soft"])
def test_loss_and_gradients_equal_the_loops(soft_share: float, vocabulary: list[int] | None, has_lm_head: bool) -> None:
    target = Target(vocabulary)
    drafter = new_drafter(has_lm_head, draft_vocab_size=len(target.vocabulary))
    found = loss_of(drafter, target, settings_of(soft_labels=3 if soft_share else 0, soft_share=soft_share))
    expected, correct, labelled = loss_by_loops(drafter, target, soft_share)
    assert found.num_anchors == len(ANCHORS)
    assert found.loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    assert found.correct.tolist() == correct
    assert found.labelled.tolist() == labelled
    parameters = dict(drafter.named_parameters())
    gradients = (torch.autograd.grad(loss, list(parameters.values())) for loss in (found.loss, expected))
    for name, mine, wanted in zip(parameters, *gradients):
        assert mine.allclose(wanted, rtol=1e-4, atol=TOLERANCE), f"gradient of {name}"


def test_draft_tokens_in_any_order_stand_for_their_target_tokens() -> None:
    column = torch.full((10,), -1)
    column[[7, 2, 5]] = torch.arange(3)
    tables = TargetTables(torch.zeros(10, 4), torch.zeros(3, 4), column)
    assert tables.target_ids.tolist() == [7, 2, 5]


@pytest.mark.parametrize("num_negatives", [0, 5])
def test_drafts_that_are_right_are_counted(num_negatives: int) -> None:
    """The head says nothing but labels, and loudly, so negatives do not change which drafts are right."""
    target, drafter = Target(), new_drafter()
    blocks = make_blocks(ROW, torch.tensor(ANCHORS), 5)
    target.tables.head.mul_(torch.isin(torch.arange(128), blocks.labels[blocks.label_mask])[:, None] * 100)
    _, correct, _ = loss_by_loops(drafter, target)
    assert sum(correct) >= 2
    assert loss_of(drafter, target, settings_of(loss_negatives=num_negatives)).correct.tolist() == correct


def test_uniform_weights() -> None:
    target, drafter = Target(VOCABULARY), new_drafter(draft_vocab_size=len(VOCABULARY))
    expected, _, _ = loss_by_loops(drafter, target, weight_of=lambda slot, num_labels: 1.0)
    found = loss_of(drafter, target, settings_of(loss_weight="uniform"))
    assert found.loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)


def test_dpace_weights() -> None:
    """With alpha 1 every slot counts as often as there are labels from it on; smaller ones look at the losses."""
    target, drafter = Target(), new_drafter()
    expected, _, _ = loss_by_loops(drafter, target, weight_of=lambda slot, num_labels: num_labels - slot + 1)
    smoothed, plain = (loss_of(drafter, target, settings_of(loss_weight="dpace", dpace_alpha=a)).loss for a in (1, 0.1))
    assert smoothed.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    assert plain.item() != pytest.approx(expected.item(), rel=1e-3)


def test_enough_negatives_are_the_whole_vocabulary() -> None:
    drafter, target = new_drafter(), Target(VOCABULARY)
    whole = loss_of(drafter, target, settings_of(soft_labels=3))
    sampled = loss_of(drafter, target, settings_of(soft_labels=3, loss_negatives=len(VOCABULARY)))
    assert sampled.loss.item() == pytest.approx(whole.loss.item(), rel=TOLERANCE)
    assert sampled.correct.equal(whole.correct)


def test_few_negatives_estimate_the_loss() -> None:
    """The mean over seeds is near; each is another draw. (The logarithm of an unbiased sum is a little too small.)"""
    drafter, target = new_drafter(), Target()
    target.tables.head.mul_(0.1)
    whole = loss_of(drafter, target, settings_of()).loss.item()
    sampled = [loss_of(drafter, target, settings_of(loss_negatives=20), seed=seed).loss.item() for seed in range(40)]
    assert len(set(sampled)) == 40
    assert sum(sampled) / 40 == pytest.approx(whole, rel=0.02)


def test_seed_decides_everything() -> None:
    """Anchors, length of blocks and negatives: equal seeds give equal losses to the bit, others do not."""
    drafter, target = new_drafter(is_causal=True), Target()
    settings = settings_of(max_anchors=3, loss_negatives=8, in_block_attention="causal", truncate_blocks=True)
    results = [loss_of(drafter, target, settings, seed=seed) for seed in (0, 1, 2, 3, 4, 5)]
    again = loss_of(drafter, target, settings, seed=4)
    assert again.loss.equal(results[4].loss)
    assert len({result.loss.item() for result in results}) == 6
    assert {result.num_anchors for result in results} == {6}
    assert len({len(result.labelled) for result in results}) > 1


def test_truncated_blocks_leave_out_whole_slots_and_weigh_the_others_equally() -> None:
    drafter, target = new_drafter(is_causal=True), Target()
    settings = settings_of(in_block_attention="causal", truncate_blocks=True)
    found = {len(result.labelled): result for result in (loss_of(drafter, target, settings, seed=s) for s in range(20))}
    assert set(found) == {1, 2, 3, 4}
    uniform = loss_of(drafter, target, settings_of(in_block_attention="causal", loss_weight="uniform"))
    assert found[4].loss.item() == pytest.approx(uniform.loss.item(), rel=TOLERANCE)
    assert found[2].labelled.tolist() == uniform.labelled[:2].tolist()


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_row_on_which_nothing_can_be_drafted(backend: Any) -> None:
    """One supervised token is no anchor: the loss is 0, and its gradient too."""
    drafter, target = new_drafter(), Target()
    row = drawn_row("..x", ".x.", feature_size=2 * HIDDEN)
    found = row_loss(drafter, row, target.tables, settings_of(loss_negatives=4), backend, 0)
    found.loss.backward()
    assert found.loss.item() == found.num_anchors == 0
    assert found.labelled.tolist() == [0, 0, 0, 0]
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())


class Wrapped(nn.Module):
    """What frameworks wrap around a model for distributed training."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Tensor:
        return self.module(*inputs)


def test_own_head_is_found_in_a_wrapped_drafter() -> None:
    drafter, target = new_drafter(has_lm_head=True), Target()
    plain = loss_of(drafter, target, settings_of()).loss
    assert loss_of(Wrapped(drafter), target, settings_of()).loss.equal(plain)
    assert not loss_of(new_drafter(), target, settings_of()).loss.equal(plain)
