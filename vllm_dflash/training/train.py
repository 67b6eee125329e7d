"""`vllm-dflash train`: from a target and its answers to a drafter that vLLM serves."""

from __future__ import annotations

import argparse
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

    process = PartialState()
    device = process.device if torch.cuda.is_available() else torch.device("cpu")
    # One process extracts features, the others then find them cached.
    with process.main_process_first():
        run = prepare_run(settings, device)
    trainer = Trainer(run)
    state = trainer.train()
    folder = Path(settings.output)
    if process.is_main_process:
        plot_metrics(folder)
        print(f"{state.step} steps, {state.minutes:.1f} minutes; best tau {state.best_tau:.3f} in '{folder / 'best'}'")
    return folder / "best"
