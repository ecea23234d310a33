"""What asynchronous engines raise, under the name of vLLM's module."""

from octavo.errors import EngineDeadError

__all__ = ["EngineDeadError"]
