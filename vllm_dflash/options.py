"""Our own settings, read from vLLM's `additional_config["dflash"]`.

`SpeculativeConfig` refuses keys that it does not know, so `--additional-config '{"dflash": {...}}'`
is the one channel that reaches every process. Each setting and its default stands here once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class DFlashOptions:
    """Settings of the plugin; every field is a key of `additional_config["dflash"]`."""

    enabled: bool = True  # False leaves vLLM's native DFlash in place, untouched

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> DFlashOptions:
        """Read `additional_config` (a dict, None, or vLLM's hashable stand-in for one).

        Raises:
            ValueError: "dflash" is not a mapping, a key is unknown, or a value has the wrong type.
        """
        if additional_config is None or not hasattr(additional_config, "get"):
            return cls()
        settings = additional_config.get("dflash", {})
        if not isinstance(settings, dict):
            raise ValueError(
                f'additional_config["dflash"] must be a mapping like {{"enabled": true}}, but it is {settings!r}.'
            )
        known = {field.name: field for field in fields(cls)}
        for key, value in settings.items():
            if key not in known:
                raise ValueError(
                    f'additional_config["dflash"] has no setting {key!r}; known settings: {", ".join(known)}.'
                )
            expected = type(known[key].default)
            if not isinstance(value, expected):
                raise ValueError(
                    f'additional_config["dflash"]["{key}"] must be of type {expected.__name__}, but it is {value!r}.'
                )
        return cls(**settings)
