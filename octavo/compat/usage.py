"""`UsageContext`: where an engine is used from. vLLM's usage statistics read it; Octavo keeps none and ignores it."""

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
