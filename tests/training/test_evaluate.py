"""`vllm-dflash eval` by the walk, on texts that a tiny drafter predicts exactly as far as was planned."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_tiny_drafter
from tiny_training import MASK_TOKEN, write_tiny_task
from transformers import AutoModelForCausalLM

from vllm_dflash.config import DFlashConfig
from vllm_dflash.reference import ReferenceDrafter, features_and_logits
from vllm_dflash.training import evaluate
from vllm_dflash.training.model_card import ModelCard, check_evaluation
from vllm_dflash.training.train import train

#: Accepted tokens of each cycle with K = 7. tau: 1 + 19 / 7 = 3.714, 1 + 8 / 4 = 3, together 1 + 27 / 11 = 3.4545.
MATHS = {"a": (0, 7, 2, 0, 3, 7, 0), "b": (1, 1, 6, 0)}
CHAT = {"c": (5, 5)}
LOOP = [20, 21, 22, 23]


class Writer:
    """Writes answers in which the drafted tokens hold for as many slots as wanted, by the reference drafter.

    They are not the target's choices, but the walk takes them for such. Features are rounded as training rounds them.
    """

    def __init__(self, target: Path, drafter: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        config = DFlashConfig.from_dict(json.loads((drafter / "config.json").read_text()), "tiny")
        embedding, head = (
            module.weight.data for module in (self.target.get_input_embeddings(), self.target.get_output_embeddings())
        )
        self.drafter = ReferenceDrafter(drafter, config, embedding, head)

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], num_drafted: int) -> list[int]:
        """What is drafted after `tokens`, the last of which is the anchor."""
        features, _ = features_and_logits(self.target, list(tokens[:-1]), self.drafter.config)
        return self.drafter.draft(self.drafter.fuse(features.bfloat16()), tokens[-1], num_drafted)

    def answer(self, prompt: list[int], runs: Sequence[int], num_drafted: int = 7) -> list[int]:
        tokens = [*prompt, 9]
        for run in runs:
            drafted = self.draft(tokens, num_drafted)
            wrong = 3 + (drafted[run] if run < num_drafted else 0) % 60
            tokens += [*drafted[:run], wrong]
        return tokens[len(prompt) :]

    def runs(self, prompt: list[int], answer: list[int], num_drafted: int = 7) -> list[int]:
        """Accepted tokens of each cycle, by a plain loop."""
        tokens, place, runs = prompt + answer, len(prompt), []
        while place < len(tokens) - 1:
            following = tokens[place + 1 : place + 1 + num_drafted]
            drafted = self.draft(tokens[: place + 1], num_drafted)
            runs.append(next((k for k, token in enumerate(following) if drafted[k] != token), len(following)))
            place += runs[-1] + 1
        return runs


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A target of 64 tokens with a tokenizer."""
    return write_tiny_task(tmp_path_factory.mktemp("evaluate"), num_examples=1, response_len=1).target


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("evaluate") / "drafter")


@pytest.fixture(scope="module")
def writer(target, drafter) -> Writer:
    return Writer(target, drafter)


def write_drafter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """Two layers, blocks of 8, the mask token that the tiny tokenizer has for it."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 2}
    layers = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 2]}
    return write_tiny_drafter(folder, tensors, **sizes | {"dflash_config": layers} | changes)


def prompt(name: str) -> list[int]:
    return random.Random(name).sample(range(3, 64), 6)


def write_rows(file: Path, source: str | None, answers: dict[str, list[int]]) -> str:
    rows = [{"id": name, "prompt_ids": prompt(name), "response_ids": ids} for name, ids in answers.items()]
    marked = [row | ({} if source is None else {"source": source}) for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in marked))
    return str(file)


def write_answers(writer: Writer, file: Path, plan: Mapping[str, tuple[int, ...]], num_drafted: int = 7) -> str:
    """Answers with these runs; their task is the file's name."""
    answers = {name: writer.answer(prompt(name), runs, num_drafted) for name, runs in plan.items()}
    return write_rows(file, None, answers)


@pytest.fixture(scope="module")
def data(writer, tmp_path_factory) -> list[str]:
    """Files of two tasks."""
    folder = tmp_path_factory.mktemp("data")
    return [write_answers(writer, folder / f"{name}.jsonl", plan) for name, plan in (("maths", MATHS), ("chat", CHAT))]


