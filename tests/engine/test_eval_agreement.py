"""`vllm-dflash eval` gives one tau by serving and by the walk over what was served, in float32: cycle by cycle."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import TinyTask, write_tiny_task
from transformers import AutoModelForCausalLM

from vllm_dflash.training import evaluate
from vllm_dflash.training.chat import load_tokenizer
from vllm_dflash.training.data import load_examples
from vllm_dflash.training.served import without_tokens_behind_the_end
from vllm_dflash.training.train import train

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="eval uses bfloat16 there, in which ties are common")

MAX_TOKENS, K = 20, 5
NUM_PROMPTS = {"first": 10, "second": 14}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> TinyTask:
    """Answers longer than they are served, so that a drafter which knows them goes on behind the end."""
    return write_tiny_task(tmp_path_factory.mktemp("agreement"), num_examples=24, response_len=MAX_TOKENS + K)


@pytest.fixture(scope="module")
def drafter(task, tmp_path_factory) -> Path:
    """A drafter that has learnt the answers partly by heart."""
    settings = {"num_layers": 2, "draft_block_size": K + 1, "max_steps": 60, "lr": 3e-3, "batch_size": 8}
    never = {"eval_steps": 1000, "checkpoint_steps": 1000, "log_steps": 1000}
    return train(task.settings(tmp_path_factory.mktemp("agreement") / "run", **settings, **never))


@pytest.fixture(scope="module")
def results(task, drafter, tmp_path_factory) -> dict[str, Any]:
    """Of serving and of the walk over the answers that serving saved; "answers": their rows."""
    folder = tmp_path_factory.mktemp("results")
    rows = iter([json.loads(line) for line in task.data.read_text().splitlines()])
    prompts = [
        {"id": f"{name} {i}", "source": name, "prompt": "hi", "prompt_ids": next(rows)["prompt_ids"]}
        for name, number in NUM_PROMPTS.items()
        for i in range(number)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    answers = str(folder / "answers.jsonl")
    serving = ["--engine", "vllm", "--max-tokens", str(MAX_TOKENS), "--batch-size", "4", "--save-answers", answers]
    return {
        "served": run(task, drafter, folder / "prompts.jsonl", folder / "served.json", *serving)["tasks"],
        "walked": run(task, drafter, Path(answers), folder / "walked.json")["tasks"],
        "answers": [json.loads(line) for line in Path(answers).read_text().splitlines()],
        "examples": load_examples([answers], load_tokenizer(str(task.target)), 1000),
        "prompts": prompts,
    }


def run(task: TinyTask, drafter: Path, data: Path, output: Path, *flags: str) -> Any:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    given = ["--target", str(task.target), "--drafter", str(drafter), "--data", str(data), "--output", str(output)]
    assert evaluate.run(parser.parse_args([*given, *flags])) == 0
    return json.loads(output.read_text())


def test_saved_answers_are_what_was_served(task, results):
    """The target's own greedy answers to the prompts, in rows that training reads."""
    target = AutoModelForCausalLM.from_pretrained(task.target, dtype=torch.float32)
    assert [(row["id"], row["source"]) for row in results["answers"]] == [
        (row["id"], row["source"]) for row in results["prompts"]
    ]
    for row, example in zip(results["answers"], results["examples"]):
        assert example.id == row["id"]
        assert example.input_ids == row["prompt_ids"] + row["response_ids"]
        assert sum(example.loss_mask) == len(row["response_ids"])
        assert row["finish"] == "stop" or len(row["response_ids"]) == MAX_TOKENS
        assert greedy_after(target, row["prompt_ids"], len(row["response_ids"])) == row["response_ids"]
    assert {row["finish"] for row in results["answers"]} == {"stop", "length"}


@pytest.mark.case("F44")
def test_walk_agrees_with_serving(results):
    """Also at the end, where vLLM accepts tokens behind it that nobody gets."""
    for name, served, walked in zip(NUM_PROMPTS, results["served"], results["walked"]):
        assert served["task"] == name
        assert served["n"] == NUM_PROMPTS[name]
        assert served == walked
        assert walked["tau"] > 1.5  # otherwise there is little to agree on
        assert walked["interval"][0] < walked["tau"] < walked["interval"][1]


@pytest.mark.parametrize(
    ("accepted", "answer_len", "expected"),
    [
        ([2, 0, 3], 9, (2, 0, 3)),  # 1 + 3 + 1 + 4
        ([2, 0, 3], 8, (2, 0, 3)),  # what is cut off is the target's own token
        ([2, 0, 3], 7, (2, 0, 2)),
        ([2, 0, 3], 6, (2, 0, 1)),
        ([2, 0, 3], 12, (2, 0, 3)),  # steps without drafts leave no cycle
        ([], 1, ()),
    ],
)
def test_tokens_behind_the_end_are_taken_off(accepted, answer_len, expected):
    assert without_tokens_behind_the_end(accepted, answer_len) == expected


@torch.inference_mode()
def greedy_after(target: Any, token_ids: list[int], number: int) -> list[int]:
    ids = list(token_ids)
    for _ in range(number):
        ids.append(int(target(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(token_ids) :]
