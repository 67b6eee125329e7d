"""The drafter's layers stay together whatever groups vLLM makes of a target's layers."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from vllm_source import Installed, released

from vllm_dflash import plugin
from vllm_dflash.kv_groups import draft_layer_names, gather_draft_layers


def names(*indices: int) -> list[str]:
    return [f"model.layers.{i}.self_attn.attn" for i in indices]


def test_draft_layers_are_numbered_after_the_targets():
    layers = [*names(0, 3, 4, 5), "language_model.model.layers.11.self_attn.attn", "visual.blocks.7.attn"]
    assert draft_layer_names(layers, 4) == [*names(4, 5), "language_model.model.layers.11.self_attn.attn"]


@pytest.mark.parametrize(
    ("groups", "draft", "expected"),
    [
        # gpt-oss-20b: 12 full layers of the target (odd ones) and 8 of the drafter, dealt out to two groups.
        (
            [[*range(1, 24, 4), 24, 26, 28, 30], [*range(3, 24, 4), 25, 27, 29, 31]],
            range(24, 32),
            [[*range(24, 32), 1, 5], [9, 13, 17, 21, 3, 7, 11, 15, 19, 23]],
        ),
        # A drafter larger than the groups: one of them grows.
        ([[1, 4], [3, 5], [6]], [4, 5, 6], [[4, 5, 6], [1, 3]]),
        ([[1, 3], [4, 6], [5]], [4, 5, 6], [[4, 5, 6], [1, 3]]),
    ],
)
def test_the_first_group_gets_the_drafter(groups, draft, expected):
    gathered = gather_draft_layers([names(*group) for group in groups], names(*draft))
    assert gathered == [names(*group) for group in expected]


@pytest.mark.case("F47")
@pytest.mark.parametrize("release", ["installed", "0.33.0"])
def test_vllm_makes_its_groups_where_the_plugin_looks(release):
    """Another module in each release, so the contract has no row for it."""
    modules = [m for m in plugin._GROUPS_MODULES if release != "installed" or find_spec(m)]
    vllm = Installed() if release == "installed" else released(release, modules)
    readers = [(module, vllm.reader(module)) for module in modules]
    found = [(module, reader) for module, reader in readers if reader.has(module, "get_kv_cache_groups")]
    assert len(found) == 1
    module, reader = found[0]
    assert list(reader.signature(module, "get_kv_cache_groups").parameters) == ["vllm_config", "kv_cache_spec"]
