"""Brings a request's outputs to its caller. Outputs that a late caller has not got yet are merged in the request's
state, so that no queue grows, and a fast engine has less to send.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from octavo.engine.output_processor import RequestState
from octavo.errors import aborted
from octavo.outputs import Output
from octavo.request import EngineRequest


class Sink(Protocol):
    """Takes outputs when they arrive, without a switch to the caller's task."""

    @property
    def is_open(self) -> bool:
        """Whether it can take an output now."""

    def take(self, state: RequestState) -> None:
        """Take the new output of a request that goes on."""


if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine


class Stage(Enum):
    """How far a request has come. No request goes back."""

    WAITING = auto()  # its engine takes no requests now; it has no `RequestState`
    RUNNING = auto()  # its engine has it in `OutputProcessor.requests`
    ENDED = auto()  # finished, aborted or failed; its caller may still read the last output or the error


class RequestStream:
    """The outputs of one request on their way to its caller or to its `sink`, and the error that comes after them."""

    __slots__ = (
        "_error", "_is_woken", "_sink", "_waiter", "engine", "external_id", "first_completion_token_ids",
        "is_undelivered", "open_waiter", "replayed_outputs", "request", "state",
    )  # fmt: skip

    def __init__(
        self, request: EngineRequest, external_id: str, engine: AsyncLLMEngine, sink: Sink | None = None,
        first_completion_token_ids: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.request, self.external_id = request, external_id
        self.engine = engine  # the engine that computes the request now
        self.open_waiter: asyncio.Future[None] | None = None  # set while `AsyncLLMEngine._send_when_open` waits
        self.first_completion_token_ids = first_completion_token_ids  # the engine appends tokens to it
        self.replayed_outputs: list[Output] = []  # outputs that another server has already sent
        self.state: RequestState | None = None  # from RUNNING on
        self.is_undelivered = False  # the engine will call `deliver`
        self._sink = sink
        self._error: Exception | None = None
        self._is_woken = False
        self._waiter: asyncio.Future[None] | None = None  # a caller waits in `get` and has not been woken

    @property
    def stage(self) -> Stage:
        if self.state is None:
            return Stage.WAITING
        return Stage.ENDED if self.state.is_over else Stage.RUNNING

    def follow(self, state: RequestState) -> None:
        """From now on, bring the outputs of `state`."""
        assert self.state is None, "a request begins to run once"
        self.state, state.stream = state, self

    def close(self) -> None:
        """Detach from the state: nothing is delivered any more."""
        if self.state is not None:
            self.state.stream = None

    def deliver(self) -> None:
        """Give new output to the sink. If the request has ended, if the sink is closed, or if the caller is not done
        with the last output, wake the caller."""
        self.is_undelivered = False
        state, sink = self.state, self._sink
        assert state is not None
        if state.error is not None:
            self.fail(state.error)
        elif not state.has_new_output:  # the caller was faster
            return
        elif sink is None or state.is_over or self._waiter is None or not sink.is_open:
            self.wake()
        else:
            try:
                sink.take(state)
            except Exception as error:
                self.fail(error)

    def wake(self) -> None:
        self._is_woken = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # its caller may be cancelled
            waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Have `get` raise an error, after the outputs before it."""
        if self._error is None:
            self._error = error
        self.wake()

    def fail_without_output(self, error: Exception) -> None:
        """Have `get` raise an error instead of an output that was not delivered."""
        if self.state is not None:
            self.state.has_new_output = False
        self.fail(error)

    def abort(self, stop_reason: str | None = None) -> None:
        """Abort the request and give its caller the last output. A request for vectors has none: it fails."""
        if (state := self.engine.end_request(self, stop_reason)) is None:
            return
        if state.request.pooling is None:
            self.wake()
        else:
            self.fail_without_output(aborted(stop_reason))

    async def get(self) -> Output:
        """Wait for an output. Raises the request's error once everything before it has been read."""
        while True:
            if not self._is_woken:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            self._is_woken = self._error is not None
            if self.state is not None and self.state.has_new_output:
                return self.state.take()
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    del self  # break the reference cycle self → error → traceback → this frame
