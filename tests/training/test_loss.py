"""Cross-entropy of drafted slots against torch's own on full logits, weights against sums done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_dflash.training import loss
from vllm_dflash.training.loss import SlotLabels, draw_candidates, mix_labels, slot_cross_entropy, slot_weights
from vllm_dflash.training.settings import TrainSettings
from vllm_dflash.training.step import _block_length

#: float32, sums over up to 40 logits and 12 hidden units in another order.
TOLERANCE = 2e-6


@pytest.mark.parametrize("num_slots", [1, 4, 5, 23])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["no offsets", "offsets"])
@pytest.mark.parametrize("is_soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_values_and_gradients_equal_torchs_on_full_logits(
    is_trained: bool, is_soft: bool, has_offsets: bool, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 4 slots: fewer slots than a chunk, one chunk, a chunk and one, and many."""
    monkeypatch.setattr(loss, "CHUNK", 4)
    torch.manual_seed(0)
    hidden, head = torch.randn(num_slots, 12, requires_grad=True), torch.randn(40, 12, requires_grad=is_trained)
    offsets = torch.randn(40) if has_offsets else None
    labels, distribution = random_labels(num_slots, is_soft)
    weights = torch.rand(num_slots)
    inputs = {"hidden": hidden} | ({"head": head} if is_trained else {})

    losses, correct = slot_cross_entropy(hidden, head, labels, offsets)
    gradients = torch.autograd.grad((losses * weights).sum(), list(inputs.values()))

    logits = hidden @ head.T + (0 if offsets is None else offsets)
    expected = functional.cross_entropy(logits, distribution, reduction="none")
    expected_gradients = torch.autograd.grad((expected * weights).sum(), list(inputs.values()))
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert correct.tolist() == (logits.argmax(1) == labels.hard).tolist()
    for name, found, wanted in zip(inputs, gradients, expected_gradients):
        assert found.allclose(wanted, rtol=TOLERANCE, atol=TOLERANCE), f"gradient of {name}"


def random_labels(num_slots: int, is_soft: bool) -> tuple[SlotLabels, Tensor]:
    """Labels, and the same as full distributions [N, 40]."""
    hard = torch.randint(40, (num_slots,))
    columns = torch.stack([torch.randperm(40)[:3] for _ in range(num_slots)])
    columns[:, 0] = hard  # the text's token is usually among the likeliest, and then it is named twice
    logprobs = torch.randn(num_slots, 3).log_softmax(1)
    labels = mix_labels(hard, columns, logprobs, 0.3) if is_soft else mix_labels(hard, None, None, 0.3)
    distribution = torch.zeros(num_slots, 40)
    for slot in range(num_slots):
        distribution[slot, hard[slot]] += 0.7 if is_soft else 1.0
        if is_soft:
            for column, logprob in zip(columns[slot].tolist(), logprobs[slot].tolist()):
                distribution[slot, column] += 0.3 * math.exp(logprob)
    return labels, distribution


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_no_slots(is_trained: bool) -> None:
    hidden, head = torch.randn(0, 12, requires_grad=True), torch.randn(40, 12, requires_grad=is_trained)
    labels = mix_labels(torch.zeros(0, dtype=torch.int64), None, None, 0.0)
    losses, correct = slot_cross_entropy(hidden, head, labels)
    losses.sum().backward()
    assert losses.shape == correct.shape == (0,)
    assert hidden.grad is not None


class LargestOutput(TorchDispatchMode):
    """Records the largest number of elements that any operation put out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_logits_of_all_slots_are_never_held(is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 slots and 1000 tokens in chunks of 8: nothing above a chunk's logits or the head, forwards or backwards."""
    monkeypatch.setattr(loss, "CHUNK", 8)
    hidden, head = torch.randn(64, 5, requires_grad=True), torch.randn(1000, 5, requires_grad=is_trained)
    labels = mix_labels(torch.randint(1000, (64,)), None, None, 0.0)
    with LargestOutput() as largest:
        losses, _ = slot_cross_entropy(hidden, head, labels)
        losses.sum().backward()
    assert largest.numel == 8 * 1000


