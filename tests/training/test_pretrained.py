"""Drafters that are read for training and conversion, and those that are refused because they would change."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import drafter_config, drafter_tensors, write_tiny_drafter

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.dialects import TargetName, to_speculators, to_z_lab
from vllm_dflash.training.pretrained import import_drafter


def test_drafters_are_read_as_float32(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in drafter_tensors(drafter_config()).items()}
    config, read = import_drafter(write_tiny_drafter(tmp_path / "drafter", tensors))
    assert config == dataclasses.replace(
        DFlashConfig.from_dict(drafter_config(), "tiny"), name=str(tmp_path / "drafter")
    )
    assert {tensor.dtype for tensor in read.values()} == {torch.float32}
    assert torch.equal(read["fc.weight"], tensors["fc.weight"].float())


@pytest.mark.case("F32")
@pytest.mark.parametrize("dialect", ["z-lab", "speculators"])
def test_an_embedding_scale_is_kept(tmp_path, dialect):
    raw = drafter_config(input_embedding_scale=8.0)
    if dialect == "speculators":
        raw = to_speculators(DFlashConfig.from_dict(drafter_config(), "tiny"), TargetName("small/target"))
        raw["input_embedding_scale"] = 8.0
    folder = write_tiny_drafter(tmp_path / "drafter")
    (folder / "config.json").write_text(json.dumps(raw))
    config, _ = import_drafter(folder)
    assert config.input_embedding_scale == 8.0
    assert to_z_lab(config)["dflash_config"]["input_embedding_scale"] == 8.0


def test_drafters_in_several_files_are_read_whole(tmp_path):
    folder = write_tiny_drafter(tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, some in enumerate((names[:10], names[10:])):
        save_file({name: tensors[name] for name in some}, folder / f"model-{part}.safetensors")
    assert import_drafter(folder)[1].keys() == tensors.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised.*quantised from"),
        ({"architectures": ["DFlash2DraftModel"]}, "a variant of DFlash"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales its positions.*yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by layer"),
        ({"logit_scale": 0.5}, "sets logit_scale 0.5.*would lose"),
        ({"hidden_act": "gelu"}, "sets hidden_act 'gelu'"),
        ({"dflash_config": None}, "is not a DFlash drafter"),
    ],
)
def test_drafters_that_would_change_are_not_read(tmp_path, changes, message):
    folder = write_tiny_drafter(tmp_path / "drafter")
    raw = {key: value for key, value in (drafter_config() | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        import_drafter(folder)


def test_quantised_tensors_without_a_word_in_the_config_are_not_read(tmp_path):
    quantised = {"fc.weight": torch.ones(64, 128).to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match="'fc.weight' has type F8_E4M3, which is none of"):
        import_drafter(write_tiny_drafter(tmp_path / "drafter", quantised))


def test_an_own_mask_embedding_is_not_lost_silently(tmp_path):
    folder = write_tiny_drafter(tmp_path / "drafter")
    torch.save(torch.ones(64), folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match="mask_embedding.pt"):
        import_drafter(folder)


def test_a_drafter_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="drafter 'no-such/drafter' is neither a folder here nor"):
        import_drafter("no-such/drafter")
    with pytest.raises(FileNotFoundError, match=r"config.json' does not exist"):
        import_drafter(tmp_path)
