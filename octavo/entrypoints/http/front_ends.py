"""A server with several front ends (`--api-server-count`): this process owns the port, the engines (`EngineHub`) and
the front ends (`front_end.py`), which it starts, starts again and stops. It serves no request itself.

On Linux each front end has a listening socket of its own for the same port, and the kernel spreads connections over
them; this process keeps the sockets, so that connections wait while a front end is started again. Elsewhere, and with
--uds, all accept from one socket.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from octavo.config import EngineConfig
from octavo.engine.core_client import wait_for_exit
from octavo.engine.engine_hub import EngineHub, FrontEnd
from octavo.engine.restart_policy import RestartPolicy
from octavo.entrypoints.http.front_end import FrontEndArgs
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.shared_counts import SharedCounts, num_bytes
from octavo.errors import ConfigError, OctavoError
from octavo.processes import child_command

logger = logging.getLogger("octavo.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END_S = 5.0  # for a front end to end after its requests


def check_engines(config: EngineConfig, args: ServerArgs) -> None:
    """Raise `ConfigError` for engines that several front ends cannot share."""
    if config.engine_hosts is not None and len(config.served_ranks) > len(config.local_ranks):
        raise ConfigError(
            f"--api-server-count {args.api_server_count}: engines on other hosts have one front end. Leave it out, or "
            "give each host a server of its own (--data-parallel-hybrid-lb)."
        )


@contextlib.contextmanager
def share_port(first: socket.socket, number: int, *, is_path: bool) -> Iterator[list[socket.socket]]:
    """Yield `number` sockets that listen at the address to which `first` is bound. `is_path`: it already listens."""
    if is_path or sys.platform != "linux":
        if not is_path:
            first.listen(2048)
        yield [first] * number
        return
    address = first.getsockname()
    first.close()
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.socket(first.family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            for _ in range(number)
        ]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            for sock in sockets:
                sock.bind(address)
            for sock in sockets:
                sock.listen(2048)
        except OSError as error:  # another process has taken the port meanwhile
            where, why = f"{address[0]}:{address[1]}", error.strerror or error
            raise ConfigError(f"cannot listen at {where}: {why}. Choose another --port or --host.") from None
        yield sockets


@contextlib.contextmanager
def one_store(args: ServerArgs) -> Iterator[tuple[ServerArgs, str | None]]:
    """Yield `args` with a store that front ends can share, and its folder: without --response-store the store is a file
    that is deleted when the server ends. The folder is None if the user names a store."""
    if args.response_store is not None:
        yield args, None
        return
    with tempfile.TemporaryDirectory(prefix="octavo-store-") as folder:
        yield replace(args, response_store=str(Path(folder, "store.sqlite"))), folder


class FrontEnds:
    """The front ends of one server."""

    def __init__(
        self, hub: EngineHub, config: EngineConfig, args: ServerArgs, sockets: Sequence[socket.socket],
        loggers: Sequence[str], store_folder: str | None,
    ) -> None:  # fmt: skip
        self._hub, self._config, self._args, self._sockets = hub, config, args, sockets
        self._loggers, self._store_folder = list(loggers), store_folder
        self._stopping = asyncio.Event()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}  # by place
        self._counts_file = tempfile.TemporaryFile()  # noqa: SIM115 - until `run` has ended
        size = num_bytes(len(sockets), len(config.served_ranks))
        self._counts_file.truncate(size)
        self._counts = mmap.mmap(self._counts_file.fileno(), size)

    async def run(self, watch: Callable[[], Coroutine[None, None, None]]) -> None:
        """Serve until SIGINT or SIGTERM; then the front ends end their requests. Raises `OctavoError` if `watch` does,
        or if a front end ends again and again."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        watching = loop.create_task(watch())
        keeping = {loop.create_task(self._keep(place)) for place in range(len(self._sockets))}
        try:
            stopped = loop.create_task(self._stopping.wait())
            await asyncio.wait({watching, stopped, *keeping}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():  # something has failed
                self.stop()
            await asyncio.wait(keeping, timeout=_END_S + self._args.shutdown_timeout)
        finally:
            self._hub.shutdown()  # front ends end when their connections do
            for task in (watching, *keeping):
                task.cancel()
            ended = await asyncio.gather(watching, *keeping, return_exceptions=True)
            for process in self.processes.values():
                await asyncio.to_thread(_end, process)
            self._counts_file.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    def stop(self) -> None:
        """Have all front ends drain; a second call ends them at once."""
        self._stopping.set()
        self._hub.stop_restarting()
        self._telling = asyncio.ensure_future(self._hub.tell_all("stop"))

    async def _keep(self, place: int) -> None:
        """Run a front end, and start it again when it ends, until the server stops."""
        restarts, has_begun = RestartPolicy(self._args.max_engine_restarts), False
        counts = SharedCounts(self._counts, place, len(self._sockets))
        while not self._stopping.is_set():
            number = self._hub.new_number()
            process, link = await asyncio.to_thread(self._start, place, number)
            front = await self._hub.attach(link, number)
            if self._stopping.is_set():  # `stop` came before it had started
                front.channels.close()
            beginning = asyncio.ensure_future(self._begin(front, restarts))
            await wait_for_exit(process)
            status = await asyncio.to_thread(process.wait)
            has_begun |= beginning.done() and beginning.exception() is None
            beginning.cancel()
            self._hub.detach(front)
            counts.clear()
            if self._stopping.is_set():
                return
            delay_s = restarts.next_delay(time.monotonic()) if has_begun else None
            if delay_s is None:
                raise OctavoError(f"front end {place} has ended (exit status {status}) and the server gives up.")
            logger.error("front end %d has ended (exit status %d); it is being started again", place, status)
            await asyncio.sleep(delay_s)

    async def _begin(self, front: FrontEnd, restarts: RestartPolicy) -> None:
        await self._hub.begin(front)
        restarts.record_ready(time.monotonic())

    def _start(self, place: int, number: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start a front end. Returns its process, and the hub's end of its connection."""
        link, its_link = socket.socketpair()
        with its_link:
            given = FrontEndArgs(
                self._config, self._args, number, place, os.getpid(), self._sockets[place].fileno(), its_link.fileno(),
                self._counts_file.fileno(), self._loggers, self._store_folder,
            )  # fmt: skip
            command = child_command("octavo.entrypoints.http.front_end", str(place))  # for those who list processes
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(given.listening, given.link, given.counts)
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(given) + b"\n")
            process.stdin.close()
        self.processes[place] = process
        return process, link


def _end(process: subprocess.Popen[bytes]) -> None:
    """Return when a process has ended; kill it if it takes long."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
