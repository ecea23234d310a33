"""`LLMEngine` under the name of vLLM's module."""

from octavo.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
