"""K/V injection: kernel and twin against torch's RMSNorm, an explicit rotation and loops over slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from vllm_dflash.triton_kernels import context_kv as module
from vllm_dflash.triton_kernels.cache_table import CacheTable
from vllm_dflash.triton_kernels.context_kv import context_kv, context_kv_torch, fold_norm
from vllm_dflash.triton_kernels.tuning import config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN_EPS, K_EPS = 1e-5, 1e-6
PAGES, PAGE_SIZE, MAX_POSITION = 6, 16, 50
GUARD = 1  # pages before the caches' first: where slot -1 would be written
FIRST_PAGE, LAST_PAGE = 1, 3  # slots lie in these; pages around them are canaries
CANARY = 7.0
#: Largest and RMS difference relative to the RMS of what is written. float32: sums of 64 products in another order.
FLOAT32 = (2e-5, 2e-6)
#: bfloat16: float32 until one rounding in both, which differ next to a border between two roundings.
BFLOAT16 = (2e-2, 5e-4)
#: fp8 has 3 bits of mantissa: the same borders, an eighth of the value apart; values reach 4 times the RMS.
FP8 = (0.5, 2e-2)


class Case(NamedTuple):
    """Sizes and options of a call."""

    num_rows: int = 5
    num_layers: int = 2
    num_kv_heads: int = 1
    head_size: int = 64
    rotary_size: int = 64
    hidden_size: int = 64
    is_neox: bool = True
    has_bias: bool = False
    has_sums: bool = False
    has_layer_slots: bool = False
    is_hnd: bool = False


CASES = {
    "three layers, two heads": Case(num_layers=3, num_kv_heads=2),
    "one row, eight heads of 128": Case(1, 1, 8, 128, 128, has_bias=True, has_sums=True, is_hnd=True),
    "33 rows": Case(33, 1, rotary_size=32, has_sums=True, has_layer_slots=True),
    "five layers, interleaved": Case(num_layers=5, is_neox=False, has_layer_slots=True, is_hnd=True),
    "interleaved in part, no tile divides": Case(3, 1, 2, rotary_size=24, hidden_size=40, is_neox=False, has_bias=True),
    "NeoX in part, no tile divides": Case(3, 2, 1, rotary_size=24, hidden_size=40, has_bias=True, has_layer_slots=True),
}


class Drawn(NamedTuple):
    """Arguments of a call in their order, before `caches`; and what was folded into the weight."""

    arguments: tuple[Any, ...]
    plain_weight: torch.Tensor
    norm_weight: torch.Tensor


def drawn(case: Case, dtype: torch.dtype = torch.float32) -> Drawn:
    generator = torch.Generator().manual_seed(case.num_rows)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    num_outputs = case.num_layers * 2 * case.num_kv_heads * case.head_size
    wide = normal(case.num_rows + 2, 2 * case.hidden_size) * 3
    features = wide[: case.num_rows, case.hidden_size :]  # a view: rows lie apart, and others follow
    sums = features.float().square().view(case.num_rows, 2, -1).sum(dim=2).contiguous() if case.has_sums else None
    plain, norm = (
        normal(num_outputs, case.hidden_size) / math.sqrt(case.hidden_size),
        1 + 0.3 * normal(case.hidden_size),
    )
    slots = torch.stack([draw_slots(generator, case.num_rows) for _ in range(case.num_layers)])
    arguments = (
        features,
        sums,
        before_nan(fold_norm(plain, norm)),
        normal(num_outputs) if case.has_bias else None,
        1 + 0.3 * normal(case.num_layers, case.head_size),
        normal(MAX_POSITION, case.rotary_size, dtype=torch.float32),  # no rotation: sines and cosines mix up visibly
        integers(0, MAX_POSITION, case.num_rows),
        (slots if case.has_layer_slots else slots[0]).to(DEVICE),
    )
    return Drawn(arguments, plain, norm)


def before_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with NaN in the memory behind it."""
    memory = torch.cat([tensor.flatten(), tensor.new_full((64,), float("nan"))])
    return memory[: tensor.numel()].view(tensor.shape)


def draw_slots(generator: torch.Generator, num_rows: int) -> torch.Tensor:
    """Different slots, a quarter of them -1, but not the first row's."""
    size = (LAST_PAGE + 1 - FIRST_PAGE) * PAGE_SIZE
    slots = FIRST_PAGE * PAGE_SIZE + torch.randperm(size, generator=generator)[:num_rows]
    slots[1:][torch.rand(num_rows - 1, generator=generator) < 0.25] = -1
    return slots


class Caches(NamedTuple):
    """A table, and [pages, page, heads, 2 * D] of each layer that it points into, guard pages included."""

    table: CacheTable
    layers: list[torch.Tensor]


