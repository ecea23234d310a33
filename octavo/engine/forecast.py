"""Predicts the time to the first token of a new prompt: the prompt tokens before it, counted by the front end, times
the seconds that the core reports for a prompt token.

`AsyncLLMEngine` keeps it up to date; the server asks it before it accepts a request (`--max-ttft`).
"""

from collections.abc import Callable, Iterable

from octavo.request import SequenceOutput
from octavo.stats import EngineStats

_MEMORY_TOKENS = 20_000  # prompt tokens after which older prefix lookups count e times less


class FirstTokenForecast:
    """The requests without a first token, as the front end counts them, and the speed of the core."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}  # prompt tokens, by request
        self._num_waiting_tokens = 0
        self._num_queries = self._num_hits = 0.0  # recent tokens looked up in the prefix index, and found
        self._stats = EngineStats()
        # Takes the number of tokens that wait in this front end. Returns the sum of all front ends that share the core.
        self.share: Callable[[int], float] = lambda own: own

    def add(self, request_id: str, num_tokens: int) -> None:
        """Count a request that goes to the core."""
        self._waiting[request_id] = num_tokens
        self._num_waiting_tokens += num_tokens
        self.share(self._num_waiting_tokens)

    def forget(self, request_id: str) -> None:
        """Remove a request: it has its first token, or has ended without one."""
        if (num_tokens := self._waiting.pop(request_id, 0)) != 0:
            self._num_waiting_tokens -= num_tokens
            self.share(self._num_waiting_tokens)

    def record_step(self, outputs: Iterable[SequenceOutput], stats: EngineStats) -> None:
        for output in outputs if self._waiting else ():
            if output.request_id in self._waiting:
                self.forget(output.request_id)
        if stats.prompt_token_s:
            self._stats = stats
        if stats.num_prefix_queries:
            kept = max(0.0, 1 - stats.num_prefix_queries / _MEMORY_TOKENS)
            self._num_queries = kept * self._num_queries + stats.num_prefix_queries
            self._num_hits = kept * self._num_hits + stats.num_prefix_hits

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds until a new prompt of `num_tokens` has its first token. 0 before anything has run."""
        num_before = max(0, self.share(self._num_waiting_tokens) - self._stats.num_chunked_tokens)
        return self.seconds_alone(num_before + num_tokens)

    def seconds_alone(self, num_tokens: float) -> float:
        """Return the same for a prompt with no other prompts before it."""
        found = self._num_hits / self._num_queries if self._num_queries else 0.0
        return num_tokens * (1 - found) * self._stats.prompt_token_s
