"""`vllm-dflash regenerate`: the target's own answers with its own token ids, whatever happens in between."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import tiny_tokenizer, write_tiny_chat_target

from vllm_dflash.training import generators, regenerate
from vllm_dflash.training.data import to_example
from vllm_dflash.training.generators import Answer, TransformersGenerator

#: Prompts of different lengths, so that batches are padded.
PROMPTS = ["hi", "good day w20 w21 w22 w23", "bye", "w30 w31", "hello hello w40 w41 w42", "w50", "w60 w61 w62", "day"]
END = 1
HI_IDS = [0, 4, 3, 7, 1, 3, 0, 5, 3]  # <|im_start|> user \n hi <|im_end|> \n <|im_start|> assistant \n


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model gains nothing from more, and on a busy machine they wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("regenerate") / "target")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)])


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(target: Path, data: Path, output: Path, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    regenerate.add_arguments(parser)
    paths = ["--target", str(target), "--data", str(data), "--output", str(output)]
    return regenerate.run(parser.parse_args([*paths, "--engine", "transformers", "--batch-size", "3", *flags]))


def rows_by_id(file: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


class ScriptedGenerator:
    """Answers from a script, by the row's id, and records what it was asked."""

    window, max_length = 2, 40

    def __init__(self, script: dict[str, list[Answer]]) -> None:
        self.script = script
        self.asked: list[tuple[str, list[int]]] = []
        self.num_waiting: list[int] = []  # in each step
        self._waiting: list[str] = []

    def submit(self, key: str, prompt_ids: Sequence[int], seed: int) -> None:
        self.asked.append((key, list(prompt_ids)))
        self._waiting.append(key)

    def step(self) -> list[tuple[str, Answer]]:
        self.num_waiting.append(len(self._waiting))
        key = self._waiting.pop()
        return [(key, self.script[key].pop(0))]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(script: dict[str, list[Answer]]) -> ScriptedGenerator:
        generator = ScriptedGenerator(script)
        monkeypatch.setattr(regenerate, "_generator", lambda args, tokenizer: generator)
        return generator

    return use


