"""Drawn tokens with drafts against the target's distribution, with real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcess
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_drafter, write_tiny_target

from vllm_dflash.cli import main
from vllm_dflash.parity.fit import SMALLEST_P, Fit
from vllm_dflash.parity.oracle import Sampling
from vllm_dflash.parity.prompts import Prompt
from vllm_dflash.parity.runs import Run
from vllm_dflash.parity.sampling import check_samples, compare_samples, sample_requests
from vllm_dflash.parity.target_logits import TargetLogits

VOCAB = 48
PROMPTS = [Prompt("one", (3, 5, 7)), Prompt("two", (11, 2, 40, 41, 8))]
NUM_SAMPLES, NUM_POSITIONS, K = 400, 4, 4

CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "both": {"top_k": 8, "top_p": 0.95},
}
GRID = {
    f"T {temperature}, {name}": Sampling(temperature=temperature, **cuts)
    for temperature in (0.3, 1.0)
    for name, cuts in CUTS.items()
}
OTHERS = {
    "penalties": Sampling(presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3),
    "min_p": Sampling(min_p=0.1),
    "logit_bias": Sampling(logit_bias={5: 3.0, 9: -4.0}),
    "all": Sampling(
        0.8, 12, 0.9, 0.02, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={5: 2.0}
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A target whose embeddings share a large part, so that text matters little and a random drafter is often right."""
    folder = write_tiny_target(tmp_path_factory.mktemp("likely") / "target", vocab_size=VOCAB)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    shared = 40 * torch.randn(tensors["model.embed_tokens.weight"].shape[1], generator=generator)
    tensors["model.embed_tokens.weight"] += shared
    tensors["lm_head.weight"] *= 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    return write_tiny_drafter(tmp_path_factory.mktemp("likely") / "drafter", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def logits_of(target) -> TargetLogits:
    return TargetLogits(str(target))


def run_of(target: Path, drafter: Path, work: Path, ask: Any, sampling: Sampling) -> Run:
    return Run(
        str(target),
        str(drafter),
        work,
        PROMPTS,
        sampling.to_dict() | {"ignore_eos": True},
        max_tokens=NUM_POSITIONS,
        dtype="float32",
        max_num_seqs=64,
        ask=ask,
    )


@pytest.mark.parametrize("name", [*GRID, *OTHERS])
@pytest.mark.case("F13")
@pytest.mark.feature("temperature", "chi-square of drawn tokens against the exact distribution")
@pytest.mark.feature("top_k", "chi-square of drawn tokens, at two temperatures, with top_p and without")
@pytest.mark.feature("top_p", "chi-square of drawn tokens, at two temperatures, with top_k and without")
@pytest.mark.feature("min_p", "chi-square of drawn tokens against the exact distribution")
@pytest.mark.feature("logit_bias", "chi-square of drawn tokens against the exact distribution")
@pytest.mark.feature("presence_penalty", "chi-square of drawn tokens, each row with its own history")
@pytest.mark.feature("frequency_penalty", "chi-square of drawn tokens, each row with its own history")
@pytest.mark.feature("repetition_penalty", "chi-square of drawn tokens, each row with its own history")
def test_drawn_tokens_fit(name, engine, target, drafter, logits_of, tmp_path):
    sampling = (GRID | OTHERS)[name]
    run = run_of(target, drafter, tmp_path, InProcess(engine), sampling)
    [drawn] = compare_samples(run, [K], NUM_SAMPLES, NUM_POSITIONS, sampling, lambda: logits_of)
    assert drawn.fit.p_value > 1e-3, drawn.fit
    assert not drawn.is_bug
    assert not drawn.fit.impossible
    assert drawn.fit.num_tested > 500
    assert drawn.num_accepted > 50  # else only the rejected side was tested


@pytest.fixture(scope="module")
def draws_at_one(engine, target, drafter, tmp_path_factory) -> dict[str, Any]:
    """Answers at temperature 1, without cuts."""
    run = run_of(target, drafter, tmp_path_factory.mktemp("draws"), InProcess(engine), Sampling())
    answers: dict[str, Any] = run.answers(K, sample_requests(PROMPTS, NUM_SAMPLES))["answers"]
    return answers


def test_a_wrong_temperature_is_a_bug(draws_at_one, logits_of):
    assert check_samples(PROMPTS, draws_at_one, NUM_POSITIONS, Sampling(), logits_of.after).p_value > 1e-3
    for temperature in (0.7, 1.4):
        wrong = Sampling(temperature=temperature)
        assert check_samples(PROMPTS, draws_at_one, NUM_POSITIONS, wrong, logits_of.after).p_value < SMALLEST_P


def test_a_cut_that_is_not_made_is_a_bug(draws_at_one, logits_of):
    fit = check_samples(PROMPTS, draws_at_one, NUM_POSITIONS, Sampling(top_k=5), logits_of.after)
    assert fit.impossible
    assert fit.p_value == 0.0


def test_a_verifier_that_accepts_too_often_is_a_bug(engine, target, drafter, logits_of, tmp_path, monkeypatch):
    """A draft accepted with probability 1 - (1 - p) ** 2 in place of p, in the drawn part of the rejection sampler."""
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.generate_uniform_probs
    monkeypatch.setattr(
        rejection_sampler,
        "generate_uniform_probs",
        lambda *args, **named: torch.minimum(original(*args, **named), original(*args, **named)),
    )
    run = run_of(target, drafter, tmp_path, InProcess(engine), Sampling())
    [drawn] = compare_samples(run, [K], NUM_SAMPLES, NUM_POSITIONS, Sampling(), lambda: logits_of)
    assert drawn.is_bug


def test_logits_with_a_cache_are_those_of_whole_texts(target, logits_of):
    prefixes = [(7,), (7, 9), (7, 9, 11), (8, 3), (12, 5, 6)]
    prompt = [3, 5, 7, 20]
    found = dict(logits_of.after(prompt, prefixes))
    assert set(found) == set(prefixes)
    for prefix, logits in found.items():
        with torch.inference_mode():
            whole = logits_of._model(torch.tensor([[*prompt, *prefix]])).logits[0, -1].double().numpy()
        assert abs(logits - whole).max() < 1e-4


def test_a_prefix_begins_with_the_first_token_which_is_no_evidence():
    asked = []

    def logits_after(prompt_ids: Any, prefixes: Any) -> Any:
        asked.extend(prefixes)
        return []

    answers = {"0:0": {"token_ids": [4, 5, 6, 7, 8]}, "0:1": {"token_ids": [4, 9]}, "0:2": {"token_ids": [6]}}
    assert isinstance(check_samples(PROMPTS, answers, 4, Sampling(), logits_after), Fit)
    assert asked == [(4,), (4, 5), (4, 5, 6)]


def test_the_command_reports_a_fit(target, drafter, tmp_path, capsys):
    """With an engine in a child."""
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"id": p.id, "prompt_ids": p.token_ids}) for p in PROMPTS))
    report_file = tmp_path / "report.json"
    files = ["--model", target, "--draft", drafter, "--prompts", rows, "--json", report_file]
    engine = ["--dtype", "float32", "--engine", json.dumps({"num_gpu_blocks_override": 70})]
    flags = ["--sampling", "--ignore-eos", "--num-samples", "300", "--temperature", "0.9", "--logit-bias", '{"5": 2.0}']
    assert main(["parity", *map(str, files), *engine, *flags]) == 0
    report = json.loads(report_file.read_text())
    [one] = report["runs"]
    assert one["num_speculative_tokens"] == 3
    assert one["tested"] > 500
    assert one["accepted"] > 20
    assert report["sampling"]["logit_bias"] == {"5": 2.0}
    shown = capsys.readouterr().out
    assert "drawn as the target would draw" in shown
    assert "is no evidence" in " ".join(shown.split())
