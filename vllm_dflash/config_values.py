"""Values of a drafter's config.json, each checked before it is used; what is wrong is named with its repair.

It knows nothing of the two dialects: config.py says which value stands where. It imports neither torch nor vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: More than any drafter has, and little enough to build anything with: numbers beyond come from damage or malice.
MOST_LAYERS, MOST_POSITIONS, MOST_FACTOR, MOST = 1000, 2**24, 1e6, 2**31 - 1


def acceptance_rates(section: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """What `vllm-dflash export --eval-json` records; nothing where a drafter comes from elsewhere."""
    value = section.get("acceptance_rates") or []
    is_list = isinstance(value, list) and all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in value)
    if not is_list or sorted(value, reverse=True) != value:
        raise wrong(name, "acceptance_rates", value, "they are shares of cycles that do not increase with the position")
    return tuple(value)


def layer_types(layers: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The kind of attention of each layer; full where nothing is said."""
    num_layers = number(layers, "num_hidden_layers", name, most=MOST_LAYERS)
    kinds = layers.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise wrong(name, "layer_types", kinds, f"num_hidden_layers {num_layers}")
    return tuple(kinds)


def layer_ids(section: Mapping[str, Any], key: str, name: str) -> list[int]:
    """Layers of the target, at least one, as the file counts them."""
    value = section.get(key)
    if not isinstance(value, list | tuple) or not value or any(type(i) is not int for i in value):
        raise wrong(name, key, value, "it must list at least one layer of the target")
    return list(value)


def number(section: Mapping[str, Any], key: str, name: str, default: int | None = None, most: int = MOST) -> int:
    """A count or size; `default` where it is absent or null."""
    value = default if section.get(key) is None else section[key]
    if type(value) is not int or value < 1:
        raise wrong(name, key, value, "it must be a whole number of at least 1")
    if value > most:
        raise wrong(name, key, value, f"no drafter has more than {most}")
    return value


def positive(section: Mapping[str, Any], key: str, name: str) -> float | None:
    """A positive number that is not necessarily whole; None where it is absent, null or 0."""
    value = section.get(key)
    if not value:
        return None
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise wrong(name, key, value, "it must be a positive number")
    return value


def factor(section: Mapping[str, Any], key: str, name: str) -> float | None:
    """What something is multiplied by; None where it is absent or null. 0 is no way to say that nothing is."""
    value = section.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= MOST_FACTOR:
        raise wrong(name, key, value, f"it must be a positive number of at most {MOST_FACTOR:g}")
    return float(value)


def mapping(raw: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """A section of the file."""
    if not isinstance(raw.get(key), Mapping):
        raise wrong(name, key, raw.get(key), "it must be a mapping")
    return raw[key]


def wrong(name: str, key: str, value: Any, but: str) -> ValueError:
    """The refusal of a value; `but` says what speaks against it."""
    return ValueError(
        f"drafter '{name}' has {key} {value!r} in its config.json, but {but}; set the value that it was trained with."
    )
