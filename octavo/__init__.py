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
    from octavo.engine.llm_engine import LLMEngine
    from octavo.entrypoints.llm import LLM
    from octavo.inputs import TextPrompt, TokensPrompt
    from octavo.lora.request import LoRARequest
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

_HOMES = {
    "LLM": "octavo.entrypoints.llm",
    "LLMEngine": "octavo.engine.llm_engine",
    "AsyncEngineArgs": "octavo.config",
    "AsyncLLMEngine": "octavo.engine.async_engine",
    "BeamSearchParams": "octavo.sampling_params",
    "CompletionOutput": "octavo.outputs",
    "EngineArgs": "octavo.config",
    "LoRARequest": "octavo.lora.request",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputsParams": "octavo.sampling_params",
    "TextPrompt": "octavo.inputs",
    "TokensPrompt": "octavo.inputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
