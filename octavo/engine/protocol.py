"""`EngineClient` under the name of vLLM's module: what servers ask of an engine."""

from octavo.engine.engine_client import EngineClient

__all__ = ["EngineClient"]
