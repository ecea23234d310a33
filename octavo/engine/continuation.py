"""Which requests go to a core, and when. The core that follows one that has died gets every request again, with the
tokens that it has: `AsyncLLMEngine` continues them.

A request may be what kills cores. If it was in the step at two deaths in a row and got no token in between, it goes to
the next core before the others, alone among them; if that core dies with it in the step too, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.errors import RequestError
from octavo.request import EngineRequest


class Continuation:
    """The way of one engine's requests to its cores."""

    def __init__(self, outputs: OutputProcessor, send: Callable[[EngineRequest], None]) -> None:
        self._outputs, self._send = outputs, send
        self.running: set[str] = set()  # requests in the core's steps, as it has told; some may have ended since
        self._has_core = False
        self._unsent: dict[str, None] = {}  # requests that wait for the trials, in order
        self._suspects: list[str] = []  # to be tried, the first one now
        self._num_tokens_before = 0  # of the suspect on trial

    def submit(self, state: RequestState) -> None:
        """Send a request to the core, now or after the trials."""
        if self._suspects:
            self._unsent[state.request.request_id] = None
        else:
            self._send(state.remainder())

    def begin(self) -> int:
        """Give a core that is ready the requests of the one before. Returns their number."""
        self._has_core = True
        self._unsent = dict.fromkeys(self._outputs.requests)
        num_continued = len(self._unsent)
        self._send_next()
        return num_continued

    def tokens_came(self) -> None:
        """After each step's outputs: end a trial that has shown that a suspect does not kill cores."""
        if self._suspects:
            state = self._outputs.requests.get(self._suspects[0])
            if state is None or state.num_tokens > self._num_tokens_before:
                del self._suspects[0]
                self._send_next()

    def core_died(self) -> dict[str, RequestError]:
        """Find suspects, as the core has died, perhaps before it was ready. Returns the requests to refuse, with their
        errors."""
        if not self._has_core:
            return {}
        refused = {}
        on_trial = self._suspects[:1]
        for request_id, state in self._outputs.requests.items():
            is_in_step = self._is_in_step(state)
            if is_in_step and request_id in on_trial:
                self._suspects.remove(request_id)
                refused[request_id] = RequestError(
                    "the engine died twice while it computed this request, and a third time while it computed the "
                    "request alone; it is refused, as it would end the engine again.",
                    status=500,
                    code="request_kills_engine",
                )
            elif is_in_step and state.num_tokens_at_death == state.num_tokens and request_id not in self._suspects:
                self._suspects.append(request_id)
            state.num_tokens_at_death = state.num_tokens if is_in_step else None
        self._has_core = False
        self.running, self._unsent = set(), {}
        return refused

    def is_suspect(self, request_id: str) -> bool:
        return request_id in self._suspects

    def _is_in_step(self, state: RequestState) -> bool:
        """Return whether the core may have been computing a request, or preparing its grammar, adapter or media."""
        request = state.request
        if request.request_id in self.running:
            return True
        is_prepared = request.params.grammar is None and request.adapter is None and not request.media
        return not (is_prepared or state.num_tokens or request.request_id in self._unsent)

    def _send_next(self) -> None:
        """Send the next suspect that still runs; without one, all requests that wait."""
        while self._suspects:
            state = self._outputs.requests.get(self._suspects[0])
            if state is not None:
                del self._unsent[state.request.request_id]
                self._num_tokens_before = state.num_tokens
                self._send(state.remainder())
                return
            del self._suspects[0]
        unsent, self._unsent = self._unsent, {}
        for request_id in unsent:
            if (state := self._outputs.requests.get(request_id)) is not None:
                self._send(state.remainder())
