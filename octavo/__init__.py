"""Octavo: a high-throughput, memory-efficient inference and serving engine for large language models.

The names below are loaded when they are first used, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.config import AsyncEngineArgs, EngineArgs
    from octavo.engine.async_engine import AsyncLLMEngine
    from octavo.entrypoints.llm import LLM
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams, StructuredOutputsParams

_HOMES = {
    "LLM": "octavo.entrypoints.llm",
    "AsyncEngineArgs": "octavo.config",
    "AsyncLLMEngine": "octavo.engine.async_engine",
    "CompletionOutput": "octavo.outputs",
    "EngineArgs": "octavo.config",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputsParams": "octavo.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
