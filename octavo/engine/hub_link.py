"""A front end's side of a hub: the connection to the process that owns the engines (`engine_hub.py`), and the cores
that are reached through it.

The connection carries `wire.py`'s messages between front end and core, and calls in both directions: a front end asks
the hub to control the engines, and the hub asks each front end to do its part.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from octavo.engine.wire import CoreMessage, FrontendMessage, Trials, decode_core_message, encode_message
from octavo.errors import EngineDeadError, OctavoError, RequestError

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.core_client import CoreProcess

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<IH")  # bytes that follow, and their channel
CONTROL = 0xFFFF  # the channel of calls; other channels are ranks of engines

Answering = Callable[..., Awaitable[Any]]


class CoreEnded(msgspec.Struct, tag="core_ended"):
    """The core of an engine has ended. `is_final`: no other core follows."""

    rank: int
    reason: str
    is_final: bool


class Call(msgspec.Struct, tag="call"):
    """Asks the other side to do something. It sends an `Answer` with the same number."""

    number: int
    name: str
    args: dict[str, Any] = {}


class Answer(msgspec.Struct, tag="answer"):
    """The result of a call, or its error. For a `RequestError`, `refusal` has the error's other fields."""

    number: int
    value: Any = None
    error: str | None = None
    refusal: dict[str, Any] | None = None


_Control = CoreEnded | Call | Answer
_encode_control = msgspec.msgpack.Encoder().encode
_decode_control = msgspec.msgpack.Decoder(_Control).decode


class Channels(asyncio.Protocol):
    """One end of a connection between hub and front end: messages by channel, and calls."""

    def __init__(
        self, take: Callable[[int, bytes], None], take_end: Callable[[CoreEnded], None], lose: Callable[[], None]
    ) -> None:
        """`take` is called with the channel and the bytes of each message of a core or to one, `lose` when the
        connection has ended."""
        self._take, self._take_end, self._lose = take, take_end, lose
        self.answering: Mapping[str, Answering] = {}  # what the other side may call
        self._rest = bytearray()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.transport: asyncio.Transport | None = None

    async def open(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are not of this class

    def connection_lost(self, exc: Exception | None) -> None:
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineDeadError("the server's other process has ended."))
        self._asked.clear()
        self._lose()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        begin, rest = 0, self._rest
        while len(rest) - begin >= _HEAD.size:
            length, channel = _HEAD.unpack_from(rest, begin)
            end = begin + _HEAD.size + length
            if len(rest) < end:
                break
            message, begin = bytes(rest[begin + _HEAD.size : end]), end
            if channel == CONTROL:
                self._control(_decode_control(message))
            else:
                self._take(channel, message)
        del rest[:begin]

    def send(self, channel: int, data: bytes) -> None:
        """Send a message without waiting."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(_HEAD.pack(len(data), channel) + data)

    def say(self, message: _Control) -> None:
        """Send a message of the channel of calls."""
        self.send(CONTROL, _encode_control(message))

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    async def call(self, name: str, /, **args: Any) -> Any:
        """Have the other side do something, and return its result. Raises its `OctavoError`, and `EngineDeadError` if
        the connection ends."""
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        if self.transport is None or self.transport.is_closing():
            asked.set_exception(EngineDeadError("the server's other process has ended."))
        self.say(Call(number, name, args))
        try:
            return await asked
        finally:
            self._asked.pop(number, None)

    def tell(self, name: str, /, **args: Any) -> None:
        """Have the other side do something, without waiting. If the connection has ended, nothing is done."""
        self.say(Call(next(self._numbers), name, args))

    def _control(self, message: _Control) -> None:
        match message:
            case CoreEnded():
                self._take_end(message)
            case Call():
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Answer(number, value, error, refusal):
                asked = self._asked.get(number)
                if asked is None or asked.done():
                    return
                if error is None:
                    asked.set_result(value)
                else:
                    asked.set_exception(OctavoError(error) if refusal is None else RequestError(error, **refusal))

    async def _answer(self, call: Call) -> None:
        answer = Answer(call.number)
        try:
            answer.value = await self.answering[call.name](**call.args)
        except RequestError as error:
            answer.error = str(error)
            fields = ("param", "status", "code", "retry_after_s", "details")
            answer.refusal = {name: getattr(error, name) for name in fields}
        except OctavoError as error:
            answer.error = str(error)
        except Exception as error:
            logger.exception("%s failed", call.name)
            answer.error = f"{call.name} failed: {type(error).__name__}."
        self.say(answer)


class HubLink:
    """A front end's connection to its hub. `make_core` makes the cores of its engines."""

    def __init__(self, lose: Callable[[], None] | None = None) -> None:
        """`lose` is called when the hub has ended. By default this process ends then, because it can do nothing without
        a hub."""
        self.channels = Channels(self._take, self._take_end, lose or _end_process)
        self._inboxes: dict[int, _Inbox] = {}

    def make_core(self, config: EngineConfig, core: CoreProcess | None) -> HubCore:
        """Return the present core of the engine of `config`, or the next one."""
        rank = config.data_parallel_rank
        return HubCore(self.channels, rank, self._inbox(rank))

    def _inbox(self, rank: int) -> _Inbox:
        return self._inboxes.setdefault(rank, _Inbox())

    def _take(self, rank: int, data: bytes) -> None:
        self._inbox(rank).put(data)

    def _take_end(self, ended: CoreEnded) -> None:
        self._inbox(ended.rank).put(ended)


