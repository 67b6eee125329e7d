"""The command as a whole, on a tiny target with random weights: what it prints, writes, refuses and never loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import WORDS, tiny_tokenizer, write_tiny_chat_target
from tiny_models import write_tiny_drafter

from vllm_dflash.cli import main
from vllm_dflash.doctor import command


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("doctor") / "target")


def tiny_drafter_for(folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0]},
    }
    return write_tiny_drafter(folder, **(settings | changes))


def doctor(target: Path, drafter: Path, *flags: str) -> int:
    return main(["doctor", "--model", str(target), "--draft", str(drafter), "--max-tokens", "24", *flags])


@pytest.mark.case("F44b")
def test_report_and_json_say_what_the_numbers_depend_on(target, tmp_path, capsys):
    """A drafter of random weights is called untrained, with exit code 1."""
    file = tmp_path / "found.json"
    assert doctor(target, tiny_drafter_for(tmp_path / "d"), "--json", str(file)) == 1
    said = " ".join(capsys.readouterr().out.split())
    for fragment in (
        "chat template of the target; thinking: the template has no such mode",
        "8 of built-in questions, 24 tokens each at most",
        "greedy (temperature 0), float32",
        "K 7",
        "random drafter",
        "untrained: ",
        "Repair: give the trained checkpoint",
    ):
        assert fragment in said
    found = json.loads(file.read_text())
    assert found["healthy"] is False
    assert found["name"] == "untrained"
    assert found["verdict"].startswith("untrained: ")
    assert found["circumstances"] | {"drafter": ""} == {
        "target": str(target),
        "drafter": "",
        "num_drafted": 7,
        "template": "chat template of the target",
        "thinking": "the template has no such mode",
        "dataset": "built-in questions",
        "num_prompts": 8,
        "max_tokens": 24,
        "sampling": "greedy (temperature 0)",
        "dtype": "float32",
    }
    assert len(found["served"]["by_position"]) == 7
    assert found["served"]["cycles"] > 8
    assert [control["label"] for control in found["controls"]] == ["random drafter", "features shifted by one row"]
    assert {"torch", "transformers"} <= found["versions"].keys()


@pytest.mark.case("F27", "F30", "F52")
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dflash_config": {"mask_token_id": None, "target_layer_ids": [0]}}, "mask-token"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1]}}, "target-layers"),
        ({"block_size": 1}, "config"),
        ({"vocab_size": 65}, "config"),
        ({"intermediate_size": 96}, "checkpoint"),
    ],
)
def test_wrong_settings_end_it_before_the_target_is_loaded(target, tmp_path, monkeypatch, changes, name):
    def refuse(*_: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(command, "load_target", refuse)
    drafter = tiny_drafter_for(tmp_path / "d")
    raw = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(raw | changes))
    file = tmp_path / "found.json"
    assert doctor(target, drafter, "--json", str(file)) == 1
    found = json.loads(file.read_text())
    assert found["name"] == name
    assert found["served"] is None
    assert found["repair"]


@pytest.mark.case("F30")
def test_mask_token_in_padding_rows_of_the_target(tmp_path, target):
    """The target's embedding has rows that its tokenizer does not use: they were never trained."""
    from transformers import LlamaForCausalLM

    padded = tmp_path / "padded"
    model = LlamaForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(len(WORDS) + 16)
    model.save_pretrained(padded)
    tiny_tokenizer().save_pretrained(padded)
    nested = {"mask_token_id": len(WORDS) + 3, "target_layer_ids": [0]}
    drafter = tiny_drafter_for(tmp_path / "d", vocab_size=len(WORDS) + 16, dflash_config=nested)
    file = tmp_path / "found.json"
    assert doctor(padded, drafter, "--json", str(file)) == 1
    found = json.loads(file.read_text())
    assert found["name"] == "mask-token"
    assert "67, a padding row" in found["sentence"]
    assert "has 64 tokens" in found["sentence"]


@pytest.mark.case("F52")
def test_drafter_with_a_tokenizer_of_other_strings(target, tmp_path):
    drafter = tiny_drafter_for(tmp_path / "d")
    tiny_tokenizer().save_pretrained(drafter)
    file = tmp_path / "found.json"
    doctor(target, drafter, "--json", str(file))
    assert json.loads(file.read_text())["name"] == "untrained"  # the same strings: nothing to refuse
    text = (drafter / "tokenizer.json").read_text()
    (drafter / "tokenizer.json").write_text(text.replace('"hello": 8', '"hello": 9').replace('"bye": 9', '"bye": 8'))
    assert doctor(target, drafter, "--json", str(file)) == 1
    found = json.loads(file.read_text())
    assert found["name"] == "tokenizer"
    assert "2 ids stand for other strings" in found["sentence"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", "1"], "too few to tell anything; give at least 2"),
        (["--json", "no/such/folder/f.json"], "its folder does not exist; make it first"),
        (["--chat-template", "no-such.jinja"], "is no file; give target, none or a Jinja template"),
        (["--prompts", "random"], "acceptance on random tokens says nothing"),
    ],
)
def test_flags_that_mean_nothing(target, tmp_path, capsys, flags, message):
    assert doctor(target, tiny_drafter_for(tmp_path / "d"), *flags) == 1
    assert message in capsys.readouterr().err


def test_nothing_of_vllm_is_imported():
    """It has to run where vLLM does not."""
    import subprocess
    import sys

    code = (
        "import sys; import vllm_dflash.doctor.command, vllm_dflash.doctor.report, vllm_dflash.doctor.tokens;"
        "print([name for name in sys.modules if name == 'vllm' or name.startswith('vllm.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
