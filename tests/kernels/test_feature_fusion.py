"""Fused features: kernel and twin against a product in float64 of the concatenated features."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from vllm_dflash.triton_kernels import feature_fusion as module
from vllm_dflash.triton_kernels.feature_fusion import feature_fusion, feature_fusion_torch
from vllm_dflash.triton_kernels.tuning import config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Largest and RMS difference, relative to the RMS of the values. float32: sums of up to 240 products in another order.
#: bfloat16: sums are float32 in both, so values differ where a sum lies next to the border between two roundings.
TOLERANCES = {torch.float32: (2e-5, 2e-6), torch.bfloat16: (3e-2, 2e-3)}


def kernel(split: int, rows: int = 16, columns: int = 64, k: int = 64):
    """The launcher with small tiles, so that few rows and columns make several of them."""
    tiles = config(4, 2, COLUMN_TILE=columns, ROW_TILE=rows, K_TILE=k, SPLIT_K=split)
    return functools.partial(module._launch, config=tiles)


IMPLEMENTATIONS = [
    pytest.param(feature_fusion_torch, id="twin"),
    pytest.param(kernel(1), id="kernel"),
    pytest.param(kernel(3), id="split"),
]


@pytest.fixture(autouse=True)
def nan_in_new_tensors() -> Iterator[None]:
    """Memory that a kernel forgets to write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills every new_empty
    yield
    torch.use_deterministic_algorithms(False)


def drawn(
    num_rows: int, num_columns: int, feature_size: int, num_features: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Column views of one tensor with NaN behind its last row, a weight with NaN behind its rows, and a bias."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows + 2, num_features * feature_size, generator=generator).to(dtype)
    rows[num_rows:] = float("nan")
    weight = torch.randn(num_columns, num_features * feature_size + 64, generator=generator).to(dtype)
    weight[:, num_features * feature_size :] = float("nan")
    bias = torch.randn(num_columns, generator=generator).to(dtype)
    features = rows.to(DEVICE)[:num_rows].chunk(num_features, dim=1)
    return list(features), weight.to(DEVICE)[:, : num_features * feature_size], bias.to(DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    largest, rms = TOLERANCES[dtype]
    error = actual.double() - expected.double()
    scale = expected.double().square().mean().sqrt()
    assert error.abs().max() <= largest * scale
    assert error.square().mean().sqrt() <= rms * scale


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_columns", "feature_size", "num_features"),
    [(1, 64, 64, 3), (5, 96, 40, 5), (33, 72, 128, 1)],
    ids=["one row", "no tile divides a size", "three tiles of rows"],
)
def test_values_are_the_product_with_concatenated_features(
    run, dtype, num_rows, num_columns, feature_size, num_features
):
    features, weight, bias = drawn(num_rows, num_columns, feature_size, num_features, dtype)
    fused = run(features, weight, bias)
    expected = torch.cat(features, dim=1).double() @ weight.double().T + bias.double()
    assert fused.values.dtype == dtype
    assert_close(fused.values, expected.to(dtype), dtype)
    # Of the values as stored, and in float32: what RMSNorm would compute from them.
    assert fused.sum_squares.dtype == torch.float32
    torch.testing.assert_close(fused.sum_squares.sum(dim=1), fused.values.float().square().sum(dim=1))


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_features_with_their_own_row_strides(run):
    """A contiguous tensor, a view into wider rows and one that skips rows."""
    features, weight, _ = drawn(5, 64, 32, 3)
    wide = torch.full((5, 48), float("nan"), device=DEVICE)
    wide[:, 16:] = features[1]
    skipping = torch.full((10, 32), float("nan"), device=DEVICE)
    skipping[::2] = features[2]
    mixed = [features[0].contiguous(), wide[:, 16:], skipping[::2]]
    assert len({feature.stride(0) for feature in mixed}) == 3
    expected = torch.cat(features, dim=1) @ weight.T
    assert_close(run(mixed, weight, None).values, expected, torch.float32)


def test_sums_of_squares_belong_to_their_tiles_of_columns():
    features, weight, _ = drawn(3, 96, 64, 2)
    fused = kernel(1, columns=32)(features, weight)
    by_tile = fused.values.view(3, 3, 32).square().sum(dim=2)
    torch.testing.assert_close(fused.sum_squares, by_tile)


def test_sums_of_squares_of_split_products_belong_to_their_tiles_of_columns(monkeypatch):
    monkeypatch.setattr(module, "MERGED_COLUMNS", 32)
    features, weight, _ = drawn(3, 96, 64, 2)
    fused = kernel(2)(features, weight)
    torch.testing.assert_close(fused.sum_squares, fused.values.view(3, 3, 32).square().sum(dim=2))


def test_split_into_more_programs_than_steps():
    """Some programs have nothing to add."""
    features, weight, bias = drawn(2, 64, 64, 3)
    fused = kernel(8)(features, weight, bias)
    assert_close(fused.values, torch.cat(features, dim=1) @ weight.T + bias, torch.float32)


@pytest.mark.parametrize("run", [feature_fusion_torch, module._launch], ids=["twin", "kernel"])
def test_no_rows(run):
    features, weight, bias = drawn(0, 64, 64, 2, torch.bfloat16)
    fused = run(features, weight, bias)
    assert fused.values.shape == (0, 64)
    assert fused.values.dtype == torch.bfloat16
    assert fused.sum_squares.shape[0] == 0


def test_launcher_chooses_tiles_and_device():
    features, weight, bias = drawn(5, 64, 64, 2, torch.bfloat16)
    expected = feature_fusion_torch(features, weight, bias)
    for fused in (feature_fusion(features, weight, bias), module._launch(features, weight, bias)):
        assert_close(fused.values, expected.values, torch.bfloat16)


@pytest.mark.parametrize(
    ("num_rows", "is_split"), [(1, True), (16, True), (32, True), (64, True), (8192, False)], ids=str
)
def test_few_rows_are_split_to_fill_the_gpu(num_rows, is_split):
    """Qwen3-8B's drafter: tiles of at least 64 columns, and at least one program for each of 132 multiprocessors."""
    for one in module._configs(num_rows, 4096, 5, 4096, torch.bfloat16):
        tiles = one.options
        num_tiles = 4096 // tiles["COLUMN_TILE"] * -(-num_rows // tiles["ROW_TILE"])
        assert 4096 % tiles["COLUMN_TILE"] == 4096 % tiles["K_TILE"] == 0
        assert tiles["COLUMN_TILE"] >= 64  # wgmma
        assert (tiles["SPLIT_K"] > 1) == is_split
        assert num_tiles * tiles["SPLIT_K"] >= 132


def test_refuses_what_does_not_fit():
    features, weight, bias = drawn(2, 64, 32, 3)
    with pytest.raises(ValueError, match="as many features as the drafter was trained with"):
        feature_fusion(features[:2], weight, bias)
    with pytest.raises(ValueError, match="one shape"):
        feature_fusion([features[0], features[1][:1], features[2]], weight, bias)
    with pytest.raises(ValueError, match="last stride 1"):
        feature_fusion(features, weight.T.contiguous().T, bias)
    with pytest.raises(ValueError, match="one dtype"):
        feature_fusion([feature.bfloat16() for feature in features], weight, bias)
    with pytest.raises(ValueError, match="the bias is"):
        feature_fusion(features, weight, bias[:5])