def test_frozen_head_keeps_one_gradient_of_the_size_of_the_hidden_states() -> None:
    """Between forward and backward pass; this is what makes whole vocabularies affordable."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hidden, head = torch.randn(64, 5, requires_grad=True), torch.randn(1000, 5)
    labels = mix_labels(torch.randint(1000, (64,)), None, None, 0.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        slot_cross_entropy(hidden, head, labels)
    assert [tuple(tensor.shape) for tensor in saved] == [(64, 5)]


def test_soft_labels_are_renormalised_over_the_tokens_that_can_be_drafted() -> None:
    """The second of three likeliest tokens is outside the draft vocabulary; in the second row all three are."""
    columns = torch.tensor([[4, -1, 9], [-1, -1, -1]])
    logprobs = torch.tensor([[0.3, 0.5, 0.1], [0.3, 0.5, 0.1]]).log()
    labels = mix_labels(torch.tensor([9, 2]), columns, logprobs, 0.8)
    assert labels.hard.tolist() == [9, 2]
    assert labels.columns[0].tolist() == [9, 4, 0, 9]
    torch.testing.assert_close(labels.probabilities, torch.tensor([[0.2, 0.6, 0.0, 0.2], [1.0, 0.0, 0.0, 0.0]]))


def test_share_of_zero_means_hard_labels() -> None:
    labels = mix_labels(torch.tensor([9]), torch.tensor([[4]]), torch.tensor([[-1.0]]), 0.0)
    assert labels.columns.tolist() == [[9]]
    assert labels.probabilities.tolist() == [[1.0]]


# Two blocks of four predicting slots. The second has no label in its second slot (outside the draft vocabulary) and in
# its last (end of the document).
MASK = torch.tensor([[True, True, True, True], [True, False, True, False]])


def weights_of(rule: loss.WeightRule, losses: Tensor | None = None, alpha: float = 0.5) -> list[list[float]]:
    found = slot_weights(rule, torch.zeros(2, 4) if losses is None else losses, MASK, gamma=2.0, alpha=alpha)
    assert not found.requires_grad
    return [[round(value, 5) for value in of_block] for of_block in found.tolist()]


def test_uniform_weights() -> None:
    assert weights_of("uniform") == [[1, 1, 1, 1], [1, 0, 1, 0]]


def test_decay_weights() -> None:
    """exp(-(k - 1) / 2) for slot k = 1, 2, 3, 4."""
    assert weights_of("decay") == [[1, 0.60653, 0.36788, 0.22313], [1, 0, 0.36788, 0]]


def test_dpace_weights() -> None:
    """q = 0.5, 0.25, 0.5, 1 and alpha 0.5 give factors 0.75, 0.625, 0.75, 1 and products P = 0.75, 0.46875, 0.351562,
    0.351562; weight k is the sum of the products from k on. In the second block a slot without label has factor 1 and
    no product of its own: P = 0.75, -, 0.5625, -.
    """
    losses = torch.tensor([[0.5, 0.25, 0.5, 1.0], [0.5, 1e-3, 0.5, 1e-3]]).log().neg().requires_grad_()
    expected = [[1.92188, 1.17188, 0.70312, 0.35156], [1.3125, 0, 0.5625, 0]]
    assert weights_of("dpace", losses) == expected


def test_dpace_without_smoothing_counts_only_probabilities() -> None:
    losses = torch.tensor([[0.5, 0.25, 0.5, 1.0], [0.5, 1e-3, 0.5, 1e-3]]).log().neg()
    assert weights_of("dpace", losses, alpha=0.0) == [[0.75, 0.25, 0.125, 0.0625], [0.75, 0, 0.25, 0]]
    assert weights_of("dpace", losses, alpha=1.0) == [[4, 3, 2, 1], [2, 0, 1, 0]]


def test_candidates_are_the_used_tokens_and_as_many_others_as_asked_for() -> None:
    """Of 20 tokens 3 are used; each of the 5 drawn stands for 17 / 5 tokens."""
    used = torch.tensor([[4, 9], [9, 15]])
    drawn = draw_candidates(used, 20, 5, torch.Generator().manual_seed(0))
    tokens = drawn.tokens.tolist()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 8
    offsets = dict(zip(tokens, drawn.offsets.tolist()))
    assert [offsets.pop(token) for token in (4, 9, 15)] == [0.0, 0.0, 0.0]
    assert list(offsets.values()) == pytest.approx([math.log(17 / 5)] * 5)


@pytest.mark.parametrize(("vocab_size", "num_negatives"), [(20, 17), (20, 100), (3, 5)])
def test_enough_negatives_are_the_whole_vocabulary_without_offsets(vocab_size: int, num_negatives: int) -> None:
    drawn = draw_candidates(torch.tensor([0, 1, 2]), vocab_size, num_negatives, torch.Generator())
    assert drawn.tokens.tolist() == list(range(vocab_size))
    assert drawn.offsets.tolist() == [0.0] * vocab_size


def test_sum_over_the_vocabulary_is_unbiased() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, dtype=torch.float64) * 2
    used, generator = torch.tensor([3, 77]), torch.Generator().manual_seed(0)
    sums = []
    for _ in range(2000):
        drawn = draw_candidates(used, 200, 20, generator)
        sums.append((logits[drawn.tokens] + drawn.offsets).exp().sum())
    estimates = torch.stack(sums)
    error = estimates.std() / len(sums) ** 0.5
    full = logits.exp().sum()
    assert error < 0.02 * full
    assert abs(estimates.mean() - full) < 4 * error


@pytest.mark.parametrize("gamma", [1.5, 4.0])
def test_truncated_blocks_have_each_slot_as_often_as_the_decay_weighs_it(gamma: float) -> None:
    """Slot k takes part where the block is longer than k: a share of exp(-(k - 1) / gamma) of the rows."""
    settings = TrainSettings(
        target="t", output="o", draft_block_size=6, in_block_attention="causal", truncate_blocks=True, loss_decay=gamma
    )
    generator, num_draws = torch.Generator().manual_seed(0), 5_000
    lengths = torch.tensor([_block_length(settings, generator) for _ in range(num_draws)])
    assert int(lengths.min()) == 2
    assert int(lengths.max()) == 6
    for slot in range(1, 6):
        share = math.exp(-(slot - 1) / gamma)
        error = math.sqrt(share * (1 - share) / num_draws)
        assert abs(float((lengths > slot).float().mean()) - share) <= 4 * error


def test_blocks_are_whole_unless_truncation_is_asked_for() -> None:
    settings = TrainSettings(target="t", output="o", draft_block_size=6)
    assert {_block_length(settings, torch.Generator().manual_seed(seed)) for seed in range(50)} == {6}
