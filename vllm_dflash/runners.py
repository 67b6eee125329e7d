"""What is rebound in vLLM's runners and workers; plugin.py has the list.

`_then_prepare` and its like stand in place of the function that their docstring names, which is their first argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_dflash.options import DFlashOptions
from vllm_dflash.rebinding import MARK, rebind

ARCHITECTURE = "DFlashDraftModel"
V1_RUNNER_MODULE, V2_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}


def is_served_by_us(vllm_config: Any) -> bool:
    """Is the plugin switched on, and the drafter a plain one? Variants such as Laguna's keep vLLM's proposer."""
    architectures = vllm_config.speculative_config.draft_model_config.architectures
    is_enabled = DFlashOptions.from_additional_config(vllm_config.additional_config).enabled
    return is_enabled and ARCHITECTURE in architectures


def rebind_v1_runner(runner_module: ModuleType) -> None:
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


def rebind_v2_runner(runner_module: ModuleType) -> None:
    """`init_speculator` is a global of the V2 runner's module."""
    rebind(runner_module, "init_speculator", _init_speculator)


def _init_speculator(original: Callable[..., Any], vllm_config: Any, device: Any, *args: Any) -> Any:
    """In place of `init_speculator(vllm_config, device, req_states)`."""
    is_ours = getattr(vllm_config.speculative_config, MARK, False)
    if not is_ours or not is_served_by_us(vllm_config):
        return original(vllm_config, device, *args)
    from vllm_dflash.speculator import make_speculator

    return make_speculator(vllm_config, device)


def rebind_worker(worker_module: ModuleType) -> None:
    worker = getattr(worker_module, WORKERS[worker_module.__name__])
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


def _draft_probs(original: Callable[..., Any], runner: Any, spec_decode_metadata: Any) -> Any:
    """In place of `GPUModelRunner._get_spec_decode_draft_probs(spec_decode_metadata)`."""
    if _is_ours(runner):
        return runner.drafter.sampling.verified_probs(spec_decode_metadata)
    return original(runner, spec_decode_metadata)


def _is_ours(runner: Any) -> bool:
    proposer = sys.modules.get("vllm_dflash.proposer")
    return proposer is not None and isinstance(getattr(runner, "drafter", None), proposer.DraftProposer)
