"""`AsyncLLM` under the name of vLLM's module: `AsyncLLMEngine`."""

from octavo.engine.async_engine import AsyncLLMEngine as AsyncLLM

__all__ = ["AsyncLLM"]
