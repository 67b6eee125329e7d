"""What tensors tell by themselves: formats, NaN, constants, initialisations, lost scales, few levels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from broken_drafters import BIDIRECTIONAL, SHIPPED
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_drafter

from vllm_dflash.config import DFlashConfig
from vllm_dflash.doctor.checkpoint import largest_level_count, load_checkpoint, looks_initialised, magnitude_outliers
from vllm_dflash.doctor.finding import Finding

Tensors = dict[str, torch.Tensor]


def check(folder: Path) -> tuple[Tensors, list[Finding]]:
    config = DFlashConfig.from_dict(json.loads((folder / "config.json").read_text()), str(folder))
    return load_checkpoint(folder, config)


def names(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.level) for finding in findings]


@pytest.mark.parametrize("folder", [SHIPPED, BIDIRECTIONAL])
def test_shipped_drafters_have_nothing_to_report(folder):
    tensors, findings = check(folder)
    assert findings == []
    assert {t.dtype for n, t in tensors.items() if n != "d2t"} == {torch.float32}
    assert magnitude_outliers(tensors) == {}


@pytest.mark.parametrize("folder", [SHIPPED, BIDIRECTIONAL])
def test_no_trained_matrix_looks_initialised(folder):
    """They were initialised from the target's layers; among them are values' projections, which hardly changed."""
    matrices = {n: t.float() for n, t in load_file(folder / "model.safetensors").items() if t.dim() == 2}
    assert len(matrices) >= 15
    assert [name for name, matrix in matrices.items() if looks_initialised(matrix)] == []


@pytest.mark.parametrize("shape", [(576, 2880), (192, 576), (64, 128)])
@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawn_matrices_look_initialised(shape, kind, dtype):
    generator = torch.Generator().manual_seed(shape[0])
    drawn = torch.empty(shape)
    if kind == "normal":
        drawn.normal_(0, 0.02, generator=generator)
    else:
        drawn.uniform_(-0.05, 0.05, generator=generator)
    assert looks_initialised(drawn.to(dtype).float())
    # A few steps of training leave a direction that stands out.
    step = torch.outer(torch.randn(shape[0], generator=generator), torch.randn(shape[1], generator=generator))
    assert not looks_initialised(drawn + 0.3 * drawn.std() * step)


def test_constants_look_like_nothing_drawn():
    assert not looks_initialised(torch.zeros(64, 64))
    assert not looks_initialised(torch.ones(64, 64))


def changed(folder: Path, changes: Tensors) -> Path:
    """The shipped drafter with other tensors."""
    folder.mkdir()
    (folder / "config.json").write_text((SHIPPED / "config.json").read_text())
    save_file(load_file(SHIPPED / "model.safetensors") | changes, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(tmp_path, value):
    norm = load_file(SHIPPED / "model.safetensors")["norm.weight"].clone()
    norm[3] = value
    _, findings = check(changed(tmp_path / "d", {"norm.weight": norm}))
    assert names(findings) == [("not-finite", "error")]
    assert "norm.weight" in findings[0].message


@pytest.mark.case("F18")
def test_lost_scales_stand_out():
    """The values of int8 without their scales: a hundred times what the other layer has."""
    tensors, _ = check(SHIPPED)
    name = "layers.1.mlp.up_proj.weight"
    scale = tensors[name].abs().amax(1, keepdim=True) / 127
    lost = tensors | {name: (tensors[name] / scale).round()}
    outliers = magnitude_outliers(lost)
    assert list(outliers) == [name]
    other = tensors["layers.0.mlp.up_proj.weight"]
    assert outliers[name] == pytest.approx(float(other.pow(2).mean().sqrt()), rel=1e-4)


@pytest.mark.case("F18")
@pytest.mark.parametrize(("bits", "level"), [(2, "error"), (3, "error"), (4, "warning"), (5, "warning"), (8, None)])
def test_few_levels_are_named(tmp_path, bits, level):
    weight = load_file(SHIPPED / "model.safetensors")["layers.0.mlp.up_proj.weight"].float()
    scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    rounded = ((weight / scale).round() * scale).bfloat16()
    _, findings = check(changed(tmp_path / "d", {"layers.0.mlp.up_proj.weight": rounded}))
    assert names(findings) == ([("quantisation", level)] if level else [])
    assert (largest_level_count(rounded.float()) <= 2**bits) == (bits < 8 or level is None)


@pytest.mark.case("F18")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_without_a_config_are_refused(tmp_path, dtype):
    weight = load_file(SHIPPED / "model.safetensors")["fc.weight"].float()
    quantised = (weight / weight.abs().max() * 127).round().to(dtype)
    _, findings = check(changed(tmp_path / "d", {"fc.weight": quantised}))
    assert names(findings) == [("checkpoint", "error")]
    assert "'fc.weight'" in findings[0].message


@pytest.mark.case("F18")
def test_gptq_tensors_without_a_config_are_refused(tmp_path):
    folder = write_tiny_drafter(tmp_path / "d")
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    tensors |= {"fc.qweight": torch.zeros(16, 64, dtype=torch.int32), "fc.scales": torch.ones(1, 64)}
    save_file(tensors, folder / "model.safetensors")
    loaded, findings = check(folder)
    assert loaded == {}
    assert names(findings) == [("checkpoint", "error")]
    assert "'fc.weight' is missing" in findings[0].message
    assert "fc.qweight" in findings[0].message


class Touch:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "mask_embedding.pt", "drafter.pth"])
def test_pickles_are_refused_without_being_opened(tmp_path, name):
    folder, mark = write_tiny_drafter(tmp_path / "d"), tmp_path / "opened"
    if name != "mask_embedding.pt":
        (folder / "model.safetensors").unlink()
    torch.save(Touch(mark), folder / name)
    loaded, findings = check(folder)
    assert loaded == {}
    assert names(findings) == [("checkpoint", "error")]
    assert name in findings[0].message
    assert not mark.exists()
    torch.load(folder / name, weights_only=False)  # it would have been seen
    assert mark.exists()


def test_truncated_file_is_refused(tmp_path):
    folder = write_tiny_drafter(tmp_path / "d")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    loaded, findings = check(folder)
    assert loaded == {}
    assert names(findings) == [("checkpoint", "error")]
    assert "truncated" in findings[0].message
