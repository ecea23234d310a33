"""The checked and completed value of `--speculative-config`: how draft tokens are made, and how many at most.

`parse` reads the object and the older flags. `octavo.speculative` loads models and drafts tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import ConfigError

# Methods, and their defaults of num_speculative_tokens. Each token of a draft model costs one step of that model.
HOST_METHODS = {"ngram": 16, "suffix": 24}
DRAFT_METHODS = {"draft_model": 4, "eagle": 3, "eagle3": 3, "medusa": 3, "mtp": 1}
HEAD_METHODS = ("eagle", "eagle3", "medusa", "mtp")  # methods whose models read the target model's hidden states
_NOT_BUILT = ("mlp_speculator",)
_ALIASES = {"[ngram]": "ngram", "prompt_lookup": "ngram", "draft": "draft_model"}
NO_METHOD = "none"
_MAX_DRAFT_TOKENS = 128
_LOOKUP = 5  # default of prompt_lookup_min and _max


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The settings of speculation. Fields have the names of `--speculative-config`'s keys."""

    method: str
    num_speculative_tokens: int  # the maximum; each step decides how many
    disable_by_batch_size: int | None = None  # no draft tokens while more sequences run
    model: str | None = None  # the draft model, for methods with one; the next fields belong to it
    revision: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    draft_tensor_parallel_size: int | None = None
    enforce_eager: bool | None = None
    kv_cache_dtype: str | None = None
    use_heterogeneous_vocab: bool = False
    prompt_lookup_min: int = _LOOKUP  # fewest tokens that must agree; the next field: most tokens compared
    prompt_lookup_max: int = _LOOKUP
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    # For benchmarks: by position, the rate at which a draft token and all before it count as accepted, whatever was
    # sampled.
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    rejection_sample_method: str = "standard"  # or "synthetic": by synthetic_acceptance_rates


# The default of servers (`octavo.config.speculation_flags`): lookups take microseconds of a step, and draft tokens
# rarely pay when more sequences share the reading of the weights.
DEFAULT = SpeculativeConfig("ngram", HOST_METHODS["ngram"], disable_by_batch_size=4, prompt_lookup_min=3)


def parse(
    given: Mapping[str, Any] | None,
    *,
    model: str | None = None,
    num_speculative_tokens: int | None = None,
    draft_tensor_parallel_size: int | None = None,
    prompt_lookup_max: int | None = None,
    prompt_lookup_min: int | None = None,
) -> SpeculativeConfig | None:
    """Return the configuration of speculation, or None without a method. `given` is the value of --speculative-config,
    the other arguments are the older flags. Raises `ConfigError` for settings that cannot be honoured."""
    older = {
        "model": model,
        "num_speculative_tokens": num_speculative_tokens,
        "draft_tensor_parallel_size": draft_tensor_parallel_size,
        "prompt_lookup_max": prompt_lookup_max,
        "prompt_lookup_min": prompt_lookup_min,
    }
    settings = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in older.items():
        if value is not None and settings.setdefault(name, value) != value:
            raise ConfigError(f"{_flag_of(name)} {value} and {name} {settings[name]} of --speculative-config differ.")
    if not settings or settings == {"method": NO_METHOD}:
        return None
    known = [f.name for f in fields(SpeculativeConfig)]
    if unknown := sorted(set(settings) - set(known)):
        raise ConfigError(
            f"--speculative-config has {', '.join(unknown)}, which nothing reads; {', '.join(known)} are."
        )
    settings["method"] = method = _method(settings)
    _check_types(settings)
    _check_others(settings, method)
    _settle_lookup(settings)
    if isinstance(rates := settings.get("synthetic_acceptance_rates"), list | tuple):
        settings.setdefault("num_speculative_tokens", len(rates))
    most = settings.setdefault("num_speculative_tokens", (HOST_METHODS | DRAFT_METHODS)[method])
    if not 1 <= most <= _MAX_DRAFT_TOKENS:
        raise ConfigError(f"num_speculative_tokens must be between 1 and {_MAX_DRAFT_TOKENS}, got {most}.")
    if method in HOST_METHODS:
        settings.pop("model", None)
        idle = ("revision", "quantization", "max_model_len", "draft_tensor_parallel_size", "enforce_eager",
                "kv_cache_dtype", "use_heterogeneous_vocab")  # fmt: skip
        if given_for_model := [name for name in idle if name in settings]:
            raise ConfigError(f"{given_for_model[0]} is for methods with a draft model, and the method is {method}.")
    _check_bounds(settings)
    _check_rates(settings, most)
    return SpeculativeConfig(**settings)


