"""A tiny target with a tokenizer, its own greedy answers as data, and runs on them that take a second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chat import tiny_tokenizer
from tiny_models import write_tiny_target

from vllm_dflash.training.checkpoint import load_last
from vllm_dflash.training.metrics import read_metrics
from vllm_dflash.training.settings import TrainSettings
from vllm_dflash.training.setup import prepare_run
from vllm_dflash.training.tally import Tally
from vllm_dflash.training.trainer import Trainer

#: Tokens that no answer contains: end of turn and <unk> of the tiny tokenizer.
END_TOKEN, MASK_TOKEN = 1, 2


@dataclass(frozen=True)
class TinyTask:
    """A target and answers of its own, on disk."""

    target: Path
    data: Path

    def settings(self, output: Path, **changes: Any) -> TrainSettings:
        """Settings of a short run; `changes` replace them."""
        values: dict[str, Any] = {
            "target": str(self.target),
            "data": (str(self.data),),
            "output": str(output),
            "eval_examples": 4,
            "num_layers": 1,
            "draft_block_size": 4,
            "target_layer_ids": (0, 2),
            "mask_token_id": MASK_TOKEN,
            "max_steps": 4,
            "batch_size": 2,
            "log_steps": 1,
            "eval_steps": 2,
            "checkpoint_steps": 2,
        }
        return TrainSettings(**values | changes)


def write_tiny_task(folder: Path, num_examples: int = 32, response_len: int = 20, seed: int = 0) -> TinyTask:
    """A Qwen3 target of 4 layers and 64 tokens, and its greedy answers to random tokens."""
    target = write_tiny_target(folder / "target", vocab_size=64, seed=seed)
    tiny_tokenizer().save_pretrained(target)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 64, (num_examples, 6), generator=generator)
    rows = [
        {"id": f"row-{i}", "prompt_ids": ids[:6].tolist(), "response_ids": ids[6:].tolist()}
        for i, ids in enumerate(greedy(target, prompts, response_len))
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TinyTask(target, data)


@torch.inference_mode()
def greedy(target: Path, prompts: torch.Tensor, response_len: int) -> torch.Tensor:
    """Prompts [N, P] and the target's greedy answers to them, [N, P + response_len], which do not come to an end."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = prompts
    for _ in range(response_len):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        logits[:, [END_TOKEN, MASK_TOKEN]] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def run(settings: TrainSettings) -> Trainer:
    """Train, in new objects."""
    trainer = Trainer(prepare_run(settings, torch.device("cpu")))
    trainer.train()
    return trainer


def killed_run(settings: TrainSettings, after: int) -> None:
    """Train, in new objects, and be interrupted before step `after` + 1 is made."""

    class MortalTrainer(Trainer):
        def _step(self, tally: Tally) -> None:
            if self.state.step == after:
                raise KeyboardInterrupt
            super()._step(tally)

    trainer = MortalTrainer(prepare_run(settings, torch.device("cpu")))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics without the times."""
    return [{k: v for k, v in row.items() if k != "train/minutes"} for row in read_metrics(folder / "metrics.jsonl")]


def last_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    """Drafter, optimisers and step of the newest checkpoint that can be read."""
    loaded = load_last(folder)
    assert loaded is not None
    return loaded[0], loaded[1], loaded[2].step


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """Equal to the bit, tensors inside dicts and lists included."""
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for index, pair in enumerate(zip(found, wanted)):
            assert_same(*pair, f"{where}/{index}")
    else:
        assert found == wanted, where
