"""Exported folders: what they hold, that an earlier export is safe, and the command."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import drafter_config, drafter_tensors, write_tiny_drafter

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training import export
from vllm_dflash.training.dialects import TargetName
from vllm_dflash.training.export import export_drafter, import_drafter

TARGET = TargetName("small/target", ("Qwen3ForCausalLM",))
CONFIG = DFlashConfig.from_dict(drafter_config(), "tiny")


def tiny_tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    return drafter_tensors(drafter_config(), seed)


def reduced() -> tuple[DFlashConfig, dict[str, torch.Tensor]]:
    """A drafter of 32 tokens: draft token d is target token 4 d."""
    head = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    return dataclasses.replace(CONFIG, draft_vocab_size=32), tiny_tensors() | {
        "lm_head.weight": head,
        "d2t": torch.arange(32) * 3,
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def listing(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def command_line(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return parser.parse_args(flags)


# ---- folders


def test_weights_are_bf16_and_offsets_int64(tmp_path):
    config, tensors = reduced()
    export_drafter(config, tensors, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name, tensor in stored.items() if tensor.dtype != torch.bfloat16} == {"d2t"}
    assert stored["d2t"].tolist() == [3 * d for d in range(32)]
    num_weights = sum(tensor.numel() for name, tensor in tensors.items() if name != "d2t")
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0 < size - (2 * num_weights + 8 * 32) < 8192  # the rest is the header
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dialect", ["z-lab", "speculators"])
def test_exported_values_are_the_trained_ones(tmp_path, dialect):
    config, tensors = reduced()
    export_drafter(config, tensors, tmp_path / "out", dialect=dialect, dtype=torch.float32, target=TARGET)
    read, values = import_drafter(tmp_path / "out")
    assert read == dataclasses.replace(config, name=str(tmp_path / "out"), dialect=dialect)
    assert values.keys() == tensors.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_speculators_marks_the_target_tokens_that_can_be_drafted(tmp_path):
    config, tensors = reduced()
    export_drafter(config, tensors, tmp_path / "out", dialect="speculators", target=TARGET)
    t2d = load_file(tmp_path / "out" / "model.safetensors")["t2d"]
    assert (t2d.dtype, len(t2d)) == (torch.bool, 128)
    assert t2d.nonzero()[:, 0].tolist() == [4 * d for d in range(32)]


def test_offsets_of_a_full_vocabulary_are_left_out(tmp_path):
    """vLLM has no place for them then, and refuses the checkpoint."""
    export_drafter(CONFIG, tiny_tensors() | {"d2t": torch.zeros(128, dtype=torch.long)}, tmp_path / "out")
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")


def test_tied_and_transposed_tensors_are_stored(tmp_path):
    tensors = tiny_tensors()
    tensors["norm.weight"] = tensors["hidden_norm.weight"]  # the same memory
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous().T
    export_drafter(CONFIG, tensors, tmp_path / "out", dtype=torch.float32)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["fc.weight"], tensors["fc.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "'norm.weight' is missing"),
        ({"model.norm.weight": torch.ones(64)}, "'model.norm.weight' is not a tensor.*did you mean 'norm.weight'"),
        ({"fc.weight": torch.ones(64, 64)}, r"'fc.weight' has shape \[64, 64\].*\[64, 128\]"),
        ({"norm.weight": torch.full((64,), float("nan"))}, "'norm.weight' of drafter 'tiny' .*not finite"),
        ({"d2t": torch.arange(128)}, "for reduced vocabularies only"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, change, message):
    tensors = {name: tensor for name, tensor in (tiny_tensors() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        export_drafter(CONFIG, tensors, tmp_path / "out")
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "d2t",
    [torch.arange(32) * 4, torch.full((32,), -1), -torch.arange(32)],
    ids=["token ids for offsets", "negative tokens", "one token for all"],
)
def test_wrong_offsets_are_refused(tmp_path, d2t):
    config, tensors = reduced()
    with pytest.raises(ValueError, match=r"'d2t' of drafter 'tiny' must map draft tokens 0 to 31"):
        export_drafter(config, tensors | {"d2t": d2t}, tmp_path / "out")


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight"])
def test_a_reduced_vocabulary_needs_head_and_offsets(tmp_path, missing):
    config, tensors = reduced()
    del tensors[missing]
    with pytest.raises(ValueError, match=f"'{missing.partition('.')[0]}' is missing"):
        export_drafter(config, tensors, tmp_path / "out")


def test_what_float16_cannot_hold_is_refused(tmp_path):
    tensors = tiny_tensors() | {"norm.weight": torch.full((64,), 1e5)}
    with pytest.raises(ValueError, match=r"'norm.weight' .*not finite as torch.float16; export as bfloat16"):
        export_drafter(CONFIG, tensors, tmp_path / "out", dtype=torch.float16)
    export_drafter(CONFIG, tensors, tmp_path / "out", dtype=torch.bfloat16)


# ---- an earlier export


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    export_drafter(CONFIG, tiny_tensors(seed=1), tmp_path / "out")
    return tmp_path / "out"


def test_an_earlier_export_is_replaced_only_on_request(earlier):
    before = contents(earlier)
    with pytest.raises(ValueError, match="exists already; .*--overwrite"):
        export_drafter(CONFIG, tiny_tensors(seed=2), earlier)
    assert contents(earlier) == before
    export_drafter(CONFIG, tiny_tensors(seed=2), earlier, overwrite=True)
    assert contents(earlier)["model.safetensors"] != before["model.safetensors"]
    assert listing(earlier.parent) == ["out"]


def test_other_files_are_never_overwritten(earlier):
    """A training checkpoint or a home directory given as --output by mistake."""
    (earlier / "optimizer.pt").write_bytes(b"state")
    with pytest.raises(ValueError, match=r"optimizer.pt\) and is not overwritten"):
        export_drafter(CONFIG, tiny_tensors(seed=2), earlier, overwrite=True)
    assert (earlier / "optimizer.pt").read_bytes() == b"state"


def test_a_full_disk_leaves_the_earlier_export(earlier, monkeypatch):
    before = contents(earlier)

    def save_half(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", save_half)
    with pytest.raises(RuntimeError, match="could not be written .*No space left.* untouched"):
        export_drafter(CONFIG, tiny_tensors(seed=2), earlier, overwrite=True)
    assert contents(earlier) == before
    assert listing(earlier.parent) == ["out"]


def test_a_failed_rename_brings_the_earlier_export_back(earlier, monkeypatch):
    before, rename = contents(earlier), Path.rename

    def rename_all_but_the_new(path, target):
        if path.name == ".out.part":
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_all_but_the_new)
    with pytest.raises(RuntimeError, match="busy"):
        export_drafter(CONFIG, tiny_tensors(seed=2), earlier, overwrite=True)
    assert contents(earlier) == before
    assert listing(earlier.parent) == ["out"]


def test_a_damaged_file_is_noticed_before_the_earlier_export_goes(earlier, monkeypatch):
    before = contents(earlier)
    monkeypatch.setattr(export, "save_file", lambda tensors, file, metadata: Path(file).write_bytes(b"12345678"))
    with pytest.raises(ValueError, match="damaged or truncated"):
        export_drafter(CONFIG, tiny_tensors(seed=2), earlier, overwrite=True)
    assert contents(earlier) == before


def test_leftovers_of_a_killed_export_are_no_obstacle(tmp_path):
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "model.safetensors").write_bytes(b"half")
    export_drafter(CONFIG, tiny_tensors(), tmp_path / "out")
    assert listing(tmp_path) == ["out"]


# ---- the command


def test_conversion_there_and_back_is_the_identity(tmp_path):
    config, tensors = reduced()
    export_drafter(config, tensors, tmp_path / "a")
    export_drafter(*import_drafter(tmp_path / "a"), tmp_path / "b", dialect="speculators", target=TARGET)
    export_drafter(*import_drafter(tmp_path / "b"), tmp_path / "c", dialect="z-lab")
    assert contents(tmp_path / "c") == contents(tmp_path / "a")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A training checkpoint: the drafter, the trainer's state, the run record."""
    folder = write_tiny_drafter(tmp_path / "step-20")
    (folder / "trainer.pt").write_bytes(b"state")
    record = {"target": "small/target", "command": "vllm-dflash train --target small/target", "seed": 7}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_command_exports_a_training_checkpoint(checkpoint, tmp_path, capsys):
    output = tmp_path / "deep" / "drafter"
    evaluation = {"machine": "2x EPYC", "tasks": [{"task": "gsm8k", "n": 12, "tau": 1.734}]}
    (tmp_path / "eval.json").write_text(json.dumps(evaluation))
    flags = ["--checkpoint", str(checkpoint), "--output", str(output), "--eval-json", str(tmp_path / "eval.json")]
    assert export.run(command_line(*flags, "--license", "apache-2.0")) == 0
    assert sorted(contents(output)) == ["README.md", "config.json", "model.safetensors"]
    assert load_file(output / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    card = (output / "README.md").read_text()
    assert "vllm-dflash train --target small/target" in card
    assert "| gsm8k | 12 | 1.73 |" in card
    assert "z-lab format, bfloat16, 0.3 MB" in capsys.readouterr().out


@pytest.mark.parametrize("dialect", ["z-lab", "speculators"])
def test_measured_rates_are_recorded_for_serving(checkpoint, tmp_path, dialect):
    tasks = [
        {"task": "a", "n": 1, "tau": 1.9, "by_position": [0.6, 0.25, 0.05]},
        {"task": "b", "n": 9, "tau": 1.4, "by_position": [0.3, 0.1]},
    ]
    (tmp_path / "eval.json").write_text(json.dumps({"tasks": tasks}))
    flags = ["--checkpoint", str(checkpoint), "--output", str(tmp_path / "out"), "--format", dialect]
    assert export.run(command_line(*flags, "--eval-json", str(tmp_path / "eval.json"))) == 0
    config, _ = import_drafter(str(tmp_path / "out"))
    assert config.acceptance_rates == (0.45, 0.175)


def test_command_converts_and_keeps_the_target(tmp_path, tiny_target):
    """speculators' format records it; a target that is here also gives its architectures."""
    source = write_tiny_drafter(tmp_path / "source")
    flags = ["--format", "speculators", "--dtype", "float32"]
    for checkpoint, output, more in ((source, "a", ["--target", str(tiny_target)]), (tmp_path / "a", "b", [])):
        arguments = ["--checkpoint", str(checkpoint), "--output", str(tmp_path / output), *flags, *more]
        assert export.run(command_line(*arguments)) == 0
        verifier = json.loads((tmp_path / output / "config.json").read_text())["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": str(tiny_target), "architectures": ["Qwen3ForCausalLM"]}


def test_command_refuses_an_ablation(checkpoint, tmp_path):
    record = {"settings": {"injection": "input", "target_features": True}}
    (checkpoint / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="injection 'input', an ablation that vLLM does not serve"):
        export.run(command_line("--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")))


def test_command_refuses_a_file_that_is_no_evaluation(checkpoint, tmp_path):
    flags = ["--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="is no evaluation"):
        export.run(command_line(*flags, "--eval-json", str(checkpoint / "run.json")))
    assert not (tmp_path / "out").exists()
