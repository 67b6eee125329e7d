"""Runs of the trainer on a tiny target: that it learns, that it goes on exactly, and what it records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import MASK_TOKEN, TinyTask, assert_same, killed_run, last_state, metrics, run, write_tiny_task

from vllm_dflash.training import train
from vllm_dflash.training.dialects import TargetName
from vllm_dflash.training.export import export_drafter
from vllm_dflash.training.pretrained import import_drafter
from vllm_dflash.training.settings import NEW_DRAFTER, TrainSettings, read_yaml
from vllm_dflash.training.setup import prepare_run
from vllm_dflash.training.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return write_tiny_task(tmp_path_factory.mktemp("task"))


# ---- learning


@pytest.mark.case("F44", "F46")
def test_a_drafter_learns_a_few_answers_by_heart(task: TinyTask, tmp_path: Path) -> None:
    """The greedy answers of a tiny random target to random tokens: little to generalise, all to be remembered."""
    settings = task.settings(
        tmp_path / "out",
        eval_data=(str(task.data),),
        eval_examples=32,
        features=str(tmp_path / "features"),
        num_layers=2,
        batch_size=8,
        max_steps=150,
        lr=4e-3,
        log_steps=50,
        eval_steps=150,
        checkpoint_steps=150,
    )
    trainer = run(settings)
    taus = [row["eval/tau"] for row in metrics(tmp_path / "out") if "eval/tau" in row]
    assert taus[-1] == round(trainer.evaluate().tau, 4) > 0.9 * settings.draft_block_size
    assert taus[-1] > 1.2 * lookup_tau(task, settings.draft_block_size - 1)


def lookup_tau(task: TinyTask, num_drafted: int) -> float:
    """Tokens per cycle of the drafter that needs no training: what followed the last two tokens before, or the last."""
    gained = cycles = 0
    for row in map(json.loads, task.data.read_text().splitlines()):
        text = row["prompt_ids"] + row["response_ids"]
        at = len(row["prompt_ids"])  # index of the next token
        while at < len(text):
            drafted: list[int] = []
            for width in (2, 1):
                earlier = [i for i in range(width, at) if text[i - width : i] == text[at - width : at]]
                drafted = drafted or (text[earlier[-1] : at][:num_drafted] if earlier else [])
            right = [a == b for a, b in zip(drafted, text[at:])]
            run_length = 1 + (right.index(False) if False in right else len(right))
            gained += min(run_length, len(text) - at)
            at += run_length
            cycles += 1
    return gained / cycles


# ---- going on


@pytest.mark.case("F45")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_equals_one_that_was_never_stopped(task: TinyTask, tmp_path: Path, optimizer: str) -> None:
    changes: dict[str, Any] = {
        "optimizer": optimizer,
        "max_steps": 6,
        "accumulation_steps": 2,
        "in_block_attention": "causal",
        "truncate_blocks": True,
        "loss_negatives": 8,
        "soft_labels": 4,
        "draft_vocab_size": 48,
        "max_anchors": 5,
        "checkpoint_steps": 3,
        "eval_steps": 3,
    }
    straight, stopped = (task.settings(tmp_path / name, **changes) for name in ("straight", "stopped"))
    run(straight)
    killed_run(stopped, after=4)
    assert [row["step"] for row in metrics(tmp_path / "stopped")] == [1, 2, 3, 3, 4]
    run(stopped)
    assert_same(last_state(tmp_path / "stopped"), last_state(tmp_path / "straight"))
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "straight")


def test_a_resumed_run_takes_its_own_learning_rate(task: TinyTask, tmp_path: Path) -> None:
    killed_run(task.settings(tmp_path, lr=1e-3, warmup_ratio=0.0), after=2)
    run(task.settings(tmp_path, lr=1e-2, warmup_ratio=0.0))
    rates = {row["step"]: row["train/lr"] for row in metrics(tmp_path) if "train/lr" in row}
    assert rates == pytest.approx({1: 1e-3, 2: 1e-3 * 0.853553, 3: 1e-2 * 0.5, 4: 1e-2 * 0.146447}, rel=1e-4)


@pytest.mark.case("F45")
def test_cached_and_online_features_give_the_same_run(task: TinyTask, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"soft_labels": 4, "loss_weight": "dpace"}
    run(task.settings(tmp_path / "online", **changes))
    run(task.settings(tmp_path / "cached", features=str(tmp_path / "features"), **changes))
    assert any((tmp_path / "features").iterdir())
    folders = tmp_path / "online", tmp_path / "cached"
    online, cached = ({file.relative_to(folder) for file in folder.rglob("*")} for folder in folders)
    assert online == cached, "features are written nowhere but where they were asked for"
    assert metrics(tmp_path / "cached") == metrics(tmp_path / "online")
    assert_same(last_state(tmp_path / "cached")[0], last_state(tmp_path / "online")[0])


# ---- starting from a drafter


@pytest.mark.case("F49")
@pytest.mark.parametrize("dialect", ["z-lab", "speculators"])
def test_training_goes_on_from_a_published_drafter(task: TinyTask, tmp_path: Path, dialect: Any) -> None:
    run(task.settings(tmp_path / "first", draft_vocab_size=48))
    config, tensors = import_drafter(tmp_path / "first" / "last")
    export_drafter(
        config, tensors, tmp_path / "drafter", dialect=dialect, target=TargetName(str(task.target)), dtype=torch.float32
    )
    second = task.settings(tmp_path / "second", from_pretrained=str(tmp_path / "drafter"))
    started = prepare_run(second, CPU)
    assert started.config.draft_vocab_size == 48
    assert_same(dict(started.drafter.state_dict()), {k: tensors[k] for k in started.drafter.state_dict()})
    assert torch.equal(started.tables.target_ids, tensors["d2t"] + torch.arange(48))
    assert Trainer(started).train().step == 4
    assert torch.equal(import_drafter(tmp_path / "second" / "last")[1]["d2t"], tensors["d2t"])


def test_a_drafter_keeps_its_shape_where_the_settings_leave_it_open(task: TinyTask, tmp_path: Path) -> None:
    shape = {"draft_block_size": 6, "in_block_attention": "causal", "sliding_window": 8}
    run(task.settings(tmp_path / "first", **shape))
    open_shape = {"num_layers": 0, "draft_block_size": 0, "target_layer_ids": (), "mask_token_id": -1}
    second = task.settings(tmp_path / "second", from_pretrained=str(tmp_path / "first" / "last"), **open_shape)
    kept = prepare_run(replace(second, truncate_blocks=True), CPU)
    assert (kept.config.draft_block_size, kept.config.layer_causal, kept.config.sliding_windows) == (6, (True,), (8,))
    assert kept.config.mask_token_id == MASK_TOKEN
    assert {name: getattr(kept.settings, name) for name in shape} == shape
    assert (kept.settings.num_layers, kept.settings.num_features) == (1, 2)
    changed = prepare_run(
        replace(second, draft_block_size=4, in_block_attention="bidirectional", sliding_window=0), CPU
    )
    assert (changed.config.draft_block_size, changed.config.layer_causal) == (4, (False,))
    assert changed.config.sliding_windows == (None,)
    with pytest.raises(ValueError, match="has num_layers 1, but --num-layers is 3; leave it out"):
        prepare_run(replace(second, num_layers=3), CPU)
    with pytest.raises(ValueError, match=r"has target_layer_ids \(0, 2\), but --target-layer-ids is \(0, 1\)"):
        prepare_run(replace(second, target_layer_ids=(0, 1)), CPU)


def test_blocks_of_a_bidirectional_drafter_are_not_truncated(task: TinyTask, tmp_path: Path) -> None:
    run(task.settings(tmp_path / "first"))
    second = {"from_pretrained": str(tmp_path / "first" / "last"), "truncate_blocks": True}
    with pytest.raises(ValueError, match="--truncate-blocks is True: it needs --in-block-attention causal"):
        prepare_run(task.settings(tmp_path / "second", **second), CPU)


def test_a_run_does_not_go_on_as_another(task: TinyTask, tmp_path: Path) -> None:
    run(task.settings(tmp_path, loss_decay=2.0))
    longer = prepare_run(task.settings(tmp_path, loss_decay=2.0, max_steps=6, lr=1e-3, eval_steps=3), CPU)
    assert Trainer(longer).train().step == 6
    with pytest.raises(ValueError, match=r"loss_decay 2.0, now 3.0\); give the same .*--from-pretrained '.*/last'"):
        prepare_run(task.settings(tmp_path, loss_decay=3.0), CPU)
    with pytest.raises(ValueError, match="draft_block_size 4, now 5"):
        prepare_run(task.settings(tmp_path, loss_decay=2.0, draft_block_size=5), CPU)


def test_an_lm_head_that_was_trained_is_not_lost(task: TinyTask, tmp_path: Path) -> None:
    run(task.settings(tmp_path / "first", train_lm_head=True, lr=0.05))
    second = {"from_pretrained": str(tmp_path / "first" / "last")}
    with pytest.raises(ValueError, match="has an LM head that differs from that of target .*; go on with --train-lm-h"):
        prepare_run(task.settings(tmp_path / "second", **second), CPU)
    started = prepare_run(task.settings(tmp_path / "second", train_lm_head=True, **second), CPU)
    assert torch.equal(
        started.drafter.state_dict()["lm_head.weight"], import_drafter(second["from_pretrained"])[1]["lm_head.weight"]
    )


# ---- records


def test_a_run_leaves_its_record_metrics_and_picture(
    task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/vllm-dflash", "train", "--run-name", "two words"])
    settings = task.settings(tmp_path, seed=7, report_to=("tensorboard",))
    assert train.train(settings) == tmp_path / "best"
    record = json.loads((tmp_path / "last" / "run.json").read_text())
    assert record["command"] == "vllm-dflash train --run-name 'two words'"
    assert {"vllm-dflash", "python", "torch", "transformers", "accelerate", "safetensors"} <= record["versions"].keys()
    assert record["versions"]["torch"] == torch.__version__
    assert (record["seed"], record["target"], record["step"]) == (7, str(task.target), 4)
    assert (record["num_examples"], record["num_tokens"]) == (28, 28 * 20)  # 4 of 32 are held out
    assert len(record["data_hash"]) == 64
    assert TrainSettings(**read_yaml(tmp_path / "last" / "settings.yaml")) == settings.shaped(
        **NEW_DRAFTER, input_embedding_scale=1.0
    )

    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/tau" in row] == [2, 4]
    assert record["metrics"]["eval_tau"] == rows[-1]["eval/tau"]
    assert all(len(row["eval/position"]) == 3 for row in rows if "eval/tau" in row)
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_the_data_hash_tells_data_apart(task: TinyTask, tmp_path: Path) -> None:
    def data_hash(**changes: Any) -> str:
        return prepare_run(task.settings(tmp_path, **changes), CPU).record["data_hash"]

    assert data_hash() == data_hash(seed=5)
    assert len({data_hash(), data_hash(max_length=25), data_hash(max_examples=20)}) == 3


def test_without_held_out_examples_the_best_is_the_last(task: TinyTask, tmp_path: Path) -> None:
    folder = train.train(task.settings(tmp_path, eval_examples=0))
    assert folder.resolve() == tmp_path / "step-00000004"
