"""Broken drafters, each diagnosed by name with its repair, and healthy ones. All share the target's answers."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_drafters import BIDIRECTIONAL, CASES, SHIPPED, SUBTLE, write_broken

from vllm_dflash.cli import main
from vllm_dflash.doctor.command import Examination, add_arguments
from vllm_dflash.doctor.diagnosis import MIN_GAIN, MIN_T, Diagnosis
from vllm_dflash.doctor.fix import write_repaired
from vllm_dflash.doctor.probe import ProbeSource
from vllm_dflash.doctor.prompts import Rendering, questions
from vllm_dflash.doctor.report import verdict
from vllm_dflash.training.chat import load_tokenizer
from vllm_dflash.training.target_features import load_target


def probe_source(smollm2: Path, number: int, max_tokens: int) -> ProbeSource:
    target = load_target(str(smollm2), torch.device("cpu"))
    return ProbeSource(target, load_tokenizer(str(smollm2)), questions(None, number), max_tokens)


@pytest.fixture(scope="module")
def source(smollm2: Path) -> ProbeSource:
    """Six questions to the embedded target, answered with 40 tokens each."""
    return probe_source(smollm2, 6, 40)


@pytest.fixture(scope="module")
def more_answers(smollm2: Path) -> ProbeSource:
    """Twelve of 96 tokens each, for what hardly shows."""
    return probe_source(smollm2, 12, 96)


def examine(folder: Path, smollm2: Path, source: ProbeSource, *flags: str) -> Diagnosis:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--model", str(smollm2), "--draft", str(folder), *flags])
    return Examination(str(smollm2), options, source).diagnosis()


def parameters() -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.case(*case.users)] * bool(case.users) + [pytest.mark.slow] * case.is_slow)
        for name, case in CASES.items()
    ]


@pytest.mark.parametrize("name", parameters())
def test_broken_drafter_is_diagnosed_by_name(name, smollm2, source, tmp_path):
    case, flags = CASES[name], []
    folder = write_broken(tmp_path / "broken", case, source.get(Rendering()))
    if case.template is not None:
        (tmp_path / "other.jinja").write_text(case.template)
        flags = ["--chat-template", str(tmp_path / "other.jinja")]
    found = examine(folder, smollm2, source, *flags)
    assert found.name == case.diagnosis, verdict(found)
    assert case.repair in found.repair
    assert not found.is_healthy
    assert verdict(found).startswith(f"{case.diagnosis}: ")
    if found.gain is not None:
        assert found.gain.nats >= MIN_GAIN
        assert found.gain.t >= MIN_T
    if found.edits:
        raw = json.loads((folder / "config.json").read_text())
        write_repaired(folder, raw, found.edits, tmp_path / "repaired")
        written = json.loads((tmp_path / "repaired" / "config.json").read_text())
        right = json.loads((case.drafter / "config.json").read_text())
        if case.diagnosis == "embedding-scale":  # written out, where the shipped one says nothing
            places = written, written["dflash_config"]
            assert [place.pop("input_embedding_scale") for place in places] == [1.0, 1.0]
        if "is_neox_style" not in str(found.edits) and case.diagnosis != "block-length":
            assert written == right
    if case.template is not None:
        assert found.repaired is not None
        assert found.repaired.tau > 1.3
        return
    assert found.served is not None
    assert found.served.tau < 2.5  # what is broken is not better than what is shipped
    drawn, shifted = found.controls
    assert drawn.tau < 1.05
    assert len(shifted.by_position) == 3


@pytest.mark.parametrize("folder", [SHIPPED, pytest.param(BIDIRECTIONAL, marks=pytest.mark.slow)])
def test_shipped_drafter_is_healthy(folder, smollm2, source):
    found = examine(folder, smollm2, source)
    assert found.name == "healthy", verdict(found)
    assert found.served is not None
    assert found.served.interval is not None
    low, high = found.served.interval
    assert 1.1 < low < found.served.tau < high
    assert found.sentence == f"healthy: tau {found.served.tau:.2f} ({low:.2f} to {high:.2f}) at K = 7."
    drawn, shifted = found.controls
    assert drawn.tau < 1.05 < shifted.tau < found.served.tau
    assert len(found.served.by_position) == 7
    assert found.served.tau == pytest.approx(1 + sum(found.served.by_position))
    # Late slots are hardly ever accepted: worth knowing, but nothing wrong.
    assert [(finding.name, finding.level) for finding in found.findings] == [("K", "warning")]
    kinds = {trial.name for trial in found.trials}
    assert kinds >= {"target-layers", "feature-order", "anchor", "causality", "rope", "mask-token"}
    assert not any(t.confirmed and t.confirmed.nats >= MIN_GAIN and t.confirmed.t >= MIN_T for t in found.trials)


@pytest.mark.slow
@pytest.mark.case("F44b")
def test_wrong_thinking_mode(smollm2, source):
    """Of the answers in one mode the drafter sees features of other rows, as if it had learnt the other mode only."""
    right = source.get(Rendering())
    wrong = replace(right, row=replace(right.row, features=right.row.features.roll(2, 0)))
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    both = ProbeSource(source.target, tokenizer, source.asked, source.max_tokens)
    both._made |= {Rendering(thinking=True): wrong, Rendering(thinking=False): right}
    found = examine(SHIPPED, smollm2, both, "--thinking", "on")
    assert found.name == "thinking", verdict(found)
    assert "enable_thinking=False" in found.repair
    assert examine(SHIPPED, smollm2, both, "--thinking", "off").is_healthy


@pytest.mark.slow
@pytest.mark.case("F44b")
def test_command_on_the_shipped_drafter(smollm2, tmp_path, capsys):
    """With its defaults, from loading to the report."""
    file = tmp_path / "found.json"
    assert main(["doctor", "--draft", str(SHIPPED), "--json", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = json.loads(file.read_text())
    assert found["healthy"]
    assert found["circumstances"]["target"] == str(smollm2)
    assert found["verdict"] in said
    assert "8 of built-in questions, 48 tokens each at most" in said


@pytest.mark.slow
@pytest.mark.case("F7", "F29")
@pytest.mark.parametrize("name", SUBTLE)
def test_what_costs_a_few_percent_shows_on_more_answers(name, smollm2, more_answers, tmp_path):
    case = SUBTLE[name]
    folder = write_broken(tmp_path / "broken", case, more_answers.get(Rendering()))
    found = examine(folder, smollm2, more_answers)
    assert found.name == case.diagnosis, verdict(found)
    assert case.repair in found.repair


@pytest.mark.slow
def test_shipped_drafter_is_healthy_on_more_answers(smollm2, more_answers):
    found = examine(SHIPPED, smollm2, more_answers)
    assert found.name == "healthy", verdict(found)
