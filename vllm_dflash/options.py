"""Our own settings, read from vLLM's `additional_config["dflash"]`.

`SpeculativeConfig` refuses keys that it does not know, so `--additional-config '{"dflash": {...}}'`
is the one channel that reaches every process. Each setting and its default stands here once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints


@dataclass(frozen=True)
class DFlashOptions:
    """Settings of the plugin; every field is a key of `additional_config["dflash"]`."""

    enabled: bool = True  # False leaves vLLM's native DFlash in place, untouched
    draft_length: Literal["auto", "fixed"] = "auto"  # auto: decided in every step; fixed: always K tokens
    draft_sampling: Literal["auto", "fixed"] = "auto"  # auto: drawn or taken as measured; fixed: draft_sample_method
    kernels: Literal["auto", "off"] = "auto"  # auto: our Triton kernels on a GPU, where they compute the same
    trace: str = ""  # file that gets a line per step, for bench/simulate.py

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
        hints = get_type_hints(cls)
        for key, value in settings.items():
            if key not in known:
                raise ValueError(
                    f'additional_config["dflash"] has no setting {key!r}; known settings: {", ".join(known)}.'
                )
            choices = get_args(hints[key])
            if choices and value not in choices:
                raise ValueError(
                    f'additional_config["dflash"]["{key}"] must be one of {", ".join(map(repr, choices))}, but it is '
                    f"{value!r}."
                )
            expected = type(known[key].default)
            if not isinstance(value, expected):
                raise ValueError(
                    f'additional_config["dflash"]["{key}"] must be of type {expected.__name__}, but it is {value!r}.'
                )
        return cls(**settings)
