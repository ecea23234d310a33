"""`EngineArgs` and `AsyncEngineArgs` under the name of vLLM's module."""

from octavo.config import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