def run(target: Path, drafter: Path, data: Sequence[str], output: Path, *flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    given = ["--target", str(target), "--drafter", str(drafter), "--data", *data, "--output", str(output), *flags]
    assert evaluate.run(parser.parse_args(given)) == 0
    result = json.loads(output.read_text())
    check_evaluation(result, output.name)
    return result


def test_tasks_and_circumstances(target, drafter, data, tmp_path):
    result = run(target, drafter, data, tmp_path / "eval.json")
    maths, chat = result["tasks"]
    low, high = maths.pop("interval")
    assert low == 3.0  # answer b twice
    assert high == pytest.approx(1 + 19 / 7)  # answer a twice
    assert maths.pop("without_loops")["tau"] == maths["tau"]
    assert maths == {
        "task": "maths",
        "n": 2,
        "tau": pytest.approx(1 + 27 / 11),
        "cycles": 11,
        # 11 runs: 7, 7, 6, 3, 2, 1, 1, and four times 0
        "by_position": [0.6364, 0.4545, 0.3636, 0.2727, 0.2727, 0.2727, 0.1818],
    }
    assert chat | {"without_loops": None} == {
        "task": "chat",
        "n": 1,
        "tau": 6.0,
        "interval": None,
        "cycles": 2,
        "by_position": [1.0] * 5 + [0.0] * 2,
        "without_loops": None,
    }
    assert result["mean_tau"] == pytest.approx((38 / 11 + 6) / 2)  # of tasks, however long they are
    assert (result["num_speculative_tokens"], result["confidence"], result["engine"]) == (7, 0.95, "walk")
    assert (result["drafter"], result["target"]) == (str(drafter), str(target))
    assert result["versions"]["torch"] == torch.__version__
    assert result.keys() == {
        "tasks", "mean_tau", "confidence", "drafter", "target", "num_speculative_tokens", "decoding", "engine",
        "machine", "command", "commit", "versions",
    }  # fmt: skip


def test_model_card_shows_the_result(target, drafter, data, tmp_path):
    result = run(target, drafter, data, tmp_path / "eval.json")
    config = DFlashConfig.from_dict(json.loads((drafter / "config.json").read_text()), "tiny")
    card = ModelCard("tiny", "target", evaluations=[result]).render(config, "z-lab")
    assert "| maths | 2 | 3.45 | 3.00 to 3.71 | 2 | 3.45 | 3.00 to 3.71 |" in card
    assert "| chat | 1 | 6.00 |  | 1 | 6.00 |  |" in card
    assert "Measured: walk; K = 7; greedy; " in card


def test_printed_table(target, drafter, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run(target, drafter, data, tmp_path / "eval.json")
    lines = capsys.readouterr().out.splitlines()
    [maths] = [line.split("│") for line in lines if "maths" in line]
    cells = [cell.strip() for cell in maths[1:-1]]
    assert cells == ["maths", "2", "3.45", "3.00 to 3.71", "3.45 (2)", "64% 45% 36% 27% 27% 27% 18%"]
    assert "4.73" in next(line for line in lines if "mean of tasks" in line)


def test_rows_of_one_file_may_name_their_tasks(target, drafter, writer, tmp_path):
    answers = {name: writer.answer(prompt(name), runs) for name, runs in (MATHS | CHAT).items()}
    rows = [
        write_rows(tmp_path / f"{name}.jsonl", source, {name: answers[name]})
        for name, source in (("a", "maths"), ("c", "chat"), ("b", "maths"))
    ]
    (tmp_path / "all.jsonl").write_text("".join(Path(row).read_text() for row in rows))
    result = run(target, drafter, [str(tmp_path / "all.jsonl")], tmp_path / "eval.json")
    assert [(t["task"], t["n"], round(t["tau"], 4)) for t in result["tasks"]] == [("maths", 2, 3.4545), ("chat", 1, 6)]


def test_an_answer_may_end_within_an_accepted_run(target, drafter, writer, tmp_path):
    """Serving stopped there; what would have been accepted behind the end is not part of the text."""
    answer = writer.answer(prompt("a"), (2, 6))
    cut = {"cut": answer[:-3], "one token": [9], "two": [9, 10]}
    rows = write_rows(tmp_path / "cut.jsonl", "cut", {"a": cut["cut"]})
    [task] = run(target, drafter, [rows], tmp_path / "eval.json")["tasks"]
    assert (task["cycles"], task["tau"]) == (2, 1 + (2 + 4) / 2)
    [task] = run(target, drafter, [write_rows(tmp_path / "one.jsonl", "one", {"a": cut["one token"]})],
                 tmp_path / "eval.json")["tasks"]  # fmt: skip
    assert (task["n"], task["cycles"], task["tau"]) == (1, 0, 1)


def test_answers_that_end_in_a_loop(target, drafter, writer, tmp_path):
    looping = writer.answer(prompt("d"), (3,)) + LOOP * 16
    answers = {"c": writer.answer(prompt("c"), (5, 5)), "d": looping}
    both, only = write_rows(tmp_path / "both.jsonl", "both", answers), write_rows(
        tmp_path / "only.jsonl", "only", {"d": looping}
    )  # fmt: skip
    tasks = run(target, drafter, [both, only], tmp_path / "eval.json")["tasks"]
    runs = writer.runs(prompt("d"), looping)
    assert runs[0] == 3
    assert tasks[0]["without_loops"] | {"by_position": None} == {
        "task": "both", "n": 1, "tau": 6.0, "interval": None, "cycles": 2, "by_position": None,
    }  # fmt: skip
    assert (tasks[0]["n"], tasks[0]["cycles"]) == (2, 2 + len(runs))
    assert tasks[0]["tau"] == pytest.approx(1 + (10 + sum(runs)) / (2 + len(runs)))
    # Of a task without any other answer nothing is known; 1.00 would be a measurement.
    assert (tasks[1]["n"], tasks[1]["without_loops"]) == (1, None)


def test_fewer_drafted_than_the_block(target, drafter, writer, tmp_path):
    """A bidirectional block of 4 drafts otherwise than the first slots of a block of 8."""
    rows = write_answers(writer, tmp_path / "short.jsonl", {"a": (3, 0, 2, 3, 1)}, num_drafted=3)
    result = run(target, drafter, [rows], tmp_path / "eval.json", "--num-speculative-tokens", "3")
    assert result["num_speculative_tokens"] == 3
    assert result["tasks"][0]["tau"] == 1 + 9 / 5
    assert result["tasks"][0]["by_position"] == [0.8, 0.6, 0.4]
    assert run(target, drafter, [rows], tmp_path / "eval.json")["tasks"][0]["tau"] < 2


def test_more_drafted_than_the_block(target, drafter, data, tmp_path, capsys):
    result = run(target, drafter, data, tmp_path / "eval.json", "--num-speculative-tokens", "12")
    assert "num_speculative_tokens 12 exceeds" in capsys.readouterr().out
    assert result["num_speculative_tokens"] == 7
    assert result["tasks"][0]["tau"] == pytest.approx(1 + 27 / 11)


def test_limit_is_per_file(target, drafter, data, tmp_path):
    result = run(target, drafter, data, tmp_path / "eval.json", "--limit", "1")
    assert [(t["task"], t["n"], t["cycles"]) for t in result["tasks"]] == [("maths", 1, 7), ("chat", 1, 2)]


def test_reduced_vocabulary(target, tmp_path):
    """Draft token d is target token 2 d, so that only even tokens are ever accepted."""
    tensors = {"lm_head.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(5))}
    tensors["d2t"] = torch.arange(32)
    reduced = write_drafter(tmp_path / "drafter", tensors, draft_vocab_size=32)
    writer = Writer(target, reduced)
    assert all(token % 2 == 0 for token in writer.draft([*prompt("a"), 9], 7))
    rows = write_answers(writer, tmp_path / "maths.jsonl", MATHS)
    [task] = run(target, reduced, [rows], tmp_path / "eval.json")["tasks"]
    assert (task["cycles"], task["tau"]) == (11, pytest.approx(1 + 27 / 11))


@pytest.mark.parametrize(
    ("setting", "value"), [("drafting", "autoregressive"), ("target_features", False), ("injection", "input")]
)
def test_ablations_draft_as_they_were_trained(tmp_path, setting, value):
    """The trainer's own measurement of the same answers; vLLM, which cannot serve them, is not asked."""
    task = write_tiny_task(tmp_path, num_examples=8)
    changes = {setting: value, "eval_data": (str(task.data),), "eval_examples": 8, "max_steps": 30, "eval_steps": 30}
    best = train(task.settings(tmp_path / "run", lr=3e-3, checkpoint_steps=30, **changes))
    measured = json.loads((best / "run.json").read_text())["metrics"]["eval_tau"]
    assert measured > 1.1
    result = run(task.target, best, [str(task.data)], tmp_path / "eval.json")
    assert result["mean_tau"] == pytest.approx(measured, abs=1e-4)
    with pytest.raises(ValueError, match="trained as an ablation, which vLLM does not serve; use --engine walk"):
        run(task.target, best, [str(task.data)], tmp_path / "eval.json", "--engine", "vllm")


def test_wrong_pair_is_refused(target, data, tmp_path):
    other = write_drafter(tmp_path / "other", num_target_layers=6)
    with pytest.raises(ValueError, match="was trained for a target with 6 layers, but target '.*' has 4"):
        run(target, other, data, tmp_path / "eval.json")
    assert not (tmp_path / "eval.json").exists()


@pytest.mark.parametrize("flag", ["--output", "--save-answers"])
def test_missing_folder_is_refused_before_anything_is_loaded(tmp_path, flag):
    """Neither target nor drafter exists, which nobody has noticed yet."""
    with pytest.raises(ValueError, match=r"'.*nowhere/file' cannot be written: its folder does not exist"):
        run(tmp_path / "t", tmp_path / "d", ["x.jsonl"], tmp_path / "e", flag, str(tmp_path / "nowhere" / "file"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_ids": [7], "response_ids": [8]}, "it needs 'prompt' or 'messages' to be served"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "the conversation asks nothing"),
    ],
)
def test_rows_that_cannot_be_served_are_named(target, drafter, tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"rows.jsonl:1: .*{message}"):
        run(target, drafter, [str(tmp_path / "rows.jsonl")], tmp_path / "e.json", "--engine", "vllm")
