"""What a run refuses: one clear message each, before the target is loaded wherever that is possible."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import tiny_tokenizer
from tiny_models import write_tiny_drafter
from tiny_training import TinyTask, write_tiny_task

from vllm_dflash.training import setup, train


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return write_tiny_task(tmp_path_factory.mktemp("task"), num_examples=4, response_len=4)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the targets that were loaded."""
    names: list[str] = []
    load = setup.load_target

    def remembered(name: str, device: torch.device) -> Any:
        names.append(name)
        return load(name, device)

    monkeypatch.setattr(setup, "load_target", remembered)
    return names


def options(task: TinyTask, output: Path, *flags: str) -> argparse.Namespace:
    """The command line of a run; later flags win."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    given = ["--target", str(task.target), "--data", str(task.data), "--output", str(output)]
    given += ["--target-layer-ids", "0", "2", "--mask-token-id", "2", "--num-layers", "1", "--block-size", "4"]
    return parser.parse_args([*given, *flags])


def rows_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def refused(task: TinyTask, output: Path, *flags: str) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        train.run(options(task, output, *flags))
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no rows in '{data}'; give data with 'input_ids' and 'loss_mask'"),
        (
            [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}] * 2,
            "none of the 2 rows in '{data}' has an answer token among its first 3072 tokens",
        ),
        (
            [{"prompt_ids": [5, 6], "response_ids": [1]}] * 3,
            "none of the 3 examples has two answer tokens in a row within --max-length 3072",
        ),
        ([{"prompt_ids": [5, 6], "response_ids": [99]}], "rows.jsonl:1: token id 99 is outside the vocabulary of"),
        ([{"prompt": "hi"}], "rows.jsonl:1: answers are missing: run vllm-dflash regenerate first"),
    ],
)
def test_data_without_anything_to_learn(
    task: TinyTask, tmp_path: Path, loaded: list[str], rows: list[dict[str, Any]], message: str
) -> None:
    data = rows_file(tmp_path, *rows)
    assert message.format(data=data) in refused(task, tmp_path / "out", "--data", data)
    assert loaded == []


def test_examples_without_a_token_to_draft_are_left_out(task: TinyTask, tmp_path: Path) -> None:
    """One answer token is an anchor with nothing behind it; a row of only such examples has no block at all."""
    rows = [{"prompt_ids": [5, 6], "response_ids": [i]} for i in range(3, 20)]
    rows[7]["response_ids"] = [8, 9]
    data = rows_file(tmp_path, *rows)
    assert train.run(options(task, tmp_path / "out", "--data", data, "--batch-size", "1", "--max-steps", "3")) == 0
    assert json.loads((tmp_path / "out" / "last" / "run.json").read_text())["num_examples"] == 1


def test_messages_for_a_tokenizer_without_a_chat_template(task: TinyTask, tmp_path: Path, loaded: list[str]) -> None:
    target = tmp_path / "target"
    shutil.copytree(task.target, target)
    (target / "chat_template.jinja").unlink()
    tiny_tokenizer(chat_template=None).save_pretrained(target)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    data = rows_file(tmp_path, {"messages": turns})
    message = refused(task, tmp_path / "out", "--target", str(target), "--data", data)
    assert f"rows.jsonl:1: the tokenizer of '{target}' has no chat template" in message
    assert "use an instruction-tuned target, or rows with 'text' or token ids" in message
    assert loaded == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target-layer-ids", "0", "7"], "reads target layers [0, 7], but target '{target}' has 4 layers (0 to 3)"),
        (["--target-layer-ids", "-1", "2"], "reads target layers [-1, 2], but target '{target}' has 4 layers"),
        (["--target-layer-ids", "0", "3"], "reads the output of layer 3, the last of target '{target}'"),
        (["--target-layer-ids", "2", "0"], "lists feature layers [2, 0]; they must increase without repeats"),
        (["--target-layer-ids", "1", "1"], "lists feature layers [1, 1]; they must increase without repeats"),
        (["--num-layers", "5"], "5 draft layers cannot be started from a target of 4"),
        (["--mask-token-id", "64"], "has mask_token_id 64 in its config.json, but its tokens are 0 to 63"),
        (["--draft-vocab-size", "65"], "has draft_vocab_size 65 in its config.json, but vocab_size 64"),
        (["--block-size", "1"], "--draft-block-size is 1: a block is an anchor and at least one mask"),
        (["--target", "no/such-target"], "there is no tokenizer for target 'no/such-target'"),
        (["--data", "no-such-file"], "'no-such-file' is neither a file, nor a folder, nor a Hugging Face data set"),
    ],
)
def test_settings_that_do_not_fit_the_target(
    task: TinyTask, tmp_path: Path, loaded: list[str], flags: list[str], message: str
) -> None:
    assert message.format(target=task.target) in refused(task, tmp_path / "out", *flags)
    assert loaded == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 6}, "was trained for a target with 6 layers, but target '{target}' has 4"),
        ({"vocab_size": 128}, "has a vocabulary of 128 with mask token 0, but target '{target}' has 64 tokens"),
        ({"architectures": ["DFlash2DraftModel"]}, "a variant of DFlash with tensors of its own"),
    ],
)
def test_a_drafter_of_another_target(
    task: TinyTask, tmp_path: Path, loaded: list[str], changes: dict[str, Any], message: str
) -> None:
    drafter = write_tiny_drafter(tmp_path / "drafter", **{"vocab_size": 64} | changes)
    found = refused(task, tmp_path / "out", "--from-pretrained", str(drafter))
    assert f"drafter '{drafter}' " in found
    assert message.format(target=task.target) in found
    assert loaded == []


def test_a_drafter_with_another_draft_vocabulary(task: TinyTask, tmp_path: Path, loaded: list[str]) -> None:
    extra = {"lm_head.weight": torch.zeros(16, 64), "d2t": torch.arange(16)}
    drafter = write_tiny_drafter(tmp_path / "drafter", extra, vocab_size=64, draft_vocab_size=16)
    own = ["--num-layers", "3", "--mask-token-id", "0"]
    flags = ["--from-pretrained", str(drafter), *own, "--draft-vocab-size", "32"]
    assert f"drafter '{drafter}' has draft_vocab_size 16, but --draft-vocab-size is 32" in refused(
        task, tmp_path / "out", *flags
    )
    assert loaded == []


def test_an_output_that_cannot_be_written_to(task: TinyTask, tmp_path: Path, loaded: list[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"--output '{file}' is a file; give a folder" in refused(task, file)
    (tmp_path / "out" / "step-00000007").mkdir(parents=True)
    assert f"--output '{tmp_path / 'out'}' holds checkpoints of an earlier run, which --no-resume would mix" in refused(
        task, tmp_path / "out", "--no-resume"
    )
    assert loaded == []
