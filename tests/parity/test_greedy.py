"""Greedy comparison with real engines: equality, ties, bugs, and a run that goes on after an interruption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcess
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_target

from vllm_dflash.cli import main
from vllm_dflash.parity.compare import EPSILON
from vllm_dflash.parity.greedy import Comparison, compare_greedy
from vllm_dflash.parity.prompts import Prompt
from vllm_dflash.parity.runs import Run

PROMPTS = [Prompt("one", (3, 5, 7)), Prompt("two", (11, 2, 90, 41, 8)), Prompt("three", tuple(range(20, 60)))]

#: The two tokens whose rows in the head of `target_with_twins` are the same.
TWINS = (40, 41)


@pytest.fixture
def in_process(engine) -> InProcess:
    return InProcess(engine)


@pytest.fixture(scope="session")
def target_with_twins(tmp_path_factory) -> Path:
    """A tiny target that finds two tokens exactly equally likely, and often likeliest."""
    folder = write_tiny_target(tmp_path_factory.mktemp("twins") / "target")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[TWINS[0]] *= 2
    head[TWINS[1]] = head[TWINS[0]]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def compare(
    ask: InProcess, target: Path, drafter: Path, drafts: list[int], work: Path, prompts: list[Prompt] = PROMPTS
) -> list[Comparison]:
    sampling = {"temperature": 0, "ignore_eos": True}
    run = Run(str(target), str(drafter), work, prompts, sampling, max_tokens=40, dtype="float32", ask=ask)
    return compare_greedy(run, drafts, None, None)


def replace_token(answers: dict[str, Any], which: str, position: int, change: Callable[[int], int]) -> None:
    token_ids = answers[which]["token_ids"]
    token_ids[position:] = [change(token_ids[position]), *([0] * (len(token_ids) - position - 1))]


@pytest.mark.case("F12")
def test_the_command_finds_no_difference_then_goes_on_and_finds_an_altered_token(
    tmp_path, tiny_target, tiny_drafter, capsys, monkeypatch
):
    """Engines in children, with K = 1 and 4; then one plain answer is lost and another altered by one token."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # compiling the rank of a log-probability takes a child 20 s
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"id": p.id, "prompt_ids": p.token_ids}) for p in PROMPTS))
    report_file, work = tmp_path / "report.json", tmp_path / "work"
    flags = ["--model", tiny_target, "--draft", tiny_drafter, "--prompts", rows, "--work", work, "--json", report_file]
    settings = ["--max-tokens", "40", "--num-speculative-tokens", "1", "4", "--num-prompts", "3", "--ignore-eos"]
    engine = ["--dtype", "float32", "--engine", json.dumps({"num_gpu_blocks_override": 9})]
    arguments = ["parity", *map(str, flags), *settings, *engine]

    assert main(arguments) == 0
    report = json.loads(report_file.read_text())
    assert report["result"] == "no difference but ties"
    assert [one["num_speculative_tokens"] for one in report["runs"]] == [1, 4]
    for one in report["runs"]:
        assert (one["answers"], one["equal"], one["bugs"], one["tokens_compared"]) == (3, 3, 0, 120)
        assert one["drafted"] > 50 * one["num_speculative_tokens"]
        assert one["facts"]["dtype"] == "float32"
    assert {"machine", "versions", "commit", "seed", "command"} <= report.keys()
    assert "no difference but ties" in capsys.readouterr().out

    [plain_file] = work.glob("plain-*.json")
    plain = json.loads(plain_file.read_text())
    del plain["answers"]["0"]
    replace_token(plain["answers"], "2", 7, lambda token: (token + 1) % 128)
    plain_file.write_text(json.dumps(plain))
    written = {file: file.stat().st_mtime_ns for file in work.glob("k*.json")}

    assert main(arguments) == 1
    assert {file: file.stat().st_mtime_ns for file in work.glob("k*.json")} == written
    report = json.loads(report_file.read_text())
    for one in report["runs"]:
        assert (one["equal"], one["ties"], one["bugs"]) == (2, 0, 1)
        [difference] = one["differences"]
        assert (difference["prompt"], difference["position"], difference["label"]) == ("three", 7, "BUG")
        assert len(difference["logprobs"]) == 2  # the best is the token with drafts
        assert max(difference["logprobs"].values()) == difference["logprobs"][str(difference["dflash_token"])]
    assert "BUG, prompt three, token 7" in capsys.readouterr().out


def test_a_verifier_that_accepts_everything_is_a_bug(in_process, tiny_target, tiny_drafter, tmp_path, monkeypatch):
    from vllm.v1.sample import rejection_sampler

    original = rejection_sampler.rejection_sample

    def accept_all(draft_token_ids: Any, num_draft_tokens: list[int], *rest: Any, **named: Any) -> Any:
        output = original(draft_token_ids, num_draft_tokens, *rest, **named)
        first = 0
        for row, count in zip(output, num_draft_tokens):
            row[:count] = draft_token_ids[first : first + count]
            first += count
        return output

    monkeypatch.setattr(rejection_sampler, "rejection_sample", accept_all)
    [comparison] = compare(in_process, tiny_target, tiny_drafter, [4], tmp_path)
    assert comparison.num_bugs == len(PROMPTS)
    assert all(verdict.gap is None or verdict.gap > EPSILON["float32"] for verdict in comparison.verdicts)


