"""`UsageContext` under the name of vLLM's module: where an engine is used from, which programs tell vLLM's statistics.
Octavo has none, so that it says nothing here."""

from __future__ import annotations

from enum import StrEnum, auto

__all__ = ["UsageContext"]


class UsageContext(StrEnum):
    """vLLM's names."""

    UNKNOWN_CONTEXT = auto()
    LLM_CLASS = auto()
    API_SERVER = auto()
    OPENAI_API_SERVER = auto()
    OPENAI_BATCH_RUNNER = auto()
    ENGINE_CONTEXT = auto()