def empty_caches(case: Case, dtype: torch.dtype, scales: tuple[torch.Tensor, ...] = ()) -> Caches:
    """Caches as vLLM packs them, [pages, heads, page, 2 * D] logically, full of canaries."""
    order = (0, 1, 2, 3) if case.is_hnd else (0, 2, 1, 3)  # physical: HND or NHD
    shape = (PAGES, case.num_kv_heads, PAGE_SIZE, 2 * case.head_size)
    layers = []
    for _ in range(case.num_layers):
        storage = torch.full([shape[axis] for axis in order], CANARY, device=DEVICE).to(dtype)
        layers.append(storage.permute(order).transpose(1, 2))  # each order is its own inverse
    as_stored = [layer.view(torch.uint8) if dtype.itemsize == 1 else layer for layer in layers]
    keys, values = zip(*(layer[GUARD:].split(case.head_size, dim=-1) for layer in as_stored))
    return Caches(CacheTable(keys, values, dtype, *scales), layers)


def contents(caches: Caches) -> torch.Tensor:
    """[L, 2, pages, page, heads, D] float32."""
    return torch.stack([torch.stack(layer.float().chunk(2, dim=-1)) for layer in caches.layers])


def oracle(case: Case, call: Drawn) -> torch.Tensor:
    """Contents of float32 caches after the call, the norm not folded, row by row and element by element."""
    features, _, _, bias, k_norm, cos_sin, positions, slots = call.arguments
    shape = (case.num_layers, 2, PAGES, PAGE_SIZE, case.num_kv_heads, case.head_size)
    caches = torch.full(shape, CANARY)
    normed = functional.rms_norm(features, features.shape[1:], call.norm_weight, HIDDEN_EPS)
    flat = functional.linear(normed, call.plain_weight, bias)
    by_head = flat.view(case.num_rows, case.num_layers, 2, case.num_kv_heads, case.head_size)
    for layer in range(case.num_layers):
        for row in range(case.num_rows):
            slot = int(slots[layer, row] if slots.dim() == 2 else slots[row])
            if slot == -1:
                continue
            keys = functional.rms_norm(by_head[row, layer, 0], (case.head_size,), k_norm[layer], K_EPS)
            angles = cos_sin[positions[row]].tolist()
            page, place = divmod(slot, PAGE_SIZE)
            for head in range(case.num_kv_heads):
                caches[layer, 0, GUARD + page, place, head] = torch.tensor(
                    rotated(keys[head].tolist(), angles, case.is_neox)
                )
            caches[layer, 1, GUARD + page, place] = by_head[row, layer, 1]
    return caches


def rotated(key: list[float], angles: list[float], is_neox: bool) -> list[float]:
    half, result = len(angles) // 2, list(key)
    for pair in range(half):
        first, second = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
        cos, sin = angles[pair], angles[half + pair]
        result[first] = key[first] * cos - key[second] * sin
        result[second] = key[second] * cos + key[first] * sin
    return result


def kernel(split: int) -> Callable[..., None]:
    """The launcher with tiles of 16 rows and a K tile that leaves two steps."""

    def run(features: torch.Tensor, *others: Any) -> None:
        caches = others[7]
        tiles = config(4, 2, COLUMN_TILE=caches.head_size, ROW_TILE=16, K_TILE=32, SPLIT_K=split)
        module._launch(features, *others, config=tiles)

    return run


IMPLEMENTATIONS = [
    pytest.param(context_kv_torch, id="twin"),
    pytest.param(kernel(1), id="kernel"),
    pytest.param(kernel(2), id="split"),
]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerances: tuple[float, float]) -> None:
    """What was written is close, all else is untouched."""
    actual, expected = actual.cpu(), expected.cpu()
    written = expected != CANARY
    assert torch.equal(actual[~written], expected[~written])
    error, scale = (actual - expected)[written], expected[written].square().mean().sqrt()
    assert error.abs().max() <= tolerances[0] * scale
    assert error.square().mean().sqrt() <= tolerances[1] * scale


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_caches_hold_what_the_composition_computes(run, name):
    call, caches = drawn(CASES[name]), empty_caches(CASES[name], torch.float32)
    run(*call.arguments, caches.table, HIDDEN_EPS, K_EPS, CASES[name].is_neox)
    assert_close(contents(caches), oracle(CASES[name], call), FLOAT32)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", ["33 rows", "one row, eight heads of 128"])
