"""Chooses how draft lengths are decided, and profiles what steps cost on this machine, once, at start-up.

A profile takes seconds and is kept in the user's cache by models, machine and versions. It times what a step consists
of with nothing in the KV cache: target pass, context K/V, draft pass, head. Attention over long contexts is learnt
while serving (draft_length/cost.py), as is everything else that differs from the profile.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from vllm_dflash import LOGGER, __version__, step_lengths
from vllm_dflash.atomic import write_atomically
from vllm_dflash.draft_length import (
    CostModel,
    DraftLengthController,
    ScheduledLengths,
    StepSize,
    TimedStep,
    TraceWriter,
)
from vllm_dflash.length_control import LengthControl
from vllm_dflash.metrics import DraftMetrics
from vllm_dflash.options import DFlashOptions
from vllm_dflash.targets import cache_folder

if TYPE_CHECKING:
    from vllm_dflash.proposer import DraftProposer

logger = init_logger(LOGGER)

#: Rows of timed target passes, and requests of timed draft passes.
_TARGET_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_DRAFTING = (1, 2, 4, 8, 16)
_REPEATS = 3


def fixed_lengths(num_speculative_tokens: int) -> LengthControl:
    """Always K tokens, and nothing learnt or recorded."""
    return LengthControl(ScheduledLengths([num_speculative_tokens]), learns=False)


def make_control(proposer: DraftProposer) -> LengthControl:
    """What the options ask for, where the runner allows it."""
    options = DFlashOptions.from_additional_config(proposer.vllm_config.additional_config)
    num_tokens = proposer.num_speculative_tokens
    trace = None
    if options.trace and _is_first_rank():
        trace = TraceWriter(_trace_file(options.trace, proposer), num_tokens, _facts(proposer))
    why_not = _why_fixed(proposer.vllm_config)
    if why_not is not None:
        logger.info("draft length: always %d tokens (%s).", num_tokens, why_not)
        return LengthControl(ScheduledLengths([num_tokens]), learns=trace is not None, trace=trace)
    logger.info("draft length: decided in every step, up to %d tokens.", num_tokens)
    controller = DraftLengthController(
        num_tokens,
        _cost_model(proposer),
        getattr(proposer.draft_model_config.hf_config, "acceptance_rates", None),
        is_causal=proposer.dflash_causal,
    )
    return LengthControl(
        controller,
        learns=True,
        agree=_agreement(proposer),
        trace=trace,
        log=logger.info,
        count=DraftMetrics().update if _is_first_rank() else None,
    )


def _why_fixed(vllm_config: Any) -> str | None:
    reason = step_lengths.why_fixed(vllm_config)
    if reason is None and step_lengths.is_per_step(vllm_config):
        return "or as many as the scheduler asks for, which decides in every step"
    return reason


def _trace_file(path: str, proposer: DraftProposer) -> str:
    """One for each data-parallel rank; in that of a dense target the rank survives as this index only."""
    index = proposer.vllm_config.parallel_config.data_parallel_index
    return path if index == 0 else f"{path}.{index}"


def _is_first_rank() -> bool:
    return get_tp_group().rank_in_group == 0


def _agreement(proposer: DraftProposer) -> Callable[[Any], Any]:
    if proposer.vllm_config.parallel_config.tensor_parallel_size == 1:
        return lambda value: value
    return lambda value: get_tp_group().broadcast_object(value if _is_first_rank() else None, src=0)


def _cost_model(proposer: DraftProposer) -> CostModel:
    """From the cache, or profiled now."""
    facts = json.dumps(_facts(proposer), sort_keys=True)
    file = cache_folder() / "step-costs" / f"{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
    try:
        return CostModel.from_json(file.read_text())
    except (FileNotFoundError, ValueError):
        pass
    started = time.perf_counter()
    cost = CostModel.from_profile(profile(proposer))
    logger.info("draft length: profiled this machine in %.1f s.", time.perf_counter() - started)
    if _is_first_rank():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda temporary: temporary.write_text(cost.to_json()))
    return cost


def _facts(proposer: DraftProposer) -> dict[str, Any]:
    """What a step's cost depends on."""
    import vllm

    config = proposer.vllm_config
    return {
        "target": config.model_config.model,
        "drafter": proposer.draft_model_config.model,
        "dtype": str(config.model_config.dtype),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": torch.get_num_threads(),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "enforce_eager": config.model_config.enforce_eager,
        "num_speculative_tokens": proposer.num_speculative_tokens,
        "versions": [vllm.__version__, torch.__version__, __version__],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


@torch.inference_mode()
def profile(proposer: DraftProposer) -> list[TimedStep]:
    """Timed steps with and without a draft pass, all with an empty cache. Takes some seconds on a CPU."""
    runner, num_tokens = proposer.runner, proposer.num_speculative_tokens
    most_rows = min(runner.max_num_tokens, _TARGET_ROWS[-1])
    most_drafting = min(runner.max_num_reqs, proposer.max_query_tokens // (1 + num_tokens), _DRAFTING[-1])
    target = {n: _seconds(_target_pass, proposer, n) for n in _TARGET_ROWS if n <= most_rows}
    context = {n: _seconds(_context, proposer, n) for n in target}
    steps = [
        TimedStep(
            StepSize(1, n, num_verified=n - 1, context_rows=n),
            seconds=target[n] + context[n],
            draft_seconds=0.0,
            context_seconds=context[n],
        )
        for n in target
    ]
    for n in [n for n in _DRAFTING if n <= most_drafting and n in target]:
        query_rows = n * (1 + num_tokens)
        block = _seconds(_block_pass, proposer, query_rows)
        for positions in sorted({1, num_tokens}):
            head_rows = n * positions
            draft = block + _seconds(_head, proposer, head_rows)
            size = StepSize(n, n, num_drafting=n, query_rows=query_rows, head_rows=head_rows, context_rows=n)
            steps.append(TimedStep(size, target[n] + context[n] + draft, draft, context[n]))
    return steps


def _seconds(run: Callable[[DraftProposer, int], None], proposer: DraftProposer, num_rows: int) -> float:
    """Median time of `run` on so many rows, after one that does not count."""
    times = []
    for _ in range(1 + _REPEATS):
        _wait()
        started = time.perf_counter()
        run(proposer, num_rows)
        _wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _target_pass(proposer: DraftProposer, num_rows: int) -> None:
    runner = proposer.runner
    with set_forward_context(None, proposer.vllm_config, num_tokens=num_rows):
        hidden = runner.model(
            input_ids=torch.zeros(num_rows, dtype=torch.int32, device=proposer.device),
            positions=torch.arange(num_rows, device=proposer.device),
        )
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    runner.model.compute_logits(hidden)


def _block_pass(proposer: DraftProposer, num_rows: int) -> None:
    with set_forward_context(None, proposer.vllm_config, num_tokens=num_rows):
        proposer.model(
            input_ids=torch.zeros(num_rows, dtype=torch.int32, device=proposer.device),
            positions=torch.arange(num_rows, device=proposer.device),
            inputs_embeds=None,
        )


def _context(proposer: DraftProposer, num_rows: int) -> None:
    model = proposer.model
    width = model.model.fc.input_size if model.model.use_aux_hidden_state else proposer.hidden_size
    states = torch.zeros(num_rows, width, dtype=proposer.dtype, device=proposer.device)
    positions = torch.arange(num_rows, device=proposer.device)
    model.precompute_and_store_context_kv(model.combine_hidden_states(states), positions, None)


def _head(proposer: DraftProposer, num_rows: int) -> None:
    hidden = torch.zeros(num_rows, proposer.hidden_size, dtype=proposer.dtype, device=proposer.device)
    proposer.model.confident_tokens(hidden)