@pytest.mark.case("F12")
def test_an_exact_tie_is_a_tie_and_its_neighbour_a_bug(in_process, target_with_twins, tiny_drafter, tmp_path):
    """Rounding decides between twins in another way; what follows differs and is not compared."""
    first, second = TWINS
    places = {}

    def swap_twins(label: str, answers: dict[str, Any]) -> None:
        if label == "without drafts":
            for which, answer in answers.items():
                if first in answer["token_ids"]:
                    places[which] = answer["token_ids"].index(first)
                    replace_token(answers, which, places[which], lambda token: second)

    in_process.alter = swap_twins
    prompts = [Prompt(str(i), (3 + i, 5, 60 + i)) for i in range(8)]
    [comparison] = compare(in_process, target_with_twins, tiny_drafter, [4], tmp_path, prompts)
    assert places
    assert comparison.num_bugs == 0
    assert {v.difference.prompt_id: v.difference.position for v in comparison.verdicts} == places
    for verdict in comparison.verdicts:
        assert verdict.label == "tie within epsilon"
        assert verdict.gap == 0.0
        assert verdict.logprobs[first] == verdict.logprobs[second]
    assert comparison.num_compared == sum(places.get(str(i), 39) + 1 for i in range(8))

    in_process.alter = lambda label, answers: (
        replace_token(answers, "0", 5, lambda token: (token + 1) % 40) if label == "without drafts" else None
    )
    [comparison] = compare(in_process, target_with_twins, tiny_drafter, [4], tmp_path, prompts)
    assert [verdict.label for verdict in comparison.verdicts] == ["BUG"]


def test_logprobs_of_the_runs_are_reported(in_process, tiny_target, tiny_drafter, tmp_path):
    in_process.alter = lambda label, answers: (
        replace_token(answers, "1", 3, second_best(answers["1"])) if label == "with K = 4" else None
    )

    def second_best(answer: dict[str, Any]) -> Callable[[int], int]:
        place = answer["logprobs"][3]
        return lambda token: int(sorted(place, key=lambda t: -place[t])[1])

    sampling = {"temperature": 0, "ignore_eos": True, "logprobs": 5}
    run = Run(
        str(tiny_target), str(tiny_drafter), tmp_path, PROMPTS, sampling, max_tokens=8, dtype="float32", ask=in_process
    )
    [comparison] = compare_greedy(run, [4], None, None)
    [verdict] = comparison.verdicts
    assert verdict.label == "BUG"
    assert verdict.gap is not None
    assert verdict.gap_in_plain_run == pytest.approx(verdict.gap, abs=1e-3)
    assert verdict.gap_in_dflash_run == pytest.approx(-verdict.gap, abs=1e-3)
    assert verdict.gap > EPSILON["float32"]


def test_drafters_block_bounds_k(tiny_target, tiny_drafter):
    from vllm_dflash.parity.command import usable_drafts

    drafts, [note] = usable_drafts(str(tiny_target), str(tiny_drafter), [3, 7, 15])
    assert drafts == [3, 7]
    assert "Using 7. That run is the one of K = 7." in note
    drafts, [note] = usable_drafts(str(tiny_target), str(tiny_drafter), [15])
    assert drafts == [7]


def test_a_causal_drafter_may_be_given_a_longer_block(tiny_target, tiny_drafter, tmp_path):
    """To try K = 15 with a drafter of block 8: slots beyond the trained block spoil no others where all are causal."""
    from vllm_dflash.parity.command import usable_drafts

    longer = shutil.copytree(tiny_drafter, tmp_path / "longer")
    config = json.loads((tiny_drafter / "config.json").read_text())
    config["block_size"] = 16
    config["dflash_config"]["causal"] = True
    (longer / "config.json").write_text(json.dumps(config))
    assert usable_drafts(str(tiny_target), str(longer), [1, 3, 7, 15]) == ([1, 3, 7, 15], [])


def test_answers_of_other_settings_are_not_taken(tmp_path, tiny_target, tiny_drafter):
    def run(**changes: Any) -> Run:
        settings: dict[str, Any] = {"sampling": {"temperature": 0}, "max_tokens": 8, "dtype": "float32"} | changes
        prompts = settings.pop("prompts", PROMPTS)
        return Run(str(tiny_target), str(tiny_drafter), tmp_path, prompts, **settings)

    same = run()
    assert same.key(None) == run(draft_length="auto").key(None)  # plain answers know no drafts
    assert same.key(4) != run(draft_length="auto").key(4)
    assert same.key(4) != same.key(5)
    for changes in ({"dtype": "bfloat16"}, {"max_tokens": 9}, {"prompts": PROMPTS[:2]}, {"seed": 1}):
        assert same.key(None) != run(**changes).key(None)
        assert same.key(4) != run(**changes).key(4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "0.5"], "--temperature: greedy answers have no such parameters"),
        (["--sampling", "--num-positions", "1"], "--num-positions 1 leaves only the token"),
        (["--sampling", "--temperature", "0"], "--temperature 0 draws nothing"),
        (["--json", "/nowhere/report.json"], "its folder does not exist"),
    ],
)
def test_flags_that_mean_nothing_are_refused_before_anything_is_loaded(flags, message, capsys, tmp_path):
    assert main(["parity", "--model", str(tmp_path), "--draft", str(tmp_path), *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_drafter_of_another_target_is_refused_before_anything_is_loaded(capsys, smollm2, tiny_drafter):
    assert main(["parity", "--model", str(smollm2), "--draft", str(tiny_drafter)]) == 1
    assert "use a drafter trained for this target" in capsys.readouterr().err
