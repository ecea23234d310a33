"""Settings that a user puts over those of a model's configuration, and how long a sequence these allow.

`config/creation.py` applies them to what `checkpoint.resolve` has found, before anything else reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ConfigError

Overrides = Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


def overridden(config: Mapping[str, Any], overrides: Overrides | None) -> dict[str, Any]:
    """A copy of `config` with `overrides`: a function of it, or settings. An object in them changes what it names of
    the object that is there; "a.b" is "b" of the object "a". Raises `ConfigError`."""
    found = copy.deepcopy(dict(config))
    if callable(overrides):
        found = overrides(found)
        if not isinstance(found, dict):
            raise ConfigError(f"hf_overrides returned a {type(found).__name__}, not the configuration.")
        return found
    for name, value in (overrides or {}).items():
        *path, last = name.split(".")
        at = found
        for part in path:
            if at.get(part) is None:
                at[part] = {}
            at = at[part]
            if not isinstance(at, dict):
                raise ConfigError(f"--hf-overrides {name}: {part} is {at!r} in the configuration, not an object.")
        is_nested = isinstance(value, Mapping) and isinstance(at.get(last), Mapping)
        at[last] = overridden(at[last], value) if is_nested else copy.deepcopy(value)
    return found


def longest_context(config: Mapping[str, Any], num_positions: int) -> int:
    """Tokens of a sequence that the model's rotary embedding is made for. Scalings by a factor stretch the positions
    that the model was trained with; `num_positions`, of config.json, says in some kinds what comes of that."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor") or 1.0
    if kind in ("linear", "dynamic"):
        return int(num_positions * factor)
    if kind == "yarn":  # Peng et al. 2023; checkpoints write either length
        return max(num_positions, int((rope.get("original_max_position_embeddings") or num_positions) * factor))
    return num_positions
