"""What a drafter costs in memory, for one line at start-up: its weights, and its share of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.linear import LinearBase

if TYPE_CHECKING:
    from vllm_dflash.proposer import DraftProposer


@dataclass(frozen=True)
class DrafterMemory:
    """On one rank; sizes in bytes."""

    weights: int  # of tensors that the drafter does not share with the target
    kv_per_token: int  # of the drafter's layers
    target_kv_per_token: int
    kv_tokens: int  # that the cache holds, every layer counted

    @property
    def kv_tokens_without(self) -> int:
        """Tokens that the same cache would hold without a drafter, whose weights would make it larger still."""
        return self.kv_tokens * (self.kv_per_token + self.target_kv_per_token) // self.target_kv_per_token

    def line(self) -> str:
        """For a log."""
        return (
            f"drafter memory: {self.weights / 2**20:.1f} MiB of weights; {self.kv_per_token:,} bytes of K/V per token "
            f"beside the target's {self.target_kv_per_token:,}, so the KV cache holds {self.kv_tokens:,} tokens where "
            f"it would hold {self.kv_tokens_without:,} without it."
        )


def drafter_memory(proposer: DraftProposer) -> DrafterMemory:
    """Measured on the loaded models and the allocated cache.

    Layers of a hybrid target that keep a state of fixed size are counted by what the cache sets aside for them.
    """
    runner = proposer.runner
    cache = runner.kv_cache_config
    draft_layers = proposer._draft_attn_layer_names
    draft = target = 0
    # Pages of all groups are of one pool; a token has a page in each group.
    for group in cache.kv_cache_groups:
        for name in group.layer_names:
            size = group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size
            if name in draft_layers:
                draft += size
            else:
                target += size
    page_size = min(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
    num_tokens = cache.num_blocks * page_size // len(cache.kv_cache_groups)
    return DrafterMemory(_weights(proposer.model, runner.model), draft, target, num_tokens)


def _weights(model: torch.nn.Module, target: torch.nn.Module) -> int:
    """Bytes of the drafter's own parameters. On CPUs oneDNN has packed weights away, and only their sizes are left."""
    shared = {id(module) for module in target.modules()}
    sizes: dict[int, int] = {}
    for module in model.modules():
        if id(module) in shared:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.numel():
                sizes[parameter.data_ptr()] = parameter.nbytes
            elif isinstance(module, LinearBase):
                rows = getattr(module, "output_size_per_partition", module.output_size)
                columns = getattr(module, "input_size_per_partition", module.input_size)
                sizes[id(parameter)] = rows * columns * parameter.element_size()
    return sum(sizes.values())
