"""Counts a request of a key, and its tokens, which the replica reports as the usage."""

from __future__ import annotations

import json

from octavo.gateway.key_store import Key, KeyStore

PROMPT_TOKENS = b"x-octavo-prompt-tokens"  # in a resumable stream, whose usage comes last

# The last events of the APIs' streams: the tokens are written before the client gets these.
_ENDS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
_USAGE = b'"usage":'
_MAX_TOKENS = 1 << 40  # of one request: what a replica says beyond it is nonsense, and databases have 64 bits
_MAX_TAIL_BYTES = 65_536  # the end of an answer without a stream, which has the usage
_decode = json.JSONDecoder().raw_decode


class Meter:
    """Counts one request. `admit` it, `see` the answer's bytes, and `finish` before its last bytes are sent and when it
    is over."""

    def __init__(self, store: KeyStore, key: Key) -> None:
        self._store, self.key = store, key
        self.model: str | None = None  # that was asked last
        self._tail = b""
        self._num_prompt = self._num_completion = 0
        self._written = (0, 0)
        self.is_at_end = False  # the events seen last end the stream

    async def admit(self, model: str) -> None:
        """Count the request, only once even if several models are asked. Raises `RequestError` if it is refused."""
        if self.model is None:
            await self._store.admit(self.key, model)
        self.model = model

    def see_prompt(self, header: bytes) -> None:
        """Note the number of the prompt's tokens, from the replica's `header`, which may be empty."""
        if header.isdigit():
            self._num_prompt = max(self._num_prompt, _count(int(header)))

    def see(self, data: bytes) -> None:
        """Keep the end of an answer that is no stream: its usage is there."""
        self._tail = (self._tail + data)[-_MAX_TAIL_BYTES:]

    def see_events(self, events: bytes) -> None:
        """Look in whole events for the usage, and for the end of the stream: then `is_at_end` is set."""
        self._look_into(events)
        self.is_at_end = any(end in events for end in _ENDS)

    async def finish(self, at_least: int = 0) -> None:
        """Write the tokens that are not written yet. A stream without a usage counts as `at_least` so many tokens."""
        if self.model is None:
            return
        if self._tail:
            self._look_into(self._tail)
            self._tail = b""
        self._num_completion = max(self._num_completion, at_least)
        prompt, completion = self._num_prompt - self._written[0], self._num_completion - self._written[1]
        if prompt or completion:
            self._written = self._num_prompt, self._num_completion
            await self._store.add_tokens(self.key, self.model, prompt, completion)

    def _look_into(self, data: bytes) -> None:
        begin = data.find(_USAGE)
        while begin >= 0:
            begin += len(_USAGE)
            try:
                usage, _ = _decode(data[begin : begin + 4096].decode("utf-8", "replace").lstrip())
            except ValueError:
                usage = None
            if isinstance(usage, dict):
                prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
                prompt = usage.get("input_tokens") if prompt is None else prompt
                completion = usage.get("output_tokens") if completion is None else completion
                self._num_prompt = max(self._num_prompt, _count(prompt))
                self._num_completion = max(self._num_completion, _count(completion))
            begin = data.find(_USAGE, begin)


def _count(said: object) -> int:
    """Return a number of tokens that a replica has reported, or 0 if it is no valid number."""
    return min(said, _MAX_TOKENS) if isinstance(said, int) else 0
