"""Engines in this process, of one target and with or without speculation, alive together."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """An engine: K, None for no speculation, and our settings."""

    num_drafted: int | None
    enabled: bool = True
    draft_length: str = "auto"
    trace: str = ""


def start_engines(kinds: dict[str, Kind], options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """The engines, all of one target and drafter, alive together; `settings` are LLM's."""
    from vllm import LLM

    from vllm_dflash.targets import target_folder

    def start(kind: Kind) -> Any:
        speculative = {"method": "dflash", "model": options.drafter, "num_speculative_tokens": kind.num_drafted}
        ours = {"enabled": kind.enabled, "draft_length": kind.draft_length, "trace": kind.trace}
        arguments = {
            "dtype": options.dtype,
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": max(options.concurrency),
            "enable_prefix_caching": False,
            "speculative_config": speculative if kind.num_drafted else None,
            "additional_config": {"dflash": ours},
            "use_tqdm_on_load": False,
        }
        return LLM(str(target_folder("smollm2")), **arguments | settings)

    return {name: start(kind) for name, kind in kinds.items()}


def runner_of(llm: Any) -> Any:
    """vLLM's model runner, which is in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def flush_trace(llm: Any) -> None:
    """Write the steps that wait to be written."""
    runner_of(llm).drafter.lengths.trace.flush()