def test_bfloat16_kernel_equals_twin(split, name):
    call, case = drawn(CASES[name], torch.bfloat16), CASES[name]
    caches = [empty_caches(case, torch.bfloat16) for _ in range(2)]
    for run, one in zip((context_kv_torch, kernel(split)), caches):
        run(*call.arguments, one.table, HIDDEN_EPS, K_EPS, case.is_neox)
    twin, ours = map(contents, caches)
    assert_close(ours, twin, BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_fp8_caches_hold_values_divided_by_their_layers_scale(run, dtype):
    if DEVICE == "cuda" and (dtype == torch.float8_e4m3fnuz) == (torch.version.hip is None):
        pytest.skip("not this GPU's fp8")
    case = Case(num_layers=2, is_hnd=True)
    call = drawn(case)
    key_scales, value_scales = torch.tensor([[0.5, 0.3], [0.25, 2.0]], device=DEVICE)
    caches = empty_caches(case, dtype, (key_scales, value_scales))
    run(*call.arguments, caches.table, HIDDEN_EPS, K_EPS, True)
    expected = oracle(case, call)
    written = expected != CANARY
    scaled = expected / torch.stack([key_scales, value_scales], dim=1).cpu()[..., None, None, None, None]
    stored = scaled.clamp(-caches.table.fp8_max, caches.table.fp8_max).to(dtype).float()
    assert_close(contents(caches), torch.where(written, stored, expected), FP8)
    equal = (contents(caches).cpu() == stored)[written].float().mean()
    assert equal > 0.99  # the others lie next to a border between two roundings


@pytest.mark.parametrize("run", IMPLEMENTATIONS[:2])
def test_fp8_takes_the_largest_value_for_what_is_too_large(run):
    """NaN, torch's choice, would spread over everything that attends to it."""
    case = Case(num_rows=1, num_layers=1)
    scales = torch.full((1,), 1e-6, device=DEVICE)
    dtype = torch.float8_e4m3fn if torch.version.hip is None else torch.float8_e4m3fnuz
    caches = empty_caches(case, dtype, (scales, scales))
    arguments = drawn(case).arguments
    run(*arguments, caches.table, HIDDEN_EPS, K_EPS, True)
    page, place = divmod(int(arguments[7][0]), PAGE_SIZE)
    assert (contents(caches)[0, :, GUARD + page, place].abs() == caches.table.fp8_max).float().mean() > 0.9


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_rows_without_slot_read_nothing_and_write_nothing(run):
    """Their positions may lie outside the table of sines, their features may be NaN."""
    case = Case(num_rows=3, num_layers=1)
    call, caches = drawn(case), empty_caches(case, torch.float32)
    features, *others, positions, slots = call.arguments
    slots[:] = torch.tensor([20, -1, 40])
    expected = oracle(case, call)
    features[1], positions[1] = float("nan"), 1 << 40
    run(features, *others, positions, slots, caches.table, HIDDEN_EPS, K_EPS, True)
    assert_close(contents(caches), expected, FLOAT32)


@pytest.mark.parametrize("run", [context_kv_torch, module._launch], ids=["twin", "kernel"])
def test_no_rows(run):
    case = Case(num_rows=2)
    features, sums, *weights, positions, slots = drawn(case).arguments
    caches = empty_caches(case, torch.float32)
    run(features[:0], sums, *weights, positions[:0], slots[:0], caches.table, HIDDEN_EPS, K_EPS, True)
    assert (contents(caches) == CANARY).all()


def test_launcher_chooses_tiles_and_device():
    case = Case(num_layers=1)
    call = drawn(case)
    for run in (context_kv, module._launch):
        caches = empty_caches(case, torch.float32)
        run(*call.arguments, caches.table, HIDDEN_EPS, K_EPS, True)
        assert_close(contents(caches), oracle(case, call), FLOAT32)


def test_norm_is_folded_in_float32():
    """1 + 2^-8, rounded to bfloat16 before the product, would be 1, and the product 1.0078125."""
    weight = torch.tensor([[1.0078125, 3.0]], dtype=torch.bfloat16)
    assert fold_norm(weight, torch.tensor([1.00390625, 0.5])).tolist() == [[1.015625, 1.5]]


def test_tables_refuse_what_one_launch_cannot_address():
    case = Case()
    caches = empty_caches(case, torch.float32).table
    with pytest.raises(ValueError, match="different page sizes, heads or strides"):
        CacheTable(caches.keys, [value.contiguous() for value in caches.values])
    with pytest.raises(ValueError, match="one of each per layer"):
        CacheTable(caches.keys, caches.values[:1])
    storage = [key.contiguous().to(torch.uint8) for key in caches.keys]
    with pytest.raises(ValueError, match="name the fp8 dtype"):
        CacheTable(storage, storage)
    with pytest.raises(ValueError, match="scales"):
        CacheTable(storage, storage, torch.float8_e4m3fn, torch.ones(2), None)


def test_kernel_refuses_what_the_gpu_cannot_do():
    """The caller then computes K/V in steps."""
    fp8 = empty_caches(Case(), torch.float8_e4m3fn).table
    module._require_support(fp8, (8, 9))
    with pytest.raises(NotImplementedError, match="cannot convert to fp8"):
        module._require_support(fp8, (8, 0))
    with pytest.raises(NotImplementedError, match="not 96"):
        module._require_support(empty_caches(Case(head_size=96), torch.bfloat16).table, (9, 0))


def test_refuses_what_does_not_fit():
    case = Case()
    arguments, caches = drawn(case).arguments, empty_caches(case, torch.float32)
    with pytest.raises(ValueError, match="weight is"):
        context_kv(*arguments[:2], arguments[2][1:], *arguments[3:], caches.table, HIDDEN_EPS, K_EPS, True)
    with pytest.raises(ValueError, match="slots is"):
        context_kv(*arguments[:-1], arguments[-1][1:], caches.table, HIDDEN_EPS, K_EPS, True)
    with pytest.raises(ValueError, match="RoPE turns 128"):
        context_kv(*arguments[:5], torch.zeros(9, 128), *arguments[6:], caches.table, HIDDEN_EPS, K_EPS, True)