def _end_process() -> None:
    """End this process. Its clients notice at once."""
    os._exit(1)


class _Inbox:
    """Messages of one engine's cores, in order. Messages of the next core wait here until `receive` is called."""

    def __init__(self) -> None:
        self.waiting = deque[bytes | CoreEnded]()
        self.read: Callable[[], None] | None = None

    def put(self, message: bytes | CoreEnded) -> None:
        self.waiting.append(message)
        if self.read is not None:
            self.read()


class HubCore:
    """A core of the hub's, until its end. See `CoreClient` for the methods."""

    comes_again = True

    def __init__(self, channels: Channels, rank: int, inbox: _Inbox) -> None:
        self.loading_since: float | None = None  # the hub watches
        self._channels, self._rank, self._inbox = channels, rank, inbox
        self._ended: CoreEnded | None = None

    def send(self, message: FrontendMessage) -> None:
        if self._ended is not None and not isinstance(message, Trials):  # `Trials` is sent after a core's end
            raise EngineDeadError(f"engine {self._rank} cannot be reached.")
        self._channels.send(self._rank, encode_message(message))

    async def receive(self, handle: Callable[[CoreMessage], None]) -> None:
        inbox = self._inbox
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def read() -> None:
            try:
                while inbox.waiting and not ended.done():
                    message = inbox.waiting.popleft()
                    if isinstance(message, CoreEnded):
                        self._ended = message
                        self.comes_again = not message.is_final
                        ended.set_result(None)
                    else:
                        handle(decode_core_message(message))
            except Exception as error:
                ended.set_exception(error)

        inbox.read = read
        try:
            read()
            await ended
        finally:
            inbox.read = None

    def kill(self) -> None:
        """End this front end, which cannot go on: its messages could not be handled. The hub starts it again."""
        _end_process()

    def end(self) -> None:
        """Do nothing: the hub ends cores, once all front ends have done their part."""

    def wait(self) -> None:
        """Do nothing: the hub waits."""

    def end_reason(self) -> str:
        return "the engine core has ended" if self._ended is None else self._ended.reason

    def successor(self) -> CoreProcess | None:
        return None

    def begin_close(self, saving_s: float) -> None:
        """Do nothing: the hub ends cores."""

    def close(self) -> None:
        """Do nothing: all cores share the connection."""
