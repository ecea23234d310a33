"""Octavo: a high-throughput, memory-efficient inference and serving engine for large language models.

The names below are loaded when they are first used, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo import compat
from octavo.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from octavo.config import AsyncEngineArgs, EngineArgs
    from octavo.engine.async_engine import AsyncLLMEngine
    from octavo.engine.llm_engine import LLMEngine
    from octavo.entrypoints.llm import LLM
    from octavo.inputs import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from octavo.lora.request import LoRARequest
    from octavo.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from octavo.pooling_params import PoolingParams
    from octavo.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

compat.install()

_HOMES = {
    "AsyncEngineArgs": "octavo.config",
    "AsyncLLMEngine": "octavo.engine.async_engine",
    "BeamSearchParams": "octavo.sampling_params",
    "ClassificationOutput": "octavo.outputs",
    "ClassificationRequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "EmbeddingOutput": "octavo.outputs",
    "EmbeddingRequestOutput": "octavo.outputs",
    "EmbedsPrompt": "octavo.inputs",
    "EngineArgs": "octavo.config",
    "LLM": "octavo.entrypoints.llm",
    "LLMEngine": "octavo.engine.llm_engine",
    "LoRARequest": "octavo.lora.request",
    "PoolingOutput": "octavo.outputs",
    "PoolingParams": "octavo.pooling_params",
    "PoolingRequestOutput": "octavo.outputs",
    "PromptType": "octavo.inputs",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.sampling_params",
    "ScoringOutput": "octavo.outputs",
    "ScoringRequestOutput": "octavo.outputs",
    "StructuredOutputsParams": "octavo.sampling_params",
    "TextPrompt": "octavo.inputs",
    "TokensPrompt": "octavo.inputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        why = f": {compat.ABSENT[name]}" if name in compat.ABSENT else ""
        raise AttributeError(f"module 'octavo' has no attribute {name!r}{why}")
    return getattr(import_module(_HOMES[name]), name)
