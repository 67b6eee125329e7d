"""Losses of drafted slots and their gradients: kernel and twin against the plain loss in float64, slot by slot."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_dflash.triton_kernels import draft_loss as module
from vllm_dflash.triton_kernels import draft_loss_chunk
from vllm_dflash.triton_kernels.draft_loss import draft_loss, draft_loss_torch
from vllm_dflash.triton_kernels.draft_loss_chunk import Labels, row_stride
from vllm_dflash.triton_kernels.tuning import config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: float32: products of 12 numbers, sums over up to 97 tokens, an exponential that is good to some 2e-7 on a GPU.
FLOAT32 = 3e-6
#: One rounding of the logits' gradient: half a unit in the last place is 2^-9 of a value in bfloat16, 2^-12 in float16;
#: d W and d h are sums of such values. The largest error is taken relative to the largest value.
ROUNDED = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def kernel(hidden, weight, columns, probabilities, hard, offsets=None, chunk_slots=None):
    """What `draft_loss` runs on a GPU."""
    return module._DraftLoss.apply(hidden, weight, columns, probabilities, hard, offsets, chunk_slots)


IMPLEMENTATIONS = [pytest.param(draft_loss_torch, id="twin"), pytest.param(kernel, id="kernel")]
IS_TRAINED = pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of 32 tokens, so that small vocabularies take several."""
    monkeypatch.setattr(draft_loss_chunk, "CONFIGS", (config(4, 1, TILE=32),))


def plain_loss(hidden, weight, columns, probabilities, hard, offsets=None):
    """Losses [S] and correct, slot by slot and label by label."""
    losses, correct = [], []
    for slot in range(len(hidden)):
        logits = weight @ hidden[slot] + (0 if offsets is None else offsets)
        loss = hidden[slot].sum() * 0
        if hard[slot] >= 0:
            for column, probability in zip(columns[slot].tolist(), probabilities[slot].tolist()):
                if 0 <= column < len(weight):
                    loss = loss + probability * (logits.logsumexp(0) - logits[column])
        losses.append(loss)
        correct.append(int(logits.argmax()) == int(hard[slot]))
    return torch.stack(losses) if losses else (hidden @ weight.T).sum(1), correct


