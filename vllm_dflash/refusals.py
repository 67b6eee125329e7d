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
            f"of target layers {list(config.target_layer_ids)} on the last pipeline stage, which lacks those of "
            f"earlier stages and the target's embeddings. Use tensor_parallel_size instead, or leave the speculative "
            f"config out."
        )
    connector = getattr(args.kv_transfer_config, "kv_connector", None)
    if connector is None and args.kv_offloading_size is not None:
        connector = f"{args.kv_offloading_backend} KV offloading"
    if connector is not None:
        raise ValueError(
            f"the KV connector '{connector}' brings keys and values of computed tokens, but not the hidden states that "
            f"drafter '{config.name}' reads: its context would be empty there. Leave the connector "
            f"(kv_transfer_config, kv_offloading_size) out, or the speculative config."
        )


def check_recurrent_states(target_model_config: Any, is_cpu: bool, config: DFlashConfig) -> None:
    """Refuse targets with recurrent layers (Mamba, gated delta networks) on vLLM's CPU backend, which corrupts them.

    A rejected draft must not leave a trace in the state. Of the CPU implementations Mamba's ignores how many drafts
    were accepted (model_executor/layers/mamba/ops/cpu/causal_conv1d.py swallows the argument), and the one of gated
    delta networks keeps its convolution right only while every request drafts exactly K tokens in every step
    (`_spec_forward` in gdn_attention.py beside it), which no server can promise: grammars, budgets and the end of a
    context cut blocks. So it is in vLLM 0.32 with any drafter; tests/families/test_refusals.py shows it.

    Raises:
        ValueError: names the target and the repair.
    """
    if is_cpu and (target_model_config.is_hybrid or target_model_config.has_inner_state):
        raise ValueError(
            f"target '{target_model_config.model}' has recurrent layers, whose states vLLM's CPU backend does not "
            f"restore after rejected drafts: with drafter '{config.name}' its text would change. Serve it on a GPU, or "
            f"leave the speculative config out."
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