def _method(settings: dict[str, Any]) -> str:
    """Return the named method, or the method that follows from the other settings. Raises `ConfigError`."""
    model, method = settings.get("model"), settings.get("method")
    if method is None:
        if model is None:
            raise ConfigError(
                "no speculative method is given: --speculative-config needs a method, such as "
                '{"method": "ngram"}, or a model.'
            )
        method = _ALIASES.get(model, model if model in HOST_METHODS else "draft_model")
    method = _ALIASES.get(str(method), str(method))
    if method.endswith("_mtp"):  # vLLM's names include the model's family, which the checkpoint tells
        method = "mtp"
    if method in HOST_METHODS or method in DRAFT_METHODS:
        return method
    if method == NO_METHOD:
        others = ", ".join(sorted(settings.keys() - {"method"}))
        raise ConfigError(f"the speculative method none takes no {others}; leave out the method or these settings.")
    built = ", ".join([*HOST_METHODS, *DRAFT_METHODS])
    if method in _NOT_BUILT:
        raise ConfigError(f"the speculative method {method} is not built yet; {built} are.")
    raise ConfigError(f"the speculative method {method!r} is unknown; {built} are built.")


def _check_types(settings: dict[str, Any]) -> None:
    wanted: dict[str, tuple[Any, str]] = {
        "int": (int, "an integer"),
        "float": ((int, float), "a number"),
        "bool": (bool, "true or false"),
        "str": (str, "a string"),
        "tuple[float, ...]": ((list, tuple), "a list of numbers"),
    }
    types = {f.name: str(f.type).removesuffix(" | None") for f in fields(SpeculativeConfig)}
    for name, value in settings.items():
        kind, expected = wanted[types[name]]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{name} of --speculative-config must be {expected}, got {value!r}.")


def _check_others(settings: dict[str, Any], method: str) -> None:
    """Raise `ConfigError` for settings of another method."""
    for prefix, theirs in (("prompt_lookup_", "ngram"), ("suffix_decoding_", "suffix")):
        if method != theirs and (found := [name for name in settings if name.startswith(prefix)]):
            raise ConfigError(f"{found[0]} is for the method {theirs}, and the method is {method}.")


def _settle_lookup(settings: dict[str, Any]) -> None:
    """Settle the bounds of the lookup. A bound that is left out equals the other. Raises `ConfigError`."""
    least = settings.setdefault("prompt_lookup_min", settings.get("prompt_lookup_max", _LOOKUP))
    most = settings.setdefault("prompt_lookup_max", least)
    if not 1 <= least <= most:
        raise ConfigError(
            f"prompt_lookup_min must be at least 1 and at most prompt_lookup_max, got {least} and {most}."
        )


def _check_bounds(settings: dict[str, Any]) -> None:
    for name, least, most in (
        ("disable_by_batch_size", 1, math.inf),
        ("suffix_decoding_max_tree_depth", 1, 1024),
        ("suffix_decoding_max_cached_requests", 0, math.inf),
        ("suffix_decoding_max_spec_factor", 0, math.inf),
        ("suffix_decoding_min_token_prob", 0, 1),
    ):
        if name in settings and not least <= settings[name] <= most:
            bounds = f"{least} or more" if most == math.inf else f"between {least} and {most}"
            raise ConfigError(f"{name} must be {bounds}, got {settings[name]}.")


def _check_rates(settings: dict[str, Any], num_draft_tokens: int) -> None:
    rates, method = settings.get("synthetic_acceptance_rates"), settings.get("rejection_sample_method")
    if method not in (None, "standard", "synthetic"):
        raise ConfigError(f"rejection_sample_method {method!r} is not built; standard and synthetic are.")
    if rates is None:
        if method == "synthetic":
            raise ConfigError("rejection_sample_method synthetic needs synthetic_acceptance_rates.")
        return
    if method == "standard":
        raise ConfigError("synthetic_acceptance_rates are for rejection_sample_method synthetic.")
    numbers = all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1 for rate in rates)
    if not numbers or len(rates) != num_draft_tokens or [*rates] != sorted(rates, reverse=True):
        raise ConfigError(
            f"synthetic_acceptance_rates must be {num_draft_tokens} numbers between 0 and 1 (num_speculative_tokens), "
            f"none greater than the one before it, got {rates}."
        )
    settings["synthetic_acceptance_rates"] = tuple(map(float, rates))
    settings["rejection_sample_method"] = "synthetic"


def _flag_of(name: str) -> str:
    flag = {
        "model": "speculative-model",
        "draft_tensor_parallel_size": "speculative-draft-tensor-parallel-size",
        "prompt_lookup_max": "ngram-prompt-lookup-max",
        "prompt_lookup_min": "ngram-prompt-lookup-min",
    }.get(name, name.replace("_", "-"))
    return f"--{flag}"
