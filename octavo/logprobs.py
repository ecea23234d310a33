"""`Logprob` under the name of vLLM's module."""

from octavo.outputs import Logprob, PositionLogprobs

__all__ = ["Logprob", "PositionLogprobs"]
