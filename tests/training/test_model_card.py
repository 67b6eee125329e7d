"""Model cards: every number comes from the records, and what they lack is left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub import ModelCard as HubCard
from tiny_models import drafter_config

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.model_card import ModelCard, check_evaluation

CONFIG = DFlashConfig.from_dict(drafter_config(), "tiny")

RUN = {
    "target": "small/target",
    "license": "mit",
    "datasets": ["someone/questions"],
    "data": ["answers.jsonl.xz"],
    "data_hash": "ab12",
    "num_examples": 3584,
    "num_tokens": 1077703,
    "command": "vllm-dflash train --target small/target",
    "commit": "4739244",
    "seed": 7,
    "machine": "1x H200",
    "minutes": 9.5,
    "versions": {"torch": "2.13.0"},
    "metrics": {"loss": 1.66789},
}
EVALUATION: dict[str, Any] = {
    "tasks": [
        {
            "task": "gsm8k",
            "n": 120,
            "tau": 2.3149,
            "interval": [2.2, 2.43],
            "without_loops": {"n": 101, "tau": 2.1, "interval": [2.0, 2.204]},
        },
        {"task": "mt_bench", "n": 80, "tau": 1.5, "interval": [1.4, 1.6]},
    ],
    "confidence": 0.95,
    "num_speculative_tokens": 7,
    "decoding": "greedy",
    "machine": "2x AMD EPYC",
    "command": "vllm-dflash eval --drafter tiny",
    "versions": {"vllm": "0.32.0"},
}


def render(**card: Any) -> str:
    return ModelCard(**({"name": "me/tiny-dflash", "target": "small/target"} | card)).render(CONFIG, "z-lab")


def test_the_hub_reads_the_front_matter():
    card = HubCard(render(run=RUN), ignore_metadata_errors=False)
    assert card.data.to_dict() == {
        "license": "mit",
        "base_model": "small/target",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["dflash", "speculative-decoding"],
        "datasets": ["someone/questions"],
    }


def test_folders_are_no_hub_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "target").mkdir(parents=True)
    for folder in ("models/target", "/somewhere/target", "./target/model", "target"):
        assert "base_model" not in render(target=folder)


def test_without_records_there_are_no_sections_and_no_numbers():
    card = render()
    assert re.findall("^#.*", card, re.MULTILINE) == ["# tiny-dflash", "## Usage"]
    assert "license" not in card
    # Layer ids, the block and K are the drafter's own.
    assert re.findall(r"\d+", card) == ["3", "0", "2", "0", "8", "7", "7"]


def test_usage_is_a_command_to_type():
    serve = """vllm serve small/target --speculative-config \
'{"method": "dflash", "model": "me/tiny-dflash", "num_speculative_tokens": 7}'"""
    assert f"```bash\n{serve}\n```" in render()
    assert "vllm serve me/tiny-dflash" not in render()
    both = ModelCard("me/tiny-dflash", "small/target").render(CONFIG, "speculators")
    assert serve in both
    assert "```bash\nvllm serve me/tiny-dflash\n```" in both


def test_a_scale_that_vllm_overlooks_is_said():
    scaled = replace(CONFIG, input_embedding_scale=8.0)
    card = ModelCard("me/tiny-dflash", "small/target").render(scaled, "z-lab")
    assert "Token embeddings are multiplied by 8 (`input_embedding_scale`)" in card
    assert "plugin vllm-dflash" not in render()


def test_tau_with_and_without_loops():
    card = render(evaluations=[EVALUATION])
    table = """\
| task | n | tau | 95% interval | n without loops | tau without loops | 95% interval |
| --- | --- | --- | --- | --- | --- | --- |
| gsm8k | 120 | 2.31 | 2.20 to 2.43 | 101 | 2.10 | 2.00 to 2.20 |
| mt_bench | 80 | 1.50 | 1.40 to 1.60 |  |  |  |
"""
    assert table in card
    assert "Measured: K = 7; greedy; 2x AMD EPYC; vllm 0.32.0." in card
    assert "```bash\nvllm-dflash eval --drafter tiny\n```" in card


def test_tau_without_intervals_or_loops():
    card = render(evaluations=[{"tasks": [{"task": "gsm8k", "n": 5, "tau": 1.6}]}])
    assert "| task | n | tau | interval |\n| --- | --- | --- | --- |\n| gsm8k | 5 | 1.60 |  |\n" in card
    assert "loop" not in card
    assert "Measured" not in card


def test_training_and_data_come_from_the_run_record():
    card = render(run=RUN)
    assert re.findall("^#.*", card, re.MULTILINE) == ["# tiny-dflash", "## Usage", "## Data", "## Training"]
    assert "```bash\nvllm-dflash train --target small/target\n```" in card
    for row in (
        "| data sets | someone/questions |",
        "| files | answers.jsonl.xz |",
        "| supervised tokens | 1077703 |",
        "| hash | ab12 |",
        "| machine | 1x H200 |",
        "| seed | 7 |",
        "| commit | 4739244 |",
        "| torch | 2.13.0 |",
        "| loss | 1.668 |",
    ):
        assert row in card


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({}, "'eval.json' is no evaluation"),
        ({"tasks": []}, "is no evaluation"),
        ({"tasks": ["gsm8k"]}, "is no evaluation"),
        ({"tasks": [{"task": "gsm8k", "n": 3}]}, "task 'gsm8k' without tau"),
        ({"tasks": [{"tau": 2.0}]}, "without task, n"),
    ],
)
def test_records_that_are_no_evaluation_are_refused(evaluation, message):
    with pytest.raises(ValueError, match=message):
        check_evaluation(evaluation, "eval.json")
