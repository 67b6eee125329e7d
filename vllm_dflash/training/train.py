"""`vllm-dflash train`: from a target and its answers to a drafter that vLLM serves."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

from vllm_dflash.training.settings import TrainSettings, add_arguments, from_arguments

__all__ = ["add_arguments", "run", "train"]


def run(options: argparse.Namespace) -> int:
    """Train by the command line."""
    train(from_arguments(options))
    return 0


def train(settings: TrainSettings) -> Path:
    """Train a drafter; returns the folder of the best checkpoint, which vLLM can serve.

    Raises:
        ValueError: settings, data and target do not fit each other.
        RuntimeError: the disk is full; the last good checkpoint is untouched.
    """
    import torch
    from accelerate import PartialState

    from vllm_dflash.training.report import plot_metrics
    from vllm_dflash.training.setup import prepare_run
    from vllm_dflash.training.trainer import Trainer

    # Without cpu=True accelerate takes processes without a GPU for separate runs, which would overwrite each other.
    # Extraction, which the others wait for, may take longer than the ten minutes after which NCCL gives up.
    process = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=1))
    # One process extracts features, the others then find them cached.
    with process.main_process_first():
        run = prepare_run(settings, process.device)
    trainer = Trainer(run)
    state = trainer.train()
    folder = Path(settings.output)
    if process.is_main_process:
        plot_metrics(folder)
        tau = f"best tau {state.best_tau:.3f}" if run.held_out else "no held-out examples to measure tau on"
        print(f"{state.step} steps, {state.minutes:.1f} minutes; {tau}: '{folder / 'best'}'")
    return folder / "best"
