"""`AsyncLLMEngine` under the name of vLLM's module."""

from octavo.engine.async_engine import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
