"""LM head with argmax, top-k and log-sum-exp: kernels and twin against float64, explicit sorting and literals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from vllm_dflash.triton_kernels import draft_head as module
from vllm_dflash.triton_kernels.draft_head import DraftTokens, draft_head, draft_head_torch
from vllm_dflash.triton_kernels.head_quantisation import check_conversion, quantise_head
from vllm_dflash.triton_kernels.tuning import config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = math.inf
NAN = math.nan
#: Products of the inputs are exact in float32 and up to 576 of them are summed there, in an order of the tile's own.
MAX_ERROR, RMS_ERROR = 1e-5, 2e-6
GUARD = 64  # entries behind each tensor that the launcher allocates

Run = Callable[..., DraftTokens]


def kernel_with_small_tiles(*arguments: Any) -> DraftTokens:
    """Several row tiles already for 17 rows; tiles deeper than most hidden sizes here."""
    tiles = config(4, 3, VOCAB_TILE=64, ROW_TILE=16, K_TILE=128)
    with mock.patch.object(module, "best_config", return_value=tiles):
        return module._launch(*arguments)


IMPLEMENTATIONS = [
    pytest.param(draft_head_torch, id="twin"),
    pytest.param(module._launch, id="kernel"),
    pytest.param(kernel_with_small_tiles, id="kernel-small-tiles"),
]
each_implementation = pytest.mark.parametrize("run", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def guarded_memory() -> Iterator[None]:
    """New tensors start as NaN (integers: -7777), and nothing may be written behind them."""
    guards: list[torch.Tensor] = []

    allocate = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, size: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        if options:  # of triton's interpreter
            return allocate(self, size, dtype=dtype, **options)
        shape = (size,) if isinstance(size, int) else tuple(size)
        dtype = self.dtype if dtype is None else dtype
        count = math.prod(shape)
        memory = torch.full((count + GUARD,), NAN if dtype.is_floating_point else -7777, dtype=dtype, device=DEVICE)
        guards.append(memory[count:])
        return memory[:count].view(shape)

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        yield
    for guard in guards:
        assert bool((guard.isnan() if guard.dtype.is_floating_point else guard == -7777).all()), "written past the end"


def head(
    run: Run,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    top_k: int = 1,
    num_tokens: int | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    draft_to_target: torch.Tensor | None = None,
) -> DraftTokens:
    """`run` as `draft_head` calls it, results on the CPU."""
    optional = [None if one is None else one.to(DEVICE) for one in (bias, weight_scale, draft_to_target)]
    numbers = (top_k, weight.shape[0] if num_tokens is None else num_tokens, softcap, logit_scale)
    result = run(hidden.to(DEVICE), weight.to(DEVICE), *optional[:2], *numbers, optional[2])
    return DraftTokens(*(field.cpu() for field in result))


def exact_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    num_tokens: int | None = None,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """[N, num_tokens] float64."""
    logits = hidden.double() @ weight.double().T
    if weight_scale is not None:
        logits = logits * weight_scale.double()
    if bias is not None:
        logits = logits + bias.double()
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return (logits * logit_scale)[:, :num_tokens]


def ordered_ids(logits: torch.Tensor, top_k: int) -> list[list[int]]:
    """The best ids of each row, the lowest first among equals."""
    rows = logits.tolist()
    return [sorted(range(len(row)), key=lambda token: (-row[token], token))[:top_k] for row in rows]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, unit: torch.Tensor) -> None:
    error = (actual.double() - expected) / unit
    assert error.abs().max() < MAX_ERROR
    assert error.pow(2).mean().sqrt() < RMS_ERROR


def random_head(num_rows: int, vocabulary: int, hidden_size: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_rows + vocabulary)
    hidden = torch.randn(num_rows, hidden_size, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5
    if dtype != torch.float8_e4m3fn:
        return {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
    quantised, scale = quantise_head(weight)
    return {"hidden": hidden.bfloat16(), "weight": quantised, "weight_scale": scale}


BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@each_implementation
@pytest.mark.parametrize(
    ("num_rows", "vocabulary", "hidden_size", "dtype", "options"),
    [
        (1, 300, 64, BF16, {}),
        (7, 300, 576, BF16, {"top_k": 4, "num_tokens": 271, "logit_scale": 0.25}),
        (16, 130, 40, FP32, {"top_k": 3, "softcap": 1.5, "logit_scale": 3.0}),
        (70, 65, 64, BF16, {}),
        (7, 300, 576, FP8, {"top_k": 4}),
        (18, 129, 64, FP8, {}),
    ],
)
def test_logits_and_log_sum_exp_equal_float64(run, num_rows, vocabulary, hidden_size, dtype, options):
    tensors = random_head(num_rows, vocabulary, hidden_size, dtype)
    if options:
        tensors["bias"] = torch.linspace(-1, 1, vocabulary)
    actual = head(run, **tensors, **options)
    top_k = options.get("top_k", 1)
    logits = exact_logits(**tensors, **{name: value for name, value in options.items() if name != "top_k"})
    unit = logits.abs().amax()
    assert_close(actual.logits, logits.sort(dim=1, descending=True)[0][:, :top_k], unit)
    assert_close(actual.logits, logits.gather(1, actual.tokens), unit)
    assert_close(actual.log_sum_exp, logits.exp().sum(dim=1).log(), unit)
    assert all(len(set(row)) == top_k for row in actual.tokens.tolist())
    largest = (actual.logits[:, 0] - actual.log_sum_exp).exp()
    torch.testing.assert_close(largest.double(), logits.softmax(dim=1).amax(dim=1), rtol=1e-4, atol=0)


@each_implementation
@pytest.mark.parametrize("top_k", [1, 16])
def test_ties_go_to_the_lowest_id_across_tiles(run, top_k):
    """Logits are small integers, exact in any order of summation, and every value stands in several tiles."""
    generator = torch.Generator().manual_seed(top_k)
    hidden = torch.randint(-1, 2, (2, 64), generator=generator).bfloat16()
    weight = torch.randint(-1, 2, (60, 64), generator=generator).bfloat16().repeat(7, 1)[:401]
    actual = head(run, hidden, weight, top_k=top_k)
    assert actual.tokens.tolist() == ordered_ids(exact_logits(hidden, weight), top_k)


@each_implementation
def test_ties_by_hand(run):
    """Ids 3, 130 and 250 have logit 2, in different tiles of 64 and of 128; ids 129 and 131 have 1."""
    weight = torch.zeros(260, 16)
    weight[[3, 130, 250], 0] = 2.0
    weight[[129, 131], 0] = 1.0
    hidden = torch.eye(16)[:1]
    actual = head(run, hidden, weight, top_k=6)
    assert actual.tokens.tolist() == [[3, 130, 250, 129, 131, 0]]
    assert actual.logits.tolist() == [[2, 2, 2, 1, 1, 0]]
    assert actual.log_sum_exp.item() == pytest.approx(math.log(3 * math.exp(2) + 2 * math.e + 255), abs=1e-6)
    vanishing = torch.zeros(260, 16)
    vanishing[0, 0] = -1e-30  # its logit underflows to -0, which equals the 0 of the others
    assert head(run, hidden, vanishing, logit_scale=1e-30).tokens.tolist() == [[0]]


@each_implementation
@pytest.mark.parametrize("spread", ["one tile", "all tiles"])
def test_best_tokens_lie_in_one_tile_or_in_all(run, spread):
    ids = list(range(150, 142, -1)) if spread == "one tile" else list(range(7, 535, 66))
    weight = torch.zeros(540, 16)
    weight[ids, 0] = torch.arange(8, 0, -1.0)
    actual = head(run, torch.eye(16)[:2], weight, top_k=8)
    assert actual.tokens.tolist() == [ids, list(range(8))]
    assert actual.logits[0].tolist() == list(range(8, 0, -1))


@each_implementation
def test_draft_ids_become_target_ids(run):
    """Draft ids 0, 1, 2, 3 are target ids 5, 6, 90, 200."""
    weight = torch.tensor([[1.0], [4.0], [3.0], [2.0]]).expand(4, 16).contiguous()
    offsets = torch.tensor([5, 5, 88, 197])
    actual = head(run, torch.eye(16)[:1], weight, top_k=4, draft_to_target=offsets)
    assert actual.tokens.tolist() == [[6, 90, 200, 5]]
    assert actual.logits.tolist() == [[4, 3, 2, 1]]


@each_implementation
def test_softcap_comes_before_the_scale(run):
    weight = torch.tensor([[0.0], [3.0]]).expand(2, 16).contiguous()
    actual = head(run, torch.eye(16)[:1], weight, bias=torch.tensor([0.0, 1.0]), softcap=2.0, logit_scale=10.0)
    assert actual.logits.item() == pytest.approx(10 * 2 * math.tanh((3 + 1) / 2), rel=1e-6)


@each_implementation
def test_padding_rows_of_the_weight_are_not_read(run):
    """With 130 tokens the last row before the padding is in a tile of its own."""
    weight = torch.ones(200, 16)
    weight[130:] = NAN
    weight[129] = 2.0
    actual = head(run, torch.ones(3, 16), weight, top_k=2, num_tokens=130)
    assert actual.tokens.tolist() == [[129, 0]] * 3
    expected = 16 + math.log(129 + math.exp(16))
    assert actual.log_sum_exp.tolist() == pytest.approx([expected] * 3, rel=1e-6)


@each_implementation
def test_equal_logits(run):
    actual = head(run, torch.ones(2, 16), torch.zeros(300, 16), top_k=4)
    assert actual.tokens.tolist() == [[0, 1, 2, 3]] * 2
    assert actual.logits.tolist() == [[0.0] * 4] * 2
    assert actual.log_sum_exp.tolist() == pytest.approx([math.log(300)] * 2, rel=1e-6)


@each_implementation
def test_forbidden_tokens(run):
    """A bias of -inf takes a whole tile out; ids without a logit still come in order, and none comes twice."""
    bias = torch.full((200,), -INF)
    bias[[140, 150]] = torch.tensor([-100.0, -101.0])
    some = head(run, torch.zeros(1, 16), torch.ones(200, 16), bias=bias, top_k=4)
    assert some.tokens.tolist() == [[140, 150, 0, 1]]
    assert some.log_sum_exp.item() == pytest.approx(-100 + math.log(1 + math.exp(-1)), rel=1e-6)
    none = head(run, torch.zeros(1, 16), torch.ones(200, 16), bias=bias.fill_(-INF), top_k=3)
    assert none.tokens.tolist() == [[0, 1, 2]]
    assert none.log_sum_exp.item() == -INF


@each_implementation
def test_nan_and_infinity_stay_in_their_rows(run):
    """As in torch, NaN is the largest, and the ids stay valid."""
    hidden = torch.ones(4, 16)
    hidden[1, 3] = NAN
    hidden[2, :4] = INF
    hidden[2, 3] = -INF
    hidden[3, 3] = INF
    weight = torch.ones(150, 16)
    weight[140] = 2.0
    actual = head(run, hidden, weight)
    assert actual.tokens.tolist() == [[140], [0], [0], [0]]
    assert actual.logits.isnan().flatten().tolist() == [False, True, True, False]
    assert actual.log_sum_exp.isnan().tolist() == [False, True, True, False]
    assert actual.log_sum_exp[3].item() == INF
    bias = torch.zeros(150)
    bias[70] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign bit set
    assert head(run, hidden, weight, bias=bias).tokens[0].item() == 70


@each_implementation
def test_rows_may_lie_apart(run):
    """Sampled rows are a view of all query rows, and a tied head a view of a longer one."""
    tensors = random_head(6, 200, 64, torch.float32)
    hidden, weight = torch.full((6, 100), NAN), torch.full((200, 80), NAN)
    hidden[:, :64], weight[:, :64] = tensors["hidden"], tensors["weight"]
    actual = head(run, hidden[::2, :64], weight[:, :64], top_k=2)
    assert actual.tokens.tolist() == ordered_ids(exact_logits(tensors["hidden"][::2], tensors["weight"]), 2)


@each_implementation
def test_no_rows(run):
    actual = head(run, torch.empty(0, 16), torch.ones(3, 16), top_k=2)
    assert [tuple(field.shape) for field in actual] == [(0, 2), (0, 2), (0,)]
    assert [field.dtype for field in actual] == [torch.int64, torch.float32, torch.float32]


def test_public_function_equals_the_twin():
    tensors = random_head(3, 50, 64, torch.float32)
    hidden, weight = tensors["hidden"].to(DEVICE), tensors["weight"].to(DEVICE)
    actual = draft_head(hidden, weight, top_k=3)
    expected = draft_head_torch(hidden, weight, None, None, 3, 50, 0.0, 1.0, None)
    assert actual.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(4, 8)}, "must be"),
        ({"top_k": 0}, r"top_k 0 must be in 1\.\.4"),
        ({"top_k": 5}, r"top_k 5 must be in 1\.\.4"),
        ({"top_k": 4, "num_tokens": 3}, r"1\.\.3"),
        ({"num_tokens": 5}, "num_tokens 5"),
        ({"num_tokens": 0}, "num_tokens 0"),
        ({"weight": torch.ones(4, 16).bfloat16()}, "cast one"),
        ({"weight": torch.ones(4, 16).to(FP8)}, "weight_scale belongs"),
        ({"weight_scale": torch.ones(4)}, "weight_scale belongs"),
        ({"bias": torch.ones(3)}, "bias"),
        ({"draft_to_target": torch.ones(8, dtype=torch.int64)[::2]}, "contiguous"),
        ({"weight": torch.ones(16, 4).T}, "contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments: dict[str, Any] = {"hidden": torch.ones(2, 16), "weight": torch.ones(4, 16)} | change
    with pytest.raises(ValueError, match=message):
        draft_head(**arguments)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_quantised_rows_keep_their_largest_value(dtype):
    """Rows of very unlike size, of zeros and of subnormal numbers; slices of 3 rows."""
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    weight *= torch.tensor([1.0, 1e-3, 50.0, 0.0, 1e4, 1e-20, 1e-42])[:, None]
    with mock.patch("vllm_dflash.triton_kernels.head_quantisation._ROWS_PER_SLICE", 3):
        quantised, scale = quantise_head(weight, dtype)
    assert quantised.dtype == dtype
    largest = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}[dtype]
    assert scale[3] == 1
    assert quantised[3].float().eq(0).all()
    values, expected = quantised[:6].double() * scale[:6, None], weight[:6].double()
    assert quantised[[0, 1, 2, 4, 5]].float().abs().amax(dim=1).tolist() == [largest] * 5
    # Three bits of mantissa: half a step is 1/16 of a value, or of the smallest normal one (2^-6, fnuz 2^-7).
    step = expected.abs().clamp(min=2.0**-6 * scale[:6, None]) / 16
    assert bool(((values - expected).abs() <= step * (1 + 1e-6)).all())
    assert bool(quantised.float().isfinite().all())


def test_quantised_by_hand():
    """The scale is 2; 19 / 2 = 9.5 lies between 9 and 10, and 10 is the even one."""
    quantised, scale = quantise_head(torch.tensor([[896.0, 19.0, -3.0, 0.0]]))
    assert scale.tolist() == [2.0]
    assert quantised.float().tolist() == [[448.0, 10.0, -1.5, 0.0]]


def test_float8_is_refused_with_the_repair():
    with pytest.raises(NotImplementedError, match="has 8.0; give draft_head the unquantised weight"):
        check_conversion(torch.float8_e4m3fn, "cuda", 80)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        check_conversion(torch.float8_e4m3fnuz, "cuda", 90)
    with pytest.raises(ValueError, match="float8_e5m2"):
        quantise_head(torch.ones(1, 16), torch.float8_e5m2)
    for dtype, backend, arch in [(FP8, "cuda", 89), (FP8, "cuda", 100), (torch.float8_e4m3fnuz, "hip", "gfx942")]:
        check_conversion(dtype, backend, arch)
    check_conversion(torch.bfloat16, "cuda", 80)
