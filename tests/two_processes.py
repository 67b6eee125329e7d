"""Run by torchrun in each of two processes: train with DDP, then go on from its step 2 with FSDP2.

python -m torch.distributed.run --nproc-per-node 2 tests/two_processes.py ddp.yaml fsdp.yaml
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule


def main(ddp: str, fsdp: str) -> None:
    """Train by the two files of settings."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    from vllm_dflash import cli
    from vllm_dflash.training.settings import TrainSettings, read_yaml
    from vllm_dflash.training.setup import prepare_run
    from vllm_dflash.training.trainer import Trainer

    assert cli.main(["train", "--config", ddp]) == 0
    process = PartialState()
    settings = TrainSettings(**read_yaml(Path(fsdp)))
    if process.is_main_process:
        name = "step-00000002"
        shutil.copytree(Path(read_yaml(Path(ddp))["output"]) / name, Path(settings.output) / name)
    process.wait_for_everyone()
    # accelerate offers FSDP to accelerators only; torch has it for a CPU as well.
    AcceleratorState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "DrafterLayer"}
    trainer = Trainer(prepare_run(settings, torch.device("cpu")))
    assert isinstance(trainer.drafter.layers[0], FSDPModule)
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
