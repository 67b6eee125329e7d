"""What a run leaves on disk: whole checkpoints that can be served, whatever happens while they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk
from tiny_training import TinyTask, assert_same, killed_run, last_state, run, write_tiny_task

from vllm_dflash.checkpoint import check_checkpoint
from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.acceptance import Acceptance, DocumentAcceptance
from vllm_dflash.training.pretrained import import_drafter
from vllm_dflash.training.target_features import load_target
from vllm_dflash.training.trainer import Trainer


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return write_tiny_task(tmp_path_factory.mktemp("task"))


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_checkpoint_killed_while_it_is_saved_leaves_the_earlier_ones(
    task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = task.settings(tmp_path, checkpoint_steps=1)
    save = torch.save

    def killed(content: Any, path: Path) -> None:
        if "step-00000003" in str(path):
            raise KeyboardInterrupt
        save(content, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert listing(tmp_path) == ["step-00000001", "step-00000002"]
    assert (tmp_path / "last").resolve().name == "step-00000002"
    assert run(settings).state.step == 4
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_ends_the_run_and_leaves_the_earlier_checkpoints(task: TinyTask, tmp_path: Path) -> None:
    killed_run(task.settings(tmp_path), after=2)
    with (
        full_disk(max_file_size=100_000),
        pytest.raises(RuntimeError, match=r"step-00000004' could not be written \(.*\); earlier ones are untouched"),
    ):
        run(task.settings(tmp_path))
    assert [path.name for path in sorted(tmp_path.glob("*step-*"))] == ["step-00000002"]
    assert last_state(tmp_path)[2] == 2


@pytest.mark.parametrize("damaged", ["model.safetensors", "optimizer.pt", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(
    task: TinyTask, tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    killed_run(task.settings(tmp_path, checkpoint_steps=1, eval_examples=0), after=3)
    file = tmp_path / "step-00000003" / damaged
    file.write_bytes(file.read_bytes()[:-10])
    settings = task.settings(tmp_path, checkpoint_steps=1, keep_checkpoints=1, eval_examples=0)
    killed_run(settings, after=2)
    out = capsys.readouterr().out
    assert "step-00000003' cannot be read (" in out
    assert f"going on from step 2 in '{tmp_path}'" in out
    run(settings)
    assert listing(tmp_path) == ["step-00000004"]
    assert last_state(tmp_path)[2] == 4


def test_a_checkpoint_is_kept_though_a_damaged_one_is_later(task: TinyTask, tmp_path: Path) -> None:
    (tmp_path / "step-00000009").mkdir()
    killed_run(task.settings(tmp_path, keep_checkpoints=1, checkpoint_steps=1, eval_steps=100), after=2)
    assert last_state(tmp_path)[2] == 2


def test_the_latest_and_the_best_checkpoint_are_kept_and_linked(
    task: TinyTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {1: 1, 2: 3, 3: 2, 4: 3, 5: 0, 6: 1}  # accepted tokens of the one cycle, by step
    monkeypatch.setattr(
        Trainer,
        "evaluate",
        lambda self: Acceptance([DocumentAcceptance("a", "s", (runs[self.state.step],), num_drafted=3)]),
    )
    trainer = run(task.settings(tmp_path, max_steps=6, eval_steps=1, checkpoint_steps=1, keep_checkpoints=2))
    assert listing(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert (tmp_path / "last").resolve() == tmp_path / "step-00000006"
    assert (tmp_path / "best").resolve() == tmp_path / "step-00000002"
    assert trainer.state.best_tau == 4
    assert json.loads((tmp_path / "best" / "state.json").read_text())["best_tau"] == 4


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 48}, {"draft_vocab_size": 48, "train_lm_head": True}])
def test_checkpoints_can_be_served(task: TinyTask, tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = run(task.settings(tmp_path, **changes))
    for name in ("step-00000002", "step-00000004", "best", "last"):
        check_checkpoint(
            tmp_path / name, DFlashConfig.from_dict(json.loads((tmp_path / name / "config.json").read_text()), name)
        )
    config, tensors = import_drafter(tmp_path / "last")
    assert (config.draft_block_size, config.target_layer_ids, config.mask_token_id) == (4, (0, 2), 2)
    assert_same({k: tensors[k] for k in trainer.run.drafter.state_dict()}, dict(trainer.run.drafter.state_dict()))
    if not changes:
        assert tensors.keys() == trainer.run.drafter.state_dict().keys()
        return
    target_ids = tensors["d2t"] + torch.arange(48)
    assert target_ids.tolist() == sorted(set(target_ids.tolist()))
    assert 1 in target_ids  # the end of a turn, although no answer here has one
    head = load_target(str(task.target), torch.device("cpu")).lm_head.weight[target_ids]
    assert torch.equal(tensors["lm_head.weight"], head) is ("train_lm_head" not in changes)
    torch.testing.assert_close(tensors["lm_head.weight"], head, atol=0.01, rtol=0)  # four steps move it that little
