"""Counts a request of a key, and its tokens, which the replica reports as the usage."""

import json

from octavo.gateway.client_keys import Key
from octavo.gateway.key_store import KeyStore

PROMPT_TOKENS = b"x-octavo-prompt-tokens"  # of resumable streams, whose usage comes last, and of vectors as bytes

# The last events of the APIs' streams: the tokens are written before the client gets these.
_DONE, _STOP, _RESPONSE = b"[DONE]", b"message_stop", b"response."
_ENDS = (b"response.completed", b"response.incomplete", b"response.failed")
_USAGE, _BILLED = b'"usage":', b'"billed_units":'  # the latter of Cohere's API
_MAX_TOKENS = 1 << 40  # of one request: what a replica says beyond it is nonsense, and databases have 64 bits
_MAX_USAGE_BYTES = 4096  # of a usage with its name
_decode = json.JSONDecoder().raw_decode


class UsageCounter:
    """Counts one request. `admit` it, `see` the answer's bytes, and `finish` before its last bytes are sent and when it
    is over."""

    def __init__(self, store: KeyStore, key: Key) -> None:
        self._store, self.key = store, key
        self.model: str | None = None  # that is asked now; its tokens are counted
        self._seen = b""  # the last bytes of an answer that is no stream
        self._last: list[tuple[int, int]] = []  # its last usage so far
        self._num_prompt = self._num_completion = 0
        self._written = (0, 0)
        self.is_at_end = False  # the events seen last end the stream

    async def admit(self, model: str) -> None:
        """Count the request, once however many models are asked. Raises `RequestError` if it is refused."""
        await self._store.admit(self.key, model)
        self.model = model

    def see_headers(self, num_prompt_tokens: bytes, metadata: bytes) -> None:
        """Note the number of the prompt's tokens, and the usage in the `metadata` of vectors that come as bytes. Both
        are headers of the replica, and may be empty."""
        if num_prompt_tokens.isdigit() and len(num_prompt_tokens) < 20:
            self._note([(_count(int(num_prompt_tokens)), 0)])
        self._note(_usages(metadata, _USAGE))

    def see(self, data: bytes) -> None:
        """Look for the usage in a piece of an answer that is no stream. The last one counts: what a model gives to a
        tool may have a field of that name, too."""
        seen = self._seen + data
        self._last = _usages(seen, _USAGE)[-1:] or _usages(seen, _BILLED)[-1:] or self._last
        self._seen = seen[-_MAX_USAGE_BYTES:]

    def see_events(self, events: bytes) -> None:
        """Look in whole events for the usage, and for the end of the stream: then `is_at_end` is set."""
        if _USAGE in events:
            self._note(_usages(events, _USAGE))
        may_end = _RESPONSE in events and any(end in events for end in _ENDS)
        self.is_at_end = _DONE in events or _STOP in events or may_end

    async def finish(self, at_least: int = 0) -> None:
        """Write the tokens that are not written yet. A stream without a usage counts as `at_least` so many tokens."""
        if self.model is None:
            return
        self._note(self._last)
        self._num_completion = max(self._num_completion, at_least)
        prompt, completion = self._num_prompt - self._written[0], self._num_completion - self._written[1]
        if prompt or completion:
            self._written = self._num_prompt, self._num_completion
            await self._store.add_tokens(self.key, self.model, prompt, completion)

    def _note(self, usages: list[tuple[int, int]]) -> None:
        for prompt, completion in usages:
            self._num_prompt = max(self._num_prompt, prompt)
            self._num_completion = max(self._num_completion, completion)


def _usages(data: bytes, name: bytes) -> list[tuple[int, int]]:
    """Return the tokens of prompts and answers in the usages that follow a name."""
    found = []
    begin = data.find(name)
    while begin >= 0:
        begin += len(name)
        try:
            usage, _ = _decode(data[begin : begin + _MAX_USAGE_BYTES].decode("utf-8", "replace").lstrip())
        except (ValueError, RecursionError):
            usage = None
        if isinstance(usage, dict):
            prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
            prompt = usage.get("input_tokens") if prompt is None else prompt
            completion = usage.get("output_tokens") if completion is None else completion
            if prompt is not None or completion is not None:
                found.append((_count(prompt), _count(completion)))
        begin = data.find(name, begin)
    return found


def _count(said: object) -> int:
    """Return a number of tokens that a replica has reported, or 0 if it is no valid number."""
    return min(said, _MAX_TOKENS) if isinstance(said, int) else 0
