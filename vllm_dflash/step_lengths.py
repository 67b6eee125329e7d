"""One draft length per step, decided beside vLLM's scheduler: for the V2 runner and for asynchronous scheduling.

There the scheduler says how many tokens a step drafts before the step is run, the same for all of its requests, and
asks a table from batch size to K (`num_speculative_tokens_per_batch_size`). In place of that table it asks StepLengths:

    schedule             lengths[number of requests]       the controller's choice
    update_from_output   lengths.finish(...)               what became of drafts; the time since the last step

In the V2 runner a table is also what makes it capture CUDA graphs for several lengths, so one is put into the config
that lists them all. Engines whose user gave such a table, or another way to adapt, keep it.

A seed gives the same text only if lengths do not follow time: which random number decides on a token, and how, depends
on whether it was drafted. So K does not change while a sampled request with a seed is running. (The V2 runner draws by
position, but tests a drafted token against its number and draws an undrafted one with it.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from vllm_dflash import LOGGER
from vllm_dflash.draft_length import (
    CostModel,
    CounterReports,
    DraftCounters,
    DraftRows,
    StepLengthController,
    StepLengthSettings,
    StepSize,
    TimedStep,
    ladder_of,
)
from vllm_dflash.metrics import DraftMetrics
from vllm_dflash.options import DFlashOptions
from vllm_dflash.rebinding import MARK
from vllm_dflash.requests import draft_limit

#: On a speculative config: its table of draft lengths is ours, and lists these.
LADDER = "_vllm_dflash_ladder"
#: On a scheduler: it cuts drafts of requests that want fewer, because the proposer cannot.
_LIMITS = "_vllm_dflash_limits"


def why_fixed(vllm_config: Any) -> str | None:
    """Why draft lengths are not ours to decide in this engine; None if they are."""
    speculative_config = vllm_config.speculative_config
    if DFlashOptions.from_additional_config(vllm_config.additional_config).draft_length == "fixed":
        return 'as additional_config["dflash"]["draft_length"] says'
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "data-parallel ranks pass through experts together, and each would decide for itself"
    if vllm_config.model_config.is_hybrid:
        return "the target's recurrent layers are verified with whole blocks"
    if speculative_config.uses_dynamic_speculative_decoding() and not hasattr(speculative_config, LADDER):
        return "num_speculative_tokens_per_batch_size gives the lengths"
    if speculative_config.enable_adaptive_verification:
        return "enable_adaptive_verification decides how many tokens are verified"
    return None


def is_per_step(vllm_config: Any) -> bool:
    """Does the scheduler set the length of a step, rather than take what the proposer returns?"""
    return vllm_config.use_v2_model_runner or bool(vllm_config.scheduler_config.async_scheduling)


def list_lengths(vllm_config: Any) -> None:
    """Put a table into the config that makes the V2 runner capture CUDA graphs for every length of the ladder."""
    speculative_config = vllm_config.speculative_config
    if not vllm_config.use_v2_model_runner or hasattr(speculative_config, LADDER) or why_fixed(vllm_config) is not None:
        return
    most_requests = vllm_config.scheduler_config.max_num_seqs
    ladder = ladder_of(speculative_config.num_speculative_tokens, max(most_requests, 2))
    # K last: it is captured up to the largest batch. A table for one request has room for one length; steps without
    # drafts then use piecewise graphs.
    table = [(n, n, length) for n, length in enumerate(ladder[:-1], 1)] if most_requests > 1 else []
    table.append((len(table) + 1, max(most_requests, len(table) + 1), ladder[-1]))
    speculative_config.num_speculative_tokens_per_batch_size = table
    setattr(speculative_config, LADDER, ladder)


def install(scheduler: Any) -> None:
    """Have a scheduler, just constructed, ask us; one whose proposer decides gets a constant table.

    The scheduler pads a one-token prompt, or what a prefix-cache hit leaves of one, with drafts of -1, so that a batch
    is uniform. Without asynchronous scheduling nothing replaces them: the rejection sampler would look up a probability
    one before the row, their random numbers change what a seed gives, and their rows of grammar masks are counted. With
    a table of draft lengths it does not pad.
    """
    config = scheduler.vllm_config
    if not getattr(config.speculative_config, MARK, False):
        return
    setattr(scheduler, _LIMITS, is_per_step(config))
    reason = why_fixed(config)
    if reason is None and config.use_v2_model_runner and not hasattr(config.speculative_config, LADDER):
        reason = "CUDA graphs were captured for this length only"  # of several data-parallel engines
    if is_per_step(config) and reason is None:
        scheduler.dynamic_sd_lookup = _step_lengths(scheduler)
        ladder = ", ".join(map(str, scheduler.dynamic_sd_lookup.ladder))
        _logger().info("draft length: decided in every step for all of its requests, one of %s tokens.", ladder)
        return
    if is_per_step(config) and not config.speculative_config.uses_dynamic_speculative_decoding():
        _logger().info("draft length: always %d tokens (%s).", scheduler.num_spec_tokens, reason)
    if scheduler.dynamic_sd_lookup is None and not scheduler.scheduler_config.async_scheduling:
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (scheduler.scheduler_config.max_num_seqs + 1)


def limit_drafts(scheduler: Any) -> None:
    """Before a step is scheduled, cut the drafts of requests that want fewer, where the proposer cannot."""
    if not getattr(scheduler, _LIMITS, False):
        return
    for request in scheduler.running:
        parameters = request.sampling_params
        if request.spec_token_ids and parameters is not None and parameters.extra_args:
            limit = draft_limit(parameters.extra_args)
            if limit is not None:
                request.spec_token_ids = request.spec_token_ids[:limit]


class Chooser(Protocol):
    """Decides: StepLengthController, or ScheduledStepLengths for lengths that are given."""

    counters: DraftCounters

    def choose(self, request_ids: Sequence[str], context_lens: np.ndarray, caps: np.ndarray) -> int: ...
    def observe(
        self, request_ids: Sequence[str], verified: np.ndarray, accepted: np.ndarray, step: TimedStep | None
    ) -> None: ...
    def forget(self, request_ids: Iterable[str]) -> None: ...


class StepLengths:
    """What the scheduler asks for the draft length of a step, in place of a table from batch size to K.

    Args:
        scheduler: vLLM's.
        chooser: decides.
        ladder: lengths that there are.
        draft_rows: rows of a draft pass.
        drafts_behind: results of a step arrive before its draft pass is over, which is thus in the next step's time.
        log: gets a line now and then.
        count: gets the counters now and then.
    """

    def __init__(
        self,
        scheduler: Any,
        chooser: Chooser,
        ladder: Sequence[int],
        draft_rows: DraftRows,
        drafts_behind: bool = False,
        log: Callable[[str], None] | None = None,
        count: Callable[[DraftCounters], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler, self.chooser, self.ladder, self._rows = scheduler, chooser, tuple(ladder), draft_rows
        self._drafts_behind, self._clock = drafts_behind, clock
        self._last_ids: frozenset[str] = frozenset()
        self._last_end = 0.0
        self._last_drafts = (0, 0, 0)  # length, requests and their context tokens of the last draft pass
        self._reports = CounterReports(clock(), log, count)

    def __getitem__(self, num_requests: int) -> int:
        """Length of the drafts made at the end of the step that is being scheduled."""
        running = self._scheduler.running
        parameters = [request.sampling_params for request in running]
        if any(p is not None and p.seed is not None and p.temperature > 0 for p in parameters):
            return self.ladder[-1]
        most = self.ladder[-1]
        limits = [draft_limit(p.extra_args) if p is not None and p.extra_args else None for p in parameters]
        return self.chooser.choose(
            [request.request_id for request in running],
            np.array([request.num_computed_tokens for request in running], dtype=np.int64),
            np.array([most if limit is None else min(limit, most) for limit in limits], dtype=np.int64),
        )

    def finish(self, scheduler_output: Any, runner_output: Any) -> None:
        """Learn from a step whose results have arrived, before the scheduler takes them in."""
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return
        now = self._clock()
        known = self._scheduler.requests
        contexts = {i: known[i].num_computed_tokens if i in known else 0 for i in scheduled}
        context_tokens = sum(contexts.values())
        length = scheduler_output.num_spec_tokens_to_schedule
        drafts = (length, len(scheduled) if length else 0, context_tokens if length else 0)
        step = None
        if not self._last_ids.isdisjoint(scheduled):  # otherwise the engine may have been idle
            size = self._size(scheduler_output, contexts, self._last_drafts if self._drafts_behind else drafts)
            step = TimedStep(size, now - self._last_end)
        self.chooser.observe(*_outcomes(scheduler_output, runner_output), step)
        self.chooser.forget(scheduler_output.finished_req_ids)
        self._last_ids, self._last_end, self._last_drafts = frozenset(scheduled), now, drafts
        self._reports.report(now, self.chooser.counters)

    def _size(self, scheduler_output: Any, contexts: dict[str, int], drafts: tuple[int, int, int]) -> StepSize:
        scheduled, num_tokens = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        length, num_drafting, draft_context = drafts
        return StepSize(
            num_requests=len(scheduled),
            num_tokens=num_tokens,
            num_verified=sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values())),
            context_tokens=sum(contexts.values()),
            attended_tokens=sum(rows * contexts[i] for i, rows in scheduled.items()),
            num_drafting=num_drafting,
            query_rows=num_drafting * self._rows.query_rows(length),
            head_rows=num_drafting * self._rows.head_rows(length),
            draft_context_tokens=draft_context,
            context_rows=num_tokens,
        )


def _outcomes(scheduler_output: Any, runner_output: Any) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Requests [D] whose drafts a step verified, verified tokens [D] and accepted tokens [D]."""
    sampled, index = runner_output.sampled_token_ids, runner_output.req_id_to_index
    invalid = scheduler_output.num_invalid_spec_tokens or {}  # by a grammar; nobody verified them
    ids, verified, accepted = [], [], []
    for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
        num_sampled = len(sampled[index[request_id]]) if sampled else 0
        if num_sampled:
            num_verified = len(drafts) - invalid.get(request_id, 0)
            ids.append(request_id)
            verified.append(num_verified)
            accepted.append(min(num_sampled - 1, num_verified))
    return ids, np.array(verified, dtype=np.int64), np.array(accepted, dtype=np.int64)


def _step_lengths(scheduler: Any) -> StepLengths:
    config = scheduler.vllm_config
    speculative_config = config.speculative_config
    is_v2, is_cpu = config.use_v2_model_runner, config.device_config.device_type == "cpu"
    ladder = getattr(speculative_config, LADDER, None) or ladder_of(scheduler.num_spec_tokens)
    hf_config = speculative_config.draft_model_config.hf_config
    # vLLM's speculator drafts whole blocks; our proposer leaves out what it can.
    is_whole_block = is_v2 or not hf_config.dflash_config.get("causal", False)
    draft_rows = DraftRows(ladder[-1], is_whole_block, has_whole_head=is_v2)
    controller = StepLengthController(
        ladder,
        CostModel.unprofiled(is_flat=not is_cpu),
        getattr(hf_config, "acceptance_rates", None),
        draft_rows,
        StepLengthSettings(max_requests=max(StepLengthSettings.max_requests, 2 * config.scheduler_config.max_num_seqs)),
    )
    return StepLengths(
        scheduler,
        controller,
        ladder,
        draft_rows,
        drafts_behind=is_v2 and not is_cpu,
        log=_logger().info,
        count=DraftMetrics().update,
    )


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger(LOGGER)
