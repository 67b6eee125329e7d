"""`vllm-dflash eval` gives one tau by serving and by the walk over what was served, in float32.

Two things are counted or computed differently.

* The end: vLLM counts drafted tokens that the target agreed with before it looks for the end of the answer, so also
  those behind it (an end of turn or the token limit within an accepted run), which nobody gets. The walk counts what
  is in the text. The number of cycles is the same.
* The features: the walk rounds them to bfloat16, as training does, serving in float32 does not; now and then another
  token is drafted (here in one cycle of a hundred).

The bring-up drafter with SmolLM2, 6 prompts of 48 tokens: 149 cycles and 72 accepted tokens by both.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import TinyTask, write_tiny_task
from transformers import AutoModelForCausalLM

from vllm_dflash.config import DFlashConfig
from vllm_dflash.reference import features_and_logits
from vllm_dflash.training import evaluate
from vllm_dflash.training.acceptance import Acceptance
from vllm_dflash.training.chat import load_tokenizer
from vllm_dflash.training.data import Example, load_examples
from vllm_dflash.training.drafting import measure
from vllm_dflash.training.model import Drafter
from vllm_dflash.training.pretrained import import_drafter
from vllm_dflash.training.step import tables_of
from vllm_dflash.training.target_features import SequenceFeatures
from vllm_dflash.training.train import train
from vllm_dflash.training.trainer import load_tensors

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


def test_walk_agrees_with_serving(results):
    for name, served, walked in zip(NUM_PROMPTS, results["served"], results["walked"]):
        assert served["task"] == walked["task"] == name
        assert served["n"] == walked["n"] == NUM_PROMPTS[name]
        # Both come to the end of the same answers, so cycles are the inverse of what a cycle gained.
        assert walked["cycles"] == pytest.approx(served["cycles"], rel=0.02)
        assert walked["tau"] > 1.5  # otherwise there is little to agree on
        behind_the_ends = accepted(served) - accepted(walked)
        assert -2 <= behind_the_ends <= K * NUM_PROMPTS[name]  # below zero only by what rounding changes


def accepted(measured: dict[str, Any]) -> int:
    return round((measured["tau"] - 1) * measured["cycles"])


def test_with_the_same_features_only_the_ends_are_counted_differently(task, drafter, results):
    """Walked over answers that go on, up to the cycle in which serving stopped, acceptance is exactly vLLM's."""
    target = AutoModelForCausalLM.from_pretrained(task.target, dtype=torch.float32)
    found = walk_in_float32(target, drafter, [extend(target, example) for example in results["examples"]])
    for served in results["served"]:
        cycles = [0] * (K + 1)  # by accepted tokens
        for document, row in zip(found.documents, results["answers"]):
            place = 0
            for length in document.runs if document.source == served["task"] else ():
                if place < len(row["response_ids"]) - 1:
                    cycles[length] += 1
                place += length + 1
        assert sum(cycles) == served["cycles"]
        assert served["tau"] == pytest.approx(1 + sum(k * number for k, number in enumerate(cycles)) / sum(cycles))
        by_position = [sum(cycles[k:]) / sum(cycles) for k in range(1, K + 1)]
        assert served["by_position"] == pytest.approx(by_position, abs=1e-4)


def walk_in_float32(target: Any, drafter_folder: Path, examples: list[Example]) -> Acceptance:
    """The walk on features that are not rounded."""
    config, tensors = import_drafter(drafter_folder)
    drafter = Drafter(config)
    load_tensors(drafter, tensors)
    features = _Unrounded(target, config)
    return measure(drafter, tables_of(target, None), examples, features, "sdpa", torch.device("cpu"))


class _Unrounded:
    """A reader of features in the target's own precision."""

    def __init__(self, target: Any, config: DFlashConfig) -> None:
        self._target, self._config = target, config

    def read(self, example: Example) -> SequenceFeatures:
        return SequenceFeatures(features_and_logits(self._target, example.input_ids, self._config)[0], None, None)


def extend(target: Any, example: Example) -> Example:
    """The example with K more tokens of the target."""
    more = greedy_after(target, example.input_ids, K)
    return replace(example, input_ids=example.input_ids + more, loss_mask=example.loss_mask + [True] * K)


@torch.inference_mode()
def greedy_after(target: Any, token_ids: list[int], number: int) -> list[int]:
    ids = list(token_ids)
    for _ in range(number):
        ids.append(int(target(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(token_ids) :]
