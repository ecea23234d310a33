"""The front end's side of the wire: starts a core process, sends messages to it, and notices when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from octavo import logs
from octavo.config import EngineConfig
from octavo.engine import wire
from octavo.errors import EngineDeadError, OctavoError
from octavo.hardware import with_devices
from octavo.processes import child_command

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0
_POLL_MS = 20  # between checks whether a core that has not connected yet has ended
_READ_S = 0.001  # of a turn of the event loop; longer than streams get, so that a fast engine's messages do not pile up
_MAX_PATH_BYTES = 98  # of the sockets' folder; a socket's path, with "/out", has at most 103 bytes (macOS)


class CoreProcess:
    """A core process that does its imports while its parent makes the configuration."""

    _is_configured = _has_disk = False
    _ends_by = 0.0  # the latest time of its end, once it has been told to end

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to this process's variables."""
        command = child_command("octavo.engine.core_process", str(time.monotonic()), logs.current_format())
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | (environment or {}))

    def configure(self, args: wire.CoreProcessArgs) -> None:
        """Send the configuration."""
        assert self.process.stdin is not None
        self._is_configured, self._has_disk = True, args.config.cache.disk is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `CoreClient.receive` notices
            self.process.stdin.write(msgspec.json.encode(args) + b"\n")
            self.process.stdin.flush()

    def begin_close(self, saving_s: float = wire.STOP_S) -> None:
        """Tell the process to end and how long it may save blocks, without a wait. A second call does nothing."""
        stdin = self.process.stdin
        if stdin is None or stdin.closed:
            return
        self._ends_by = time.monotonic() + EXIT_GRACE_S + (saving_s if self._has_disk else 0.0)
        with contextlib.suppress(BrokenPipeError):
            if self._is_configured:
                stdin.write(b"%g\n" % saving_s)
            stdin.close()

    def close(self) -> None:
        """End the process, by force if needed. May be called twice."""
        self.begin_close()
        try:
            self.process.wait(max(0.0, self._ends_by - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("the engine core did not exit in time and is killed")
            self.process.kill()
            self.process.wait()


class Core(Protocol):
    """What `Supervisor` needs of a core. `CoreClient` says what each does."""

    comes_again: bool  # its host starts it again after each death

    @property
    def loading_since(self) -> float | None: ...
    def send(self, message: wire.FrontendMessage) -> None: ...
    async def receive(self, handle: Callable[[wire.CoreMessage], None]) -> None: ...
    def end(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> None: ...
    def end_reason(self) -> str: ...
    def successor(self) -> CoreProcess | None: ...
    def begin_close(self, saving_s: float) -> None: ...
    def close(self) -> None: ...


class CoreClient:
    """A running core process. `send` may be called from the event loop's thread only."""

    comes_again = False

    def __init__(self, config: EngineConfig, core: CoreProcess | None = None) -> None:
        self.loading_since: float | None = time.monotonic()
        self._environment = _environment(config)
        self._core = core = core or CoreProcess(self._environment)
        self.process = core.process
        try:
            self._folder = _make_socket_folder()
        except OctavoError:
            core.close()
            raise
        self._context = zmq.Context()
        self._reading_loop: asyncio.AbstractEventLoop | None = None
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.setsockopt(zmq.SNDHWM, 0)  # a send never blocks the event loop
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.setsockopt(zmq.RCVHWM, 0)
        # Closes the sockets before the context if nobody calls `close`: a context waits for ever for open sockets.
        self._free_sockets = weakref.finalize(self, _free_sockets, self._context, self._sender, self._receiver)
        core_input, core_output = f"ipc://{self._folder.name}/in", f"ipc://{self._folder.name}/out"
        self._end_path = Path(self._folder.name, "end")
        self._sender.bind(core_input)
        self._receiver.bind(core_output)
        self._unsent: list[bytes] | None = None  # after the first message of a turn: the further ones
        self._may_send = False  # once the core's end of `_sender` is connected
        log_level = logging.getLogger("octavo").getEffectiveLevel()
        core.configure(wire.CoreProcessArgs(config, core_input, core_output, str(self._end_path), log_level))

    def send(self, message: wire.FrontendMessage) -> None:
        """Send a message. Raises `EngineDeadError` if there is no core."""
        self.send_data(wire.encode_message(message))

    def send_data(self, data: bytes) -> None:
        """`send` for an encoded message. The first message of a turn of the event loop goes at once. Further ones go
        together, because each sending wakes ZeroMQ's thread and the core: eight chats that arrive at once would pay an
        eighth of their time for it."""
        if self._unsent is not None:
            self._unsent.append(data)
            return
        try:
            self._sender.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as e:
            raise EngineDeadError(f"the engine core cannot be reached ({e}).") from None
        if self._reading_loop is not None:
            self._unsent = []
            self._reading_loop.call_soon(self._send_rest)

    def _send_rest(self) -> None:
        """Send the further messages of a turn, as parts of one message: the core reads part by part. They are lost if
        the core has ended since."""
        unsent, self._unsent = self._unsent, None
        if unsent and not self._sender.closed:
            with contextlib.suppress(zmq.ZMQError):
                self._sender.send_multipart(unsent, zmq.NOBLOCK)

    async def receive(self, handle: Callable[[wire.CoreMessage], None]) -> None:
        """Call `handle` with every message, until cancelled or until the process has ended and its last message is
        read. `handle` may send.

        After some milliseconds of messages the event loop gets a turn. An error of `handle` ends `receive`.
        """
        await self.receive_data(lambda data: handle(wire.decode_core_message(data)))

    async def receive_data(self, handle: Callable[[bytes], None]) -> None:
        """`receive` for encoded messages."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        next_turn: asyncio.Handle | None = None

        def read() -> None:
            nonlocal next_turn
            if next_turn is not None:  # the descriptor may report a message before the next turn
                next_turn.cancel()
                next_turn = None
            end = time.monotonic() + _READ_S
            try:
                while not failed.done() and wire.is_readable(self._receiver):
                    self._wait_until_it_hears()
                    handle(self._receiver.recv())
                    if time.monotonic() >= end:
                        next_turn = loop.call_soon(read)
                        return
            except Exception as e:
                failed.set_exception(e)

        ended = asyncio.ensure_future(wait_for_exit(self.process))
        self._reading_loop = loop
        loop.add_reader(self._receiver.fileno(), read)
        try:
            read()  # ZeroMQ's descriptor reports only messages that arrive after a read
            await asyncio.wait((failed, ended), return_when=asyncio.FIRST_COMPLETED)
            if not failed.done():
                await asyncio.wait((failed,), timeout=0.1)  # for its last message
            while not failed.done() and wire.is_readable(self._receiver):
                read()
                await asyncio.sleep(0)
            if failed.done():
                failed.result()
        finally:
            self._stop_reading()
            failed.cancel()  # `read` may be waiting for its turn
            ended.cancel()

    def _wait_until_it_hears(self) -> None:
        """Wait until the core is connected to `_sender`, or has ended. The core connects both sockets before its first
        message, but ZeroMQ may accept them in either order, and a message sent in between is lost. The event loop is
        held for microseconds, once."""
        while not self._may_send:
            self._may_send = bool(self._sender.poll(_POLL_MS, zmq.POLLOUT)) or self.process.poll() is not None

    def end(self) -> None:
        """End the process and free its memory. Its last messages are still received."""
        self._core.begin_close()

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        """Return when the process has ended."""
        self.process.wait()

    def successor(self) -> CoreProcess | None:
        """Start the process that the next core will use, once this one has ended."""
        return CoreProcess(self._environment)

    def end_reason(self) -> str:
        """Say why the process has ended, in words for clients. To be called before `close`."""
        try:
            why = self._end_path.read_text(encoding="utf-8")
        except OSError:
            why = f"exit status {self.process.returncode}"
        return f"the engine core has ended ({why})"

    def _stop_reading(self) -> None:
        if self._reading_loop is not None and not self._reading_loop.is_closed():
            self._reading_loop.remove_reader(self._receiver.fileno())
        self._reading_loop = None

    def begin_close(self, saving_s: float) -> None:
        """Tell the process that the server ends, and how long it may save blocks, without a wait."""
        self._core.begin_close(saving_s)

    def close(self) -> None:
        """End the process and free the sockets. May be called twice."""
        self._core.close()
        self._stop_reading()
        self._free_sockets()
        self._folder.cleanup()


def saving_s(stopping_since: float | None) -> float:
    """Return the seconds that a core may save blocks when it ends now. Its server has begun to stop at
    `stopping_since`, or not at all."""
    return (
        wire.STOP_S
        if stopping_since is None
        else max(wire.LEAST_SAVING_S, stopping_since + wire.STOP_S - time.monotonic())
    )


def _free_sockets(context: zmq.Context[zmq.Socket[bytes]], *sockets: zmq.Socket[bytes]) -> None:
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def _environment(config: EngineConfig) -> dict[str, str]:
    """Return the variables that give each engine of a host devices of its own."""
    if config.device != "cuda" or not config.place:
        return {}
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    return with_devices(range(config.place * size, (config.place + 1) * size))


def _make_socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that only this user can enter; it is removed with the object that holds it, or at exit."""
    parent = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0] or None  # set by systemd
    try:
        folder = tempfile.TemporaryDirectory(prefix="octavo-", dir=parent)
    except OSError as error:
        raise OctavoError(
            f"there is no folder to write the engine's sockets to ({error.strerror}); let TMPDIR name one, or give the "
            "systemd unit PrivateTmp=yes or RuntimeDirectory=octavo."
        ) from None
    if len(os.fsencode(folder.name)) > _MAX_PATH_BYTES:
        folder.cleanup()
        raise OctavoError(
            f"the path {folder.name} is too long for sockets; set TMPDIR to a folder with a shorter path."
        )
    return folder


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Return when the process has ended: by its file descriptor on Linux, by polling elsewhere."""
    if not hasattr(os, "pidfd_open"):
        while process.poll() is None:  # noqa: ASYNC110 (nothing signals the end here)
            await asyncio.sleep(0.1)
        return
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _set_once, ended)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
