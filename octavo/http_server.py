"""The HTTP server of a process: uvicorn with `HttpProtocol`'s limits, and with its own way to stop.

A first `stop`, or a signal, drains: requests under way go on. A second one ends the server at once.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from octavo.http_protocol import KEEP_ALIVE_S, HttpProtocol, RequestStarts
from octavo.processes import accepting_several

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class DrainingServer(uvicorn.Server):
    """Calls `drain` when it is to stop. `num_in_flight` returns the number of requests under way."""

    def __init__(
        self, app: Any, num_in_flight: Callable[[], int], refusal: Callable[[int, str, str | None], bytes], *,
        max_connections: int, write_timeout_s: float, signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
        share: Callable[[float], float] = float, **options: Any,
    ) -> None:  # fmt: skip
        """`signals` stop it. `refusal` and `share` are `HttpProtocol`'s, `options` are `uvicorn.Config`'s."""
        protocol = functools.partial(
            HttpProtocol, max_connections=max_connections, write_timeout_s=write_timeout_s, idle={},
            starts=RequestStarts(), refusal=refusal, share=share,
        )  # fmt: skip
        fixed: dict[str, Any] = {
            "loop": "none", "http": protocol, "ws": "none", "lifespan": "off", "interface": "asgi3",
            "log_config": None, "server_header": False,
        }  # fmt: skip
        super().__init__(
            uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=2, **fixed, **options)
        )
        self._num_in_flight, self._signals = num_in_flight, signals
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handlers would raise the signal again after a clean stop, which makes the exit code -15.
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self.stop)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(accepting_several(sockets))

    def stop(self) -> None:
        """Begin to drain; a second call ends the server at once."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self.drain())
        elif not self.force_exit:
            self.force_exit = self.should_exit = True
            logger.warning("stopping at once: %d requests are cut off", self._num_in_flight())

    async def drain(self) -> None:
        """Let requests under way end, and set `should_exit`."""
        self.should_exit = True

    async def is_idle_within(self, seconds: float) -> bool:
        """Wait until no request is under way, at most so long. Return whether none is."""
        deadline = time.monotonic() + seconds
        # Polled, so that a request costs no more than its counting.
        while self._num_in_flight() and time.monotonic() < deadline and not self.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return not self._num_in_flight()
