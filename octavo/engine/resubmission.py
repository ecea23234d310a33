"""Which requests go to a core, and when. When a core has died, the next one gets every request again, with the
request's tokens so far, and continues it.

A request may be what kills cores. If it was in the step at two deaths in a row and got no token in between, it goes to
the next core before the others, alone among them; if that core dies with it in the step too, it is refused. The trial
ends with a token, or with more steps than it had before the last death: beams and long prompts show no token for long.
If several front ends share the core, their hub lets one after the other try its suspects (`wire.Trials`).
"""

from collections.abc import Callable

from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.wire import FrontendMessage, Trials
from octavo.errors import RequestError


class Resubmission:
    """Sends one engine's requests to its core, and to the next core when it has died."""

    def __init__(self, output_processor: OutputProcessor, send: Callable[[FrontendMessage], None]) -> None:
        self._output_processor, self._send = output_processor, send
        self._running: dict[str, int] = {}  # requests in the core's steps: number of steps before their first
        self._num_steps = 0  # steps that the core has finished
        self._has_core = False
        self._unsent: dict[str, None] = {}  # requests that wait for the trials, in order
        self._suspects: list[str] = []  # requests to be tried alone; the first one is on trial
        self._num_tokens_before = 0  # tokens of the suspect on trial, before the trial

    def submit(self, state: RequestState) -> None:
        """Send a request to the core, now or after the trials."""
        if self._suspects:
            self._unsent[state.request.request_id] = None
        else:
            self._send(state.remainder())

    def core_is_ready(self) -> int:
        """Give a new core that is ready the requests of the core before. Returns their number."""
        self._has_core, self._num_steps = True, 0
        self._unsent = dict.fromkeys(self._output_processor.requests)
        num_continued = len(self._unsent)
        self._send_next()
        return num_continued

    def step_begins(self, request_ids: list[str]) -> None:
        """Note the requests in the step that begins; some of them may have ended."""
        self._running = {one: self._running.get(one, self._num_steps) for one in request_ids}

    def step_ended(self) -> None:
        """Called after a step's outputs: end the trial if it has shown that the suspect does not kill cores."""
        self._num_steps += 1
        if self._suspects:
            state = self._output_processor.requests.get(self._suspects[0])
            if state is None or self._is_cleared(state):
                del self._suspects[0]
                self._send_next()

    def _is_cleared(self, state: RequestState) -> bool:
        if state.num_tokens > self._num_tokens_before:
            return True
        return self._num_steps_of(state) > state.num_steps_at_death

    def _num_steps_of(self, state: RequestState) -> int:
        """Return how many steps of the core a request was in."""
        return self._num_steps - self._running.get(state.request.request_id, self._num_steps)

    def core_ended(self) -> dict[str, RequestError]:
        """Find suspects when the core has ended, perhaps before it was ready. Returns the requests to refuse, with
        their errors."""
        crash_errors = self._find_suspects() if self._has_core else {}
        self._send(Trials(len(self._suspects)))
        return crash_errors

    def _find_suspects(self) -> dict[str, RequestError]:
        crash_errors = {}
        on_trial = self._suspects[:1]
        for request_id, state in self._output_processor.requests.items():
            is_in_step = self._is_in_step(state)
            if is_in_step and request_id in on_trial:
                self._suspects.remove(request_id)
                crash_errors[request_id] = RequestError(
                    "the engine died twice while it computed this request, and a third time while it computed the "
                    "request alone; it is refused, as it would end the engine again.",
                    status=500,
                    code="request_kills_engine",
                )
            elif is_in_step and state.num_tokens_at_death == state.num_tokens and request_id not in self._suspects:
                self._suspects.append(request_id)
            state.num_tokens_at_death = state.num_tokens if is_in_step else None
            state.num_steps_at_death = self._num_steps_of(state)
        self._has_core = False
        self._running, self._unsent = {}, {}
        return crash_errors

    def is_suspect(self, request_id: str) -> bool:
        return request_id in self._suspects

    def _is_in_step(self, state: RequestState) -> bool:
        """Return whether the core may have been computing a request, or preparing its grammar, adapter or media."""
        request = state.request
        if request.request_id in self._running:
            return True
        is_prepared = request.params.grammar is None and request.adapter is None and not request.media
        return not (is_prepared or state.num_tokens or request.request_id in self._unsent)

    def _send_next(self) -> None:
        """Send the next suspect that still runs; without one, all requests that wait."""
        while self._suspects:
            state = self._output_processor.requests.get(self._suspects[0])
            if state is not None:
                del self._unsent[state.request.request_id]
                self._num_tokens_before = state.num_tokens
                self._send(state.remainder())
                return
            del self._suspects[0]
        self._send(Trials(0))
        unsent, self._unsent = self._unsent, {}
        for request_id in unsent:
            if (state := self._output_processor.requests.get(request_id)) is not None:
                self._send(state.remainder())