def assert_near(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Largest error over largest value, and RMS error over RMS value."""
    assert found.shape == wanted.shape, name
    if not wanted.numel():
        return
    error, wanted = found.detach().double() - wanted.detach().double(), wanted.detach().double()
    assert error.abs().max() <= tolerance * wanted.abs().max(), f"{name}: {error.abs().max()} of {wanted.abs().max()}"
    assert error.norm() <= tolerance * wanted.norm(), f"{name}: RMS {error.norm()} of {wanted.norm()}"


def drawn(num_slots: int, vocab_size: int, num_soft: int, has_offsets: bool = False, seed: int = 0) -> list:
    """Arguments of `draft_loss` after hidden states and weight; the text's token is often the most probable."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(num_slots, 12, generator=generator), torch.randn(vocab_size, 12, generator=generator)
    offsets = torch.randn(vocab_size, generator=generator) if has_offsets else None
    hard = torch.randint(vocab_size, (num_slots,), generator=generator)
    hard[::2] = (hidden @ weight.T + (0 if offsets is None else offsets)).argmax(1)[::2]
    soft = torch.randint(vocab_size, (num_slots, num_soft), generator=generator)
    if num_soft:
        soft[:, -1] = hard  # the text's token is usually among the likeliest, and then it is named twice
    columns = torch.cat([hard[:, None], soft], 1)
    probabilities = torch.rand(columns.shape, generator=generator)
    probabilities /= probabilities.sum(1, keepdim=True)
    arguments = [hidden, weight, columns, probabilities, hard, offsets]
    return [None if one is None else one.to(DEVICE) for one in arguments]


def in_float64(arguments: list) -> list:
    return [one.double() if one is not None and one.is_floating_point() else one for one in arguments]


def losses_and_gradients(run, arguments: list, is_trained: bool, weights: Tensor) -> dict[str, Tensor]:
    """Everything by name; `weights` [S] are those of the slots."""
    hidden, weight, *labels = arguments
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_(is_trained)
    losses, correct = run(hidden, weight, *labels)
    inputs = {"d_hidden": hidden} | ({"d_weight": weight} if is_trained else {})
    gradients = torch.autograd.grad((losses * weights).sum(), list(inputs.values()))
    return {"losses": losses, "correct": torch.as_tensor(correct, device=DEVICE)} | dict(zip(inputs, gradients))


def check(run, arguments: list, is_trained: bool = False, weights: Tensor | None = None, tolerance: float = FLOAT32):
    """Compare with the plain loss in float64; returns what was found."""
    if weights is None:
        weights = torch.linspace(0, 2, len(arguments[0]), device=DEVICE)  # the first slot has no weight
    found = losses_and_gradients(run, arguments, is_trained, weights)
    wanted = losses_and_gradients(plain_loss, in_float64(arguments), is_trained, weights)
    assert found.keys() == wanted.keys()
    assert found["losses"].dtype == torch.float32
    assert found.pop("correct").tolist() == wanted.pop("correct").tolist()
    for name, value in found.items():
        assert_near(name, value, wanted[name], tolerance)
    return found


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@IS_TRAINED
@pytest.mark.parametrize(
    ("num_slots", "vocab_size", "num_soft", "has_offsets"),
    [(1, 97, 0, False), (5, 97, 4, True), (3, 64, 1, False), (2, 7, 2, True), (0, 97, 4, True)],
)
def test_losses_and_gradients_equal_the_plain_loss(run, is_trained, num_slots, vocab_size, num_soft, has_offsets):
    """Chunks of 2 slots, tiles of 32 tokens: one and several of each, whole and not; every other slot is right."""
    arguments = drawn(num_slots, vocab_size, num_soft, has_offsets)
    found = check(partial(run, chunk_slots=2), arguments, is_trained)
    assert found["d_hidden"][:1].eq(0).all()


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_slots_without_label_have_no_loss_and_no_gradient(run):
    """Even where their hidden state is not a number; and the others are as without them."""
    hidden, weight, columns, probabilities, hard, _ = drawn(3, 40, 2)
    hard[1], hidden[1] = -1, float("nan")
    found = losses_and_gradients(run, [hidden, weight, columns, probabilities, hard], False, torch.ones(3).to(DEVICE))
    assert found["losses"][1] == 0
    assert found["d_hidden"][1].eq(0).all()
    assert not found["correct"][1]
    others = [hidden[::2], weight, columns[::2], probabilities[::2], hard[::2]]
    for name, value in check(run, others, weights=torch.ones(2).to(DEVICE)).items():
        assert_near(name, found[name][::2], value, FLOAT32)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@IS_TRAINED
def test_labels_that_name_no_token_or_have_no_mass(run, is_trained):
    """Numbers outside the vocabulary, shares of 0, the text's token not named; shares need not sum to 1."""
    arguments = drawn(3, 40, 3)
    columns, probabilities, hard = arguments[2:5]
    columns[0], probabilities[0] = torch.tensor([3, -1, 40, 7]), torch.tensor([0.25, 0.5, 0.125, 0.0])
    probabilities[1] = 0
    columns[2], hard[2] = torch.tensor([8, 9, 8, 11]), 12
    found = check(run, arguments, is_trained, weights=torch.ones(3).to(DEVICE))
    assert found["losses"][1] == 0
    assert found["d_hidden"][1].eq(0).all()


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_large_logits_do_not_overflow(run):
    """Logits of 1e4 and -1e4; the label's is far below the largest, or is it."""
    arguments = drawn(2, 70, 1)
    hidden, weight = arguments[:2]
    weight *= 1e4 / (hidden @ weight.T).abs().max()
    assert (hidden @ weight.T).abs().max() > 9e3
    # 12 products of a logit of 1e4 are good to 1e-3 each; the second slot's loss is that much, the first one's is 0.
    check(run, arguments, weights=torch.ones(2).to(DEVICE), tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@IS_TRAINED
def test_narrow_types_equal_the_twin(dtype, is_trained):
    """Both round the logits, so losses agree as in float32; the gradient of the logits is rounded once more."""
    hidden, weight, *labels = drawn(3, 70, 2, has_offsets=True)
    arguments = [hidden.to(dtype), weight.to(dtype), *labels]
    weights = torch.tensor([1.0, 0.5, 2.0], device=DEVICE)
    found = losses_and_gradients(kernel, arguments, is_trained, weights)
    wanted = losses_and_gradients(draft_loss_torch, arguments, is_trained, weights)
    assert_near("losses", found["losses"], wanted["losses"], FLOAT32)
    assert found["correct"].tolist() == wanted["correct"].tolist()
    for name in ["d_hidden", "d_weight"][: 1 + is_trained]:
        assert found[name].dtype == dtype
        assert_near(name, found[name], wanted[name], 2 * ROUNDED[dtype])  # the twin rounds as well, elsewhere


def chunk_of_logits(logits: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits as they lie in a chunk's memory, and that memory: NaN between rows, a row of 7 behind them."""
    memory = torch.full((len(logits) + 1, row_stride(logits.shape[1])), float("nan"), dtype=dtype, device=DEVICE)
    memory[-1] = 7
    memory[:-1, : logits.shape[1]] = logits
    return memory[:-1, : logits.shape[1]], memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunk_is_overwritten_by_its_gradient_and_nothing_else_is(dtype):
    """softmax - label by hand: 3 labels of which two are the same token, 35 tokens in rows of 48."""
    logits, memory = chunk_of_logits(torch.randn(2, 35, generator=torch.Generator().manual_seed(0)), dtype)
    wanted = logits.double().softmax(1)
    losses = wanted.log()[:, [4]].mul(-0.75).add(wanted.log()[:, [33]].mul(-0.25))[:, 0]
    wanted[:, 4] -= 0.75
    wanted[:, 33] -= 0.25
    labels = Labels(
        torch.tensor([[4, 33, 4]] * 2, device=DEVICE),
        torch.tensor([[0.5, 0.25, 0.25]] * 2, device=DEVICE),
        torch.tensor([4, 33], device=DEVICE),
    )
    scales = torch.tensor([1.0, -2.0], device=DEVICE)
    found, _ = draft_loss_chunk.draft_loss_chunk(logits, labels, None, scales, has_gradient=True)
    assert_near("losses", found, losses, FLOAT32)
    assert_near("gradient", logits, wanted * scales[:, None], FLOAT32 if dtype == torch.float32 else ROUNDED[dtype])
    assert memory[-1].eq(7).all()


def test_logits_stay_where_no_gradient_is_asked_for():
    logits, memory = chunk_of_logits(torch.randn(1, 35, generator=torch.Generator().manual_seed(0)))
    before = memory.clone()
    labels = Labels(*(torch.tensor(one, device=DEVICE) for one in ([[4]], [[1.0]], [4])))
    draft_loss_chunk.draft_loss_chunk(logits, labels, None, None, has_gradient=False)
    assert torch.equal(memory.nan_to_num(-1), before.nan_to_num(-1))


@pytest.mark.parametrize(
    ("tops", "first"), [([9], 9), ([9, 11], 9), ([9, 20], 9), ([9, 39], 9), ([31, 32], 31), ([0, 15, 16], 0)]
)
def test_of_equal_logits_the_first_is_the_most_probable(tops, first):
    """As in torch.argmax; equal ones within a thread's 8 tokens, in other threads and in the next tile."""
    row = torch.zeros(40)
    row[tops] = 3.0
    tokens = [*tops, 12]
    logits, _ = chunk_of_logits(row.expand(len(tokens), 40))
    hard = torch.tensor(tokens, device=DEVICE)
    labels = Labels(hard[:, None], torch.ones(len(tokens), 1, device=DEVICE), hard)
    _, correct = draft_loss_chunk.draft_loss_chunk(logits, labels, None, None, has_gradient=False)
    assert correct.tolist() == [token == first for token in tokens]


def test_gradient_of_the_twin():
    """By finite differences, in float64."""
    hidden, weight, columns, probabilities, hard, offsets = in_float64(drawn(3, 9, 2, has_offsets=True))
    hard[1] = -1

    def losses(hidden: Tensor, weight: Tensor) -> Tensor:
        return draft_loss_torch(hidden, weight, columns, probabilities, hard, offsets)[0]

    assert torch.autograd.gradcheck(losses, (hidden.requires_grad_(), weight.requires_grad_()))


class LargestOutput(TorchDispatchMode):
    """Records the largest number of floats that any operation put out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.is_floating_point():
            self.numel = max(self.numel, output.numel())
        return output


@IS_TRAINED
def test_logits_of_all_slots_are_never_held(is_trained):
    """9 slots and 48 tokens in chunks of 3: nothing above a chunk's logits (or W), forwards or backwards."""
    hidden, weight, *labels = drawn(9, 48, 1)
    hidden, weight = hidden[:, :2].contiguous().requires_grad_(), weight[:, :2].contiguous().requires_grad_(is_trained)
    with LargestOutput() as largest:
        losses, _ = partial(kernel, chunk_slots=3)(hidden, weight, *labels)
        losses.sum().backward()
    assert largest.numel == 3 * 48


def test_frozen_head_keeps_one_gradient_of_the_size_of_the_hidden_states():
    saved: list[Tensor] = []
    hidden, *others = drawn(2, 40, 1)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kernel(hidden.requires_grad_(), *others)
    assert [tuple(tensor.shape) for tensor in saved] == [(2, 12)]


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after the other")
def test_equal_inputs_give_equal_bits():
    arguments = drawn(300, 5000, 4, has_offsets=True)
    weights = torch.rand(300, device=DEVICE)
    found, again = (losses_and_gradients(kernel, arguments, True, weights) for _ in range(2))
    for name, value in found.items():
        assert torch.equal(value, again[name]), name


def test_chunks_are_as_many_slots_as_the_memory_for_logits_takes(monkeypatch):
    """48 floats a row; in whole tiles of 128 slots, and never none."""
    hidden, weight, slots = torch.randn(300, 2), torch.randn(41, 2), []
    for num_bytes in (48 * 4 * 300, 48 * 4 * 256, 1):
        monkeypatch.setattr(module, "LOGITS_BYTES", num_bytes)
        slots.append([len(logits) for _, logits in module._chunks(hidden, weight, None)])
    assert slots == [[256, 44], [256, 44], [128, 128, 44]]


@pytest.mark.skipif(DEVICE != "cpu", reason="runs on CPUs")
def test_twin_runs_on_a_cpu_even_where_triton_is_installed(monkeypatch):
    monkeypatch.setattr(module, "draft_loss_chunk", None)
    arguments = drawn(2, 40, 1)
    assert draft_loss(*arguments)[0].equal(draft_loss_torch(*arguments)[0])


def test_labels_of_other_slots_are_refused():
    hidden, weight, columns, probabilities, hard, _ = drawn(3, 40, 1)
    with pytest.raises(ValueError, match=r"3 slots, but columns \(2, 2\), probabilities \(3, 2\) and hard \(3,\)"):
        draft_loss(hidden, weight, columns[:2], probabilities, hard)
