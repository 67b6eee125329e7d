"""Our settings in vLLM's `additional_config`: one default each, and no misspelt key passes unnoticed."""

from __future__ import annotations

import dataclasses

import pytest
from test_config import naming

from vllm_dflash.options import DFlashOptions


class HashableStandIn:
    """What vLLM accepts besides a dict: anything with `compute_hash`."""

    def compute_hash(self) -> str:
        return "0"


@pytest.mark.parametrize("additional_config", [None, {}, {"other": {"enabled": False}}, HashableStandIn()])
def test_plugin_is_on_by_default(additional_config):
    assert DFlashOptions.from_additional_config(additional_config) == DFlashOptions(enabled=True)


def test_empty_settings_keep_every_default():
    assert DFlashOptions.from_additional_config({"dflash": {}}) == DFlashOptions()


@pytest.mark.parametrize("enabled", [True, False])
def test_plugin_is_switched(enabled):
    assert DFlashOptions.from_additional_config({"dflash": {"enabled": enabled}, "other": 1}).enabled is enabled


def test_settings_in_a_mapping_that_can_be_hashed():
    class HashableDict(dict):
        def compute_hash(self) -> str:
            return "0"

    assert not DFlashOptions.from_additional_config(HashableDict(dflash={"enabled": False})).enabled


@pytest.mark.parametrize("settings", [None, False, "off", ["enabled"], 0])
def test_settings_that_are_no_mapping_are_refused(settings):
    message = naming('additional_config["dflash"]', '{"enabled": true}', f"it is {settings!r}")
    with pytest.raises(ValueError, match=message):
        DFlashOptions.from_additional_config({"dflash": settings})


@pytest.mark.parametrize("key", ["enable", "Enabled", "num_speculative_tokens", ""])
def test_unknown_key_is_refused_with_the_known_ones(key):
    with pytest.raises(ValueError, match=naming(f"no setting {key!r}", "known settings: enabled")):
        DFlashOptions.from_additional_config({"dflash": {key: False}})


@pytest.mark.parametrize("value", ["false", "true", 0, 1, None, []])
def test_value_of_another_type_is_refused(value):
    """A string "false" is true, and would switch on what the user switched off."""
    with pytest.raises(ValueError, match=naming('["enabled"] must be of type bool', f"it is {value!r}")):
        DFlashOptions.from_additional_config({"dflash": {"enabled": value}})


def test_options_cannot_change_after_they_are_read():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DFlashOptions().enabled = False  # type: ignore[misc]


def test_draft_length_is_one_of_two():
    assert DFlashOptions.from_additional_config({"dflash": {"draft_length": "fixed"}}).draft_length == "fixed"
    with pytest.raises(ValueError, match=naming('["draft_length"] must be one of', "'auto', 'fixed'", "'always'")):
        DFlashOptions.from_additional_config({"dflash": {"draft_length": "always"}})