def test_greedy_answers_are_the_targets_own(target: Path, data: Path, tmp_path: Path) -> None:
    """The oracle decodes one prompt at a time, without batch, padding or cache."""
    from transformers import AutoModelForCausalLM

    run(target, data, tmp_path / "out.jsonl", "--max-tokens", "24")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    rows = rows_by_id(tmp_path / "out.jsonl")
    assert sorted(rows) == [f"p{i}" for i in range(8)]
    for i, prompt in enumerate(PROMPTS):
        row = rows[f"p{i}"]
        words = tokenizer.convert_tokens_to_ids(prompt.split())
        assert row["prompt_ids"] == [0, 4, 3, *words, 1, 3, 0, 5, 3]
        expected: list[int] = []
        while len(expected) < 24 and END not in expected:
            with torch.no_grad():
                expected.append(int(model(torch.tensor([row["prompt_ids"] + expected])).logits[0, -1].argmax()))
        assert row["response_ids"] == expected
        assert row["finish"] == ("stop" if END in expected else "length")
        assert row["response"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert (row["source"], row["prompt"]) == ("prompts", prompt)
    assert {row["finish"] for row in rows.values()} == {"stop", "length"}, "the prompts should show both"


def test_vllm_gives_the_same_answers(target: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--max-tokens", "24", "--max-length", "100")
    run(target, data, tmp_path / "vllm.jsonl", *flags, "--engine", "vllm")
    run(target, data, tmp_path / "transformers.jsonl", *flags)
    assert rows_by_id(tmp_path / "vllm.jsonl") == rows_by_id(tmp_path / "transformers.jsonl")


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_killed_and_resumed_equals_uninterrupted(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: str
) -> None:
    flags = ("--max-tokens", "12", "--temperature", temperature)
    run(target, data, tmp_path / "whole.jsonl", *flags)
    output, step, num_steps = tmp_path / "out.jsonl", TransformersGenerator.step, 0

    def step_until_killed(self: TransformersGenerator) -> list[tuple[str, Answer]]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(TransformersGenerator, "step", step_until_killed)
    with pytest.raises(KeyboardInterrupt):
        run(target, data, output, *flags)
    written = output.read_text()
    assert written.count("\n") == 3, "the first batch should be on disk"
    output.write_text(written + '{"id": "p7", "prompt": "da')
    run(target, data, output, *flags)
    assert output.read_text().startswith(written), "finished rows should stay as they are"
    assert num_steps == 2 + 2, "five rows are left, two batches"
    assert rows_by_id(output) == rows_by_id(tmp_path / "whole.jsonl")


def test_finished_run_loads_nothing(target: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    run(target, data, tmp_path / "out.jsonl", "--max-tokens", "2", "--limit", "3")
    assert sorted(rows_by_id(tmp_path / "out.jsonl")) == ["p0", "p1", "p2"]
    assert run(Path("no such target"), data, tmp_path / "out.jsonl", "--limit", "3") == 0
    assert "3 rows: 0 repeat an id, 3 are answered already, 0 to do" in capsys.readouterr().out


def test_sampled_answers_depend_on_row_and_seed_alone(target: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--max-tokens", "8", "--temperature", "1")
    run(target, data, tmp_path / "a.jsonl", *flags)
    run(target, data, tmp_path / "b.jsonl", *flags, "--batch-size", "1")
    run(target, data, tmp_path / "c.jsonl", *flags, "--seed", "1")
    first, alone, other = (rows_by_id(tmp_path / f"{name}.jsonl") for name in "abc")
    assert first == alone
    assert all(first[key]["response_ids"] != other[key]["response_ids"] for key in first)


def test_sampling_has_the_targets_distribution() -> None:
    from scipy.stats import chisquare

    logits, num_draws = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0]), 4000
    sample = generators._GumbelNoise(list(range(num_draws)), 0.7, torch.device("cpu"))
    drawn = sample(torch.empty(0), logits.expand(num_draws, -1)).argmax(-1)
    expected = (logits / 0.7).softmax(-1).double().numpy()
    assert chisquare(drawn.bincount(minlength=5).numpy(), expected / expected.sum() * num_draws).pvalue > 1e-3


def test_answer_ends_where_the_context_does(target: Path, tmp_path: Path, capsys: Any) -> None:
    """Prompts of 9, 28 and 30 tokens in a context of 30: 21 tokens of answer, 2, and none."""
    prompts = ["hi", " ".join(["w20"] * 20), " ".join(["w20"] * 22)]
    data = write(tmp_path / "prompts.jsonl", [{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)])
    run(target, data, tmp_path / "out.jsonl", "--max-length", "30")
    rows = rows_by_id(tmp_path / "out.jsonl")
    assert {key: len(row["prompt_ids"] + row["response_ids"]) for key, row in rows.items()} == {"0": 30, "1": 30}
    assert "2 rows answered" in (output := capsys.readouterr().out)
    assert "1 skipped, whose prompt leaves no room in 30 tokens" in output


def test_targets_own_generation_settings_do_not_count(target: Path, data: Path, tmp_path: Path) -> None:
    """A repetition penalty would change greedy answers; vLLM ignores it when it is given sampling parameters."""
    run(target, data, tmp_path / "a.jsonl", "--max-tokens", "12")
    other = write_tiny_chat_target(tmp_path / "other")
    settings = json.loads((other / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 5.0, "do_sample": True, "temperature": 3.0, "min_new_tokens": 12}
    (other / "generation_config.json").write_text(json.dumps(settings))
    run(other, data, tmp_path / "b.jsonl", "--max-tokens", "12")
    assert rows_by_id(tmp_path / "a.jsonl") == rows_by_id(tmp_path / "b.jsonl")


def test_conversation_is_continued_from_the_targets_answers(target: Path, tmp_path: Path, scripted: Any) -> None:
    """The data's own answers vanish; the line break behind <|im_end|> is context."""
    turns = [("human", "hi"), ("gpt", "w40"), ("human", "bye"), ("gpt", "w41 w42"), ("human", "day")]
    row = {"id": "c", "source": "s", "conversations": [{"from": who, "value": text} for who, text in turns]}
    answers = [Answer([8, END], "stop"), Answer([10, 10, END], "stop"), Answer([11, 12], "length")]
    generator = scripted({"c": answers})
    run(target, write(tmp_path / "data.jsonl", [row]), tmp_path / "out.jsonl")
    bye = [3, 0, 4, 3, 9, 1, 3, 0, 5, 3]  # \n <|im_start|> user \n bye <|im_end|> \n <|im_start|> assistant \n
    day = [3, 0, 4, 3, 11, 1, 3, 0, 5, 3]
    second = [*HI_IDS, 8, END, *bye]
    third = [*second, 10, 10, END, *day]
    assert generator.asked == [("c", HI_IDS), ("c", second), ("c", third)]
    written = rows_by_id(tmp_path / "out.jsonl")["c"]
    assert written == {
        "id": "c",
        "source": "s",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "bye"},
            {"role": "assistant", "content": "good good"},
            {"role": "user", "content": "day"},
            {"role": "assistant", "content": "day w12"},
        ],
        "finish": "length",
        "input_ids": [*third, 11, 12],
        "loss_mask": [0] * 9 + [1] * 2 + [0] * 10 + [1] * 3 + [0] * 10 + [1] * 2,
    }
    example = to_example(written, "out.jsonl:1", tiny_tokenizer(), 100)
    assert example is not None
    assert example.input_ids == [*third, 11, 12]


def test_conversation_ends_with_an_answer_cut_short(target: Path, tmp_path: Path, scripted: Any) -> None:
    turns = [{"role": role, "content": "hi"} for role in ("system", "user", "assistant", "user")]
    generator = scripted({"data.jsonl:1": [Answer([8], "length")]})
    run(target, write(tmp_path / "data.jsonl", [{"messages": turns}]), tmp_path / "out.jsonl")
    row = rows_by_id(tmp_path / "out.jsonl")["data.jsonl:1"]
    assert generator.asked == [("data.jsonl:1", [0, 6, 3, 7, 1, 3, *HI_IDS])]
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    assert row["input_ids"] == [0, 6, 3, 7, 1, 3, *HI_IDS, 8]


def test_question_beyond_the_context_is_left_out(target: Path, tmp_path: Path, scripted: Any) -> None:
    """The context has 40 tokens: the first answer ends at 11, and the second question would end at 40."""
    turns = [("user", "hi"), ("assistant", "x"), ("user", " ".join(["day"] * 20))]
    rows = [{"id": "a", "messages": [{"role": role, "content": text} for role, text in turns]}]
    generator = scripted({"a": [Answer([8, END], "stop")]})
    run(target, write(tmp_path / "data.jsonl", rows), tmp_path / "out.jsonl")
    assert generator.asked == [("a", HI_IDS)]
    row = rows_by_id(tmp_path / "out.jsonl")["a"]
    assert [message["content"] for message in row["messages"]] == ["hi", "hello"]
    assert (row["input_ids"], row["loss_mask"]) == ([*HI_IDS, 8, END], [0] * 9 + [1, 1])


def test_no_more_than_the_window_is_asked_at_once(target: Path, data: Path, tmp_path: Path, scripted: Any) -> None:
    generator = scripted({f"p{i}": [Answer([8, END], "stop")] for i in range(8)})
    run(target, data, tmp_path / "out.jsonl")
    assert generator.num_waiting == [2] * 7 + [1]
    assert len(rows_by_id(tmp_path / "out.jsonl")) == 8


def test_repeated_ids_are_answered_once(target: Path, tmp_path: Path, scripted: Any, capsys: Any) -> None:
    data = write(tmp_path / "data.jsonl", [{"id": "a", "prompt": "hi"}, {"id": "a", "prompt": "bye"}])
    scripted({"a": [Answer([8, END], "stop")]})
    run(target, data, tmp_path / "out.jsonl")
    assert rows_by_id(tmp_path / "out.jsonl")["a"]["prompt"] == "hi"
    assert "2 rows: 1 repeat an id, 0 are answered already, 1 to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, r"a row with \['text'\] has no prompt"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "the conversation asks nothing"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "a message of role 'tool' answers a call"),
    ],
)
def test_rows_without_question(target: Path, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^data.jsonl:1: {message}"):
        run(target, write(tmp_path / "data.jsonl", [row]), tmp_path / "out.jsonl")


def test_wrong_outputs(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its name must end in .jsonl, so that rows can be added"):
        run(target, data, tmp_path / "out.jsonl.xz")
    for content in ("not answers\n", '{"prompt": "hi"}\n', "[1]\n"):
        (tmp_path / "out.jsonl").write_text(content)
        with pytest.raises(ValueError, match=r"out.jsonl' exists and holds something else than answers"):
            run(target, data, tmp_path / "out.jsonl")
        assert (tmp_path / "out.jsonl").read_text() == content


def test_engine_is_chosen_by_what_is_installed(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(regenerate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="--engine vllm needs vLLM, which is not installed"):
        run(target, data, tmp_path / "out.jsonl", "--engine", "vllm")
    run(target, data, tmp_path / "out.jsonl", "--engine", "auto", "--max-tokens", "2")
    assert "answers by transformers" in capsys.readouterr().out
