"""The whole way of a drafter, by the commands: prepare, train, export, eval; vLLM then serves what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Result
from test_reference import TIE
from tiny_training import MASK_TOKEN, write_tiny_task
from transformers import AutoModelForCausalLM

from vllm_dflash.cli import main
from vllm_dflash.reference import features_and_logits
from vllm_dflash.training.blocks import PackedRow, make_blocks
from vllm_dflash.training.drafting import propose
from vllm_dflash.training.model import Drafter
from vllm_dflash.training.pretrained import import_drafter
from vllm_dflash.training.step import TargetTables, tables_of
from vllm_dflash.training.trainer import load_tensors
from vllm_dflash.training.vocabulary import from_d2t

BLOCK, VOCABULARY = 6, 48  # of 64 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds target, data.jsonl, prepared.jsonl.xz, the trainer's run, and its export as z-lab and speculators."""
    folder = tmp_path_factory.mktemp("way")
    task = write_tiny_task(folder, num_examples=24)
    target, prepared = ["--target", str(task.target)], str(folder / "prepared.jsonl.xz")
    assert main(["prepare", *target, "--data", str(task.data), "--output", prepared, "--cut-loops"]) == 0
    flags = {
        "num-layers": 2, "draft-block-size": BLOCK, "target-layer-ids": "0 2", "mask-token-id": MASK_TOKEN,
        "draft-vocab-size": VOCABULARY, "max-steps": 40, "batch-size": 8, "lr": 3e-3, "eval-steps": 40,
        "checkpoint-steps": 40, "eval-examples": 4,
    }  # fmt: skip
    settings = [word for flag, value in flags.items() for word in (f"--{flag}", *str(value).split())]
    assert main(["train", *target, "--data", prepared, "--output", str(folder / "run"), *settings]) == 0
    for dialect in ("z-lab", "speculators"):
        exported = ["--output", str(folder / dialect), "--format", dialect, "--dtype", "float32"]
        assert main(["export", "--checkpoint", str(folder / "run" / "best"), *exported]) == 0
    return folder


def test_eval_finds_the_same_in_both_formats_and_in_the_checkpoint(folder):
    """On all answers, most of which it was trained on: it must have learnt something."""
    drafters = {"run/best": "trained", "z-lab": "z-lab", "speculators": "speculators"}
    results = {}
    for drafter, name in drafters.items():
        output = folder / f"{name}.json"
        given = ["--drafter", str(folder / drafter), "--target", str(folder / "target")]
        data = str(folder / "prepared.jsonl.xz")
        assert main(["eval", *given, "--data", data, "--output", str(output)]) == 0
        results[name] = json.loads(output.read_text())["tasks"]
    assert results["z-lab"] == results["speculators"] == results["trained"]
    [task] = results["trained"]
    assert task["n"] == 24
    assert task["tau"] > 1.5


@pytest.mark.case("F44")
def test_vllm_drafts_what_the_trained_drafter_proposes(engine, folder):
    """In every cycle; started with nothing but the speculators folder, which names the target and K."""
    served = engine(folder / "speculators")
    assert type(served.runner.drafter.model).__module__ == "vllm_dflash.drafter"
    lines = (folder / "data.jsonl").read_text().splitlines()[:6]
    results = served.generate([json.loads(line)["prompt_ids"] for line in lines], max_tokens=20)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    drafter, tables = trained_drafter(folder / "run" / "best", target)
    num_drafts = 0
    for result in results:
        expected, gaps, drafts = proposals(result, target, drafter, tables)
        different = expected != drafts
        assert not bool((different & (gaps > TIE)).any())
        assert float(different.float().mean()) < 0.01
        num_drafts += len(drafts)
    assert num_drafts > 30
    assert sum(result.num_accepted for result in results) > num_drafts // 6  # a drafter that knows nothing: one of 64


def trained_drafter(checkpoint: Path, target: Any) -> tuple[Drafter, TargetTables]:
    config, tensors = import_drafter(checkpoint)
    drafter = Drafter(config).eval()
    load_tensors(drafter, tensors)
    return drafter, tables_of(target, from_d2t(tensors["d2t"]))


@torch.inference_mode()
def proposals(
    result: Result, target: Any, drafter: Drafter, tables: TargetTables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the trained drafter: proposed tokens, and by how much their logits exceed the served ones'; the served tokens.

    Each [cycles, K].
    """
    tokens = result.prompt_ids + result.token_ids
    served = [draft for draft in result.drafts if draft.tokens and draft.anchor_position < len(tokens)]
    features, _ = features_and_logits(target, tokens, drafter.config)
    length = len(tokens)
    row = PackedRow(
        input_ids=torch.tensor(tokens),
        loss_mask=torch.ones(length, dtype=torch.bool),
        document=torch.zeros(length, dtype=torch.int64),
        position=torch.arange(length),
        features=features,
        top_ids=None,
        top_logprobs=None,
    )
    blocks = make_blocks(row, torch.tensor([draft.anchor_position for draft in served]), BLOCK)
    drafts = torch.tensor([draft.tokens for draft in served])
    logits = drafter(row, blocks, tables.embedding) @ tables.head.T
    chosen = logits.gather(-1, tables.column[drafts][..., None])[..., 0]
    return propose(drafter, row, blocks, tables, "sdpa"), logits.max(-1).values - chosen, drafts
