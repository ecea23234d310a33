"""The variables of the environment as attributes, under the name of vLLM's module: `envs.OCTAVO_CPU_THREADS`.

An attribute is the variable's text when it is asked for, or None where it is not set. Octavo itself reads the
environment where it needs it; `octavo.variables` lists what it reads. Of vLLM's own variables those are here that are
taken; for the others the error says what is in their place.
"""

import os

from octavo.variables import COUNTERPARTS, HARMLESS, VARIABLES


def is_set(name: str) -> bool:
    """Whether a variable is set. Raises `AttributeError` for one that nothing reads."""
    return __getattr__(name) is not None


def __getattr__(name: str) -> str | None:
    if name in VARIABLES or name in HARMLESS:
        return os.environ.get(name)
    if name.startswith("VLLM_"):
        instead = f"; use {COUNTERPARTS[name]}" if name in COUNTERPARTS else ""
        raise AttributeError(f"{name} is a variable of vLLM's and has no effect here{instead}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *VARIABLES})
