"""The engines under the names of vLLM's modules."""
