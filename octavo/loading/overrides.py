"""Settings with which a user overrides a model's configuration, and the longest sequence that a configuration allows.

`config/creation.py` applies the overrides to the configuration from `checkpoint.resolve`, before anything else reads
it.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ConfigError

Overrides = Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


def overridden(config: Mapping[str, Any], overrides: Overrides | None) -> dict[str, Any]:
    """Return a copy of `config` with `overrides`: a function of the configuration, or settings by name. An object among
    the settings changes only the keys that it has; the name "a.b" is the key "b" of the object "a". Raises
    `ConfigError`."""
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
    scaled = {name.partition("rope_scaling")[0] for name in overrides or {} if "rope_scaling" in name.split(".")}
    for path_to_it in scaled:
        holder = found
        for part in filter(None, path_to_it.split(".")):
            holder = holder[part]
        _keep_rotation(holder)
    return found


def _keep_rotation(config: dict[str, Any]) -> None:
    """Complete an overriding `rope_scaling` in place with settings of `rope_parameters`.

    Earlier versions of transformers wrote `rope_scaling` beside `rope_theta`. Version 5 has both in `rope_parameters`,
    for each type of layer if they differ. Then the scaling applies to layers with full attention. `rope_theta` and
    `partial_rotary_factor` stay unless the scaling has them.
    """
    scaling, parameters = config["rope_scaling"], config.get("rope_parameters")
    if not scaling or not parameters:
        return
    of_all = parameters.get("full_attention", parameters)
    kept = {key: of_all[key] for key in ("rope_theta", "partial_rotary_factor") if of_all.get(key) is not None}
    scaling = kept | scaling
    is_by_type = of_all is not parameters
    config["rope_scaling"] = {**parameters, "full_attention": scaling} if is_by_type else scaling


def longest_context(config: Mapping[str, Any], num_positions: int) -> int:
    """Return the longest sequence, in tokens, that the model's rotary embedding supports. A scaling factor stretches
    the positions that the model was trained with. `num_positions`, from config.json, is the length before the scaling
    for some kinds of scaling and the length after it for others."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor") or 1.0
    original = rope.get("original_max_position_embeddings") or num_positions
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in (factor, original)):
        raise ConfigError(f"the rope scaling of the model's configuration, {str(rope)[:120]}, has no finite numbers.")
    if kind in ("linear", "dynamic"):
        return int(num_positions * factor)
    if kind == "yarn":  # Peng et al. 2023; checkpoints write either length
        return max(num_positions, int(original * factor))
    return num_positions
