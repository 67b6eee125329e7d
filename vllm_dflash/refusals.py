"""What cannot work with a drafter, said before any weight is loaded: engine settings and kinds of target.

What a drafter itself asks of its target is checked in config.py.
"""

from __future__ import annotations

from typing import Any

from vllm_dflash.config import DFlashConfig


def check_engine(args: Any, config: DFlashConfig) -> None:
    """Refuse engine settings under which drafts would be made from missing features, or not at all.

    Args:
        args: vLLM's EngineArgs.
        config: the drafter.

    Raises:
        ValueError: names the setting and the repair.
    """
    if args.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size is {args.pipeline_parallel_size}, but drafter '{config.name}' reads hidden states "
            f"of target layers {list(config.target_layer_ids)} on the last pipeline stage, and earlier stages do not "
            f"hand theirs on. Use tensor_parallel_size instead, or leave the speculative config out."
        )
    connector = getattr(args.kv_transfer_config, "kv_connector", None)
    if connector is None and args.kv_offloading_size is not None:
        connector = f"{args.kv_offloading_backend} KV offloading"
    if connector is not None:
        raise ValueError(
            f"the KV connector '{connector}' brings keys and values of computed tokens, but not the hidden states that "
            f"drafter '{config.name}' reads: its context would be empty there. Leave the connector (kv_transfer_config, "
            f"kv_offloading_size) out, or the speculative config."
        )


def check_target_class(model_class: type, target: str, drafter: str) -> None:
    """Refuse a target whose class in vLLM does not hand out hidden states of its layers.

    Raises:
        ValueError: names the class and what can be done.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(model_class):
        raise ValueError(
            f"drafter '{drafter}' reads hidden states of the target's layers, but vLLM's class for target '{target}', "
            f"{model_class.__name__}, does not hand them out (it lacks the interface SupportsEagle3). Serve this "
            f"target without a speculative config, or with a vLLM release whose class has the interface."
        )
