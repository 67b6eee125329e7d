"""Settings of a run: flags over YAML over defaults, and what is refused before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vllm_dflash.training.settings import TrainSettings, add_arguments, from_arguments, read_yaml, to_yaml

CAUSAL = {"in_block_attention": "causal"}

GIVEN = ["--target", "some/target", "--output", "out"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_arguments(made)
    return made


def parsed(*flags: str) -> TrainSettings:
    return from_arguments(parser().parse_args([*GIVEN, *flags]))


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def settings(**changes: Any) -> TrainSettings:
    return TrainSettings(**{"target": "some/target", "output": "out", **changes})


def test_without_flags_all_settings_are_the_defaults() -> None:
    assert parsed() == settings()


def test_every_field_has_a_flag_and_help() -> None:
    actions = {action.dest: action for action in parser()._actions}
    for setting in fields(TrainSettings):
        action = actions[setting.name]
        assert "--" + setting.name.replace("_", "-") in action.option_strings
        assert action.help
        assert len(action.help) > 5, setting.name
    assert "--target-layer-ids" in parser().format_help()  # also: no help text has a stray %


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--data", "a.jsonl", "b.jsonl"], {"data": ("a.jsonl", "b.jsonl")}),
        (["--target-layer-ids", "1", "8", "14"], {"target_layer_ids": (1, 8, 14)}),
        (["--truncate-blocks", "--in-block-attention", "causal"], CAUSAL | {"truncate_blocks": True}),
        (["--no-resume", "--no-target-features"], {"resume": False, "target_features": False}),
        (["--lr", "1e-3", "--max-minutes", "75"], {"lr": 1e-3, "max_minutes": 75.0}),
        # As speculators and SpecForge name them.
        (["--data-path", "a.jsonl", "--seq-length", "64"], {"data": ("a.jsonl",), "max_length": 64}),
        (["--block-size", "8", "--dflash-decay-gamma", "3"], {"draft_block_size": 8, "loss_decay": 3.0}),
        (["--per-position-loss-weight", "dpace", "--dpace-alpha", "0.4"], {"loss_weight": "dpace", "dpace_alpha": 0.4}),
        (["--scheduler-warmup-ratio", "0.1", "--num-epochs", "2"], {"warmup_ratio": 0.1, "epochs": 2.0}),
        (["--checkpoint-freq", "9", "--logger", "tensorboard"], {"checkpoint_steps": 9, "report_to": ("tensorboard",)}),
        (["--verifier-name-or-path", "other", "--save-path", "there"], {"target": "other", "output": "there"}),
        (["--target-model-path", "other"], {"target": "other"}),
        (["--gradient-accumulation-steps", "3"], {"accumulation_steps": 3}),
        (["--learning-rate", "0.1"], {"lr": 0.1}),
    ],
)
def test_flags_and_their_aliases(flags: list[str], expected: dict[str, Any]) -> None:
    assert parsed(*flags) == settings(**expected)


@pytest.mark.parametrize("flags", [["--lr", "fast"], ["--optimizer", "sgd"], ["--report-to", "paper"], ["--nonsense"]])
def test_flags_that_do_not_fit(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([*GIVEN, *flags])
    assert flags[0] in capsys.readouterr().err


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "lr: 0.01\nnum-layers: 3\ndata: [x.jsonl]\nresume: false\n")
    found = parsed("--config", str(path), "--num-layers", "2", "--resume")
    assert found == settings(lr=0.01, num_layers=2, data=("x.jsonl",), resume=True)


def test_yaml_of_settings_reads_back_the_same(tmp_path: Path) -> None:
    changed = settings(
        data=("a.jsonl", "b c.jsonl"),
        target_layer_ids=(1, 8),
        lr=1e-5,
        max_minutes=7.5,
        mask_token_id=-1,
        resume=False,
        train_lm_head=True,
        run_name="no: 7 # not a comment",
        loss_weight="dpace",
        report_to=("wandb", "tensorboard"),
    )
    assert TrainSettings(**read_yaml(yaml_file(tmp_path, to_yaml(changed)))) == changed


def test_numbers_that_yaml_takes_for_strings(tmp_path: Path) -> None:
    assert read_yaml(yaml_file(tmp_path, "lr: 6e-4\nepochs: 3\n")) == {"lr": 6e-4, "epochs": 3.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_speed: 1", "has no setting 'learning_speed'; known settings: target, data, output"),
        ("lr: fast", "sets lr to 'fast'; it must be of type float"),
        ("lr: true", "sets lr to True; it must be of type float"),
        ("epochs: [1, 2]", r"sets epochs to \[1, 2\]; it must be of type float"),
        ("num_layers: 2.5", "sets num_layers to 2.5; it must be of type int"),
        ("num_layers: true", "sets num_layers to True; it must be of type int"),
        ("resume: 1", "sets resume to 1; it must be of type bool"),
        ("target: 7", "sets target to 7; it must be of type str"),
        ("target:", "sets target to None; it must be of type str"),
        ("optimizer: sgd", "sets optimizer to 'sgd'; it can be 'adamw', 'muon'"),
        ("report_to: [paper]", "sets report_to to 'paper'; it can be 'tensorboard', 'wandb'"),
        ("target_layer_ids: [1, two]", "sets target_layer_ids to 'two'; it must be of type int"),
        ("- lr\n- epochs", "holds a list; write one 'name: value' per line"),
        ("lr: [1", "is not YAML"),
    ],
)
def test_yaml_that_does_not_fit(tmp_path: Path, text: str, message: str) -> None:
    path = yaml_file(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": ""}, "--target is '': name the target model with --target"),
        ({"output": ""}, "--output is '': name a folder"),
        ({"draft_block_size": 1}, "--draft-block-size is 1: a block is an anchor and at least one mask"),
        ({"soft_share": 1.5}, "--soft-share is 1.5: it is a share, 0 to 1"),
        ({"dpace_alpha": -0.1}, "--dpace-alpha is -0.1: it is a share"),
        ({"warmup_ratio": 4.0}, "--warmup-ratio is 4.0: it is a share"),
        (
            {"truncate_blocks": True, "in_block_attention": "bidirectional"},
            "--truncate-blocks is True: it needs --in-block-attention causal",
        ),
        ({"batch_size": 0}, "--batch-size is 0: it must be at least 1"),
        ({"accumulation_steps": 0}, "--accumulation-steps is 0: it must be at least 1"),
        ({"log_steps": 0}, "--log-steps is 0"),
        ({"eval_steps": 0}, "--eval-steps is 0"),
        ({"checkpoint_steps": 0}, "--checkpoint-steps is 0"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints is 0: it must be at least 1"),
        ({"num_layers": -1}, "--num-layers is -1"),
        ({"num_features": -1}, "--num-features is -1"),
        ({"max_anchors": 0}, "--max-anchors is 0"),
        ({"max_steps": -1}, "--max-steps is -1: it must be at least 0"),
        ({"lr": 0.0}, "--lr is 0.0: it must be above 0"),
        ({"epochs": 0.0}, "--epochs is 0.0: it must be above 0"),
        ({"max_grad_norm": 0.0}, "--max-grad-norm is 0.0: it must be above 0"),
    ],
)
def test_values_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.parametrize(
    ("size", "given", "gamma"), [(16, 0, 7.0), (10, 0, 5.0), (8, 0, 4.0), (12, 0, 6.0), (8, 2.5, 2.5)]
)
def test_loss_decay_is_the_papers_for_the_block_size(size: int, given: float, gamma: float) -> None:
    assert settings(draft_block_size=size, loss_decay=given).effective_loss_decay == gamma
