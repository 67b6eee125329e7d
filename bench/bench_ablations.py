"""What each choice of the trainer is worth: one small budget for each variant, tau on held-out answers by the walk.

    python bench/bench_ablations.py --target T --data answers.jsonl --features cache [--only NAME ...] [--seeds 0 1 2]

All variants see the same examples in the same order for the same number of steps, on features that are extracted once.
Differences of a few hundredths are noise: compare with the spread over seeds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from setting import append_csv, circumstances

#: Variant -> changes to the baseline.
VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "uniform anchors": {"anchors": "uniform"},
    "input injection": {"injection": "input"},
    "no target features": {"target_features": False},
    "autoregressive": {"drafting": "autoregressive", "in_block_attention": "causal"},
    "weights uniform": {"loss_weight": "uniform"},
    "weights D-PACE": {"loss_weight": "dpace"},
    "causal": {"in_block_attention": "causal"},
    "causal, truncated blocks": {"in_block_attention": "causal", "truncate_blocks": True},
    "1 layer": {"num_layers": 1},
    "3 layers": {"num_layers": 3},
    "random initialisation": {"initialisation": "random", "fc_initialisation": "random"},
    "scaled fusion": {"fc_initialisation": "scaled"},
    "soft labels": {"soft_labels": 16},
    "batch negatives": {"loss_negatives": 1024},
    "muon": {"optimizer": "muon", "lr": 1e-3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--eval-data", nargs="+", required=True)
    parser.add_argument("--eval-examples", type=int, default=16)
    parser.add_argument("--features", required=True)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--draft-block-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-anchors", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    for name in options.only:
        rows = [run_variant(name, seed, options) | circumstances() for seed in options.seeds]
        append_csv("training", rows)


def run_variant(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one variant."""
    import torch

    from vllm_dflash.training.metrics import read_metrics
    from vllm_dflash.training.settings import TrainSettings
    from vllm_dflash.training.setup import prepare_run
    from vllm_dflash.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainSettings(
            target=options.target,
            data=tuple(options.data),
            eval_data=tuple(options.eval_data),
            eval_examples=options.eval_examples,
            features=options.features,
            output=scratch,
            draft_block_size=options.draft_block_size,
            draft_vocab_size=options.draft_vocab_size,
            max_anchors=options.max_anchors,
            batch_size=options.batch_size,
            max_steps=options.steps,
            eval_steps=10**9,
            checkpoint_steps=10**9,
            seed=seed,
            **({"num_layers": 2, "lr": 1.5e-3} | VARIANTS[name]),
        )
        run = prepare_run(settings, torch.device("cpu"))
        trainer = Trainer(run)
        started = time.monotonic()
        trainer.train()
        minutes = (time.monotonic() - started) / 60
        measured = next(row for row in reversed(read_metrics(Path(scratch) / "metrics.jsonl")) if "eval/tau" in row)
    tau, by_slot = measured["eval/tau"], " ".join(f"{p:.3f}" for p in measured["eval/position"])
    print(f"{name:<26} seed {seed}  tau {tau:.3f}  by slot {by_slot}  {minutes:.1f} min", flush=True)
    return {
        "experiment": name,
        "seed": seed,
        "steps": options.steps,
        "anchors_per_step": options.batch_size * options.max_anchors,
        "tau": f"{tau:.4f}",
        "by_slot": by_slot,
        "documents": len(run.held_out),
        "parameters": sum(p.numel() for p in run.drafter.parameters()),
        "minutes": f"{minutes:.2f}",
        "note": "",
    }


if __name__ == "__main__":
    main()
