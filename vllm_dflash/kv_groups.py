"""Keeps the drafter's layers in one KV-cache group of a target whose layers are of several kinds.

vLLM's V1 runner gives all drafter layers one block table, so they must be in one group (`validate_same_kv_cache_group`
in v1/spec_decode/llm_base_proposer.py). Groups are made as large as the rarest kind of layer, and the layers of a kind
are dealt out to them in turn (v1/core/kv_cache_utils.py). With 12 sliding and 12 full layers of gpt-oss-20b and 8 of
its drafter there are two groups of full layers, each with half of the drafter, and the engine does not start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def draft_layer_names(layer_names: Sequence[str], num_target_layers: int) -> list[str]:
    """The drafter's layers: vLLM numbers them after the target's."""
    found = [(name, re.search(r"\blayers\.(\d+)\.", name)) for name in layer_names]
    return [name for name, index in found if index is not None and int(index[1]) >= num_target_layers]


def gather_draft_layers(groups: Sequence[Sequence[str]], draft_layers: Sequence[str]) -> list[list[str]]:
    """Deal the layers of these groups out again, the drafter's first.

    Args:
        groups: layer names of each group; all layers are of one kind.
        draft_layers: those of the drafter.

    Returns:
        The same layers in as many groups or fewer: the first begins with the whole drafter. None is larger than the
        largest was, unless the drafter is.
    """
    size = max([len(draft_layers), *map(len, groups)])
    others = [name for group in groups for name in group if name not in set(draft_layers)]
    ordered = [*draft_layers, *others]
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def with_draft_layers_together(vllm_config: Any, groups: list[Any]) -> list[Any]:
    """vLLM's KV-cache groups, regrouped where the drafter's layers are in several; see the module."""
    speculative_config = vllm_config.speculative_config
    if speculative_config is None or speculative_config.method != "dflash" or vllm_config.use_v2_model_runner:
        return groups
    names = [name for group in groups for name in group.layer_names]
    draft_layers = draft_layer_names(names, vllm_config.model_config.get_total_num_hidden_layers())
    holders = [group for group in groups if set(group.layer_names).intersection(draft_layers)]
    if len(holders) < 2 or any(group.kv_cache_spec != holders[0].kv_cache_spec for group in holders):
        return groups
    regrouped = gather_draft_layers([group.layer_names for group in holders], draft_layers)
    for group, layer_names in zip(holders, regrouped):
        group.layer_names = layer_names
    left_over = holders[len(regrouped) :]
    return [group for group in groups if not any(group is other for other in left_over)]
