"""A node other than node 0 (`octavo serve --headless`): joins the group, starts its workers, and joins again when the
group has broken, until node 0 ends for good. This process computes nothing, so that its heartbeat never waits."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from octavo.config import EngineConfig
from octavo.distributed.connection import (
    HANDSHAKE_S,
    HandshakeError,
    accept,
    connect,
    listen,
    receive_message,
    release,
    send_message,
    show_address,
)
from octavo.distributed.heartbeat import Heartbeat
from octavo.distributed.joining import join, receive_answer
from octavo.distributed.messages import Answer, Control, Ended, Join, Joined, News, Rows
from octavo.distributed.node_settings import settings_of
from octavo.errors import LoadError
from octavo.execution.host_workers import HostWorkers, end_processes
from octavo.execution.stage_links import WorkerRank
from octavo.models.description import ModelDescription
from octavo.models.registry import describe
from octavo.node_token import check_token, group_token
from octavo.version import __version__

logger = logging.getLogger(__name__)

_WORKER_GRACE_S = 5.0


class _End(NamedTuple):
    """How this node's membership has ended."""

    reason: str
    is_over: bool = False  # for good


class Node:
    """A node other than node 0."""

    def __init__(self, config: EngineConfig, ready_timeout_s: float | None) -> None:
        """Raises `ConfigError` if a token is needed and there is none, and `LoadError` for files that cannot be
        read."""
        check_token(config.nodes.master_addr, "--master-addr")
        self._config, self._ready_timeout_s = config, ready_timeout_s
        model = config.model
        self._description = describe(model.checkpoint.config, model.impl, model.code_folder, model.pooling)
        self._settings = settings_of(config)
        self._address = config.nodes.master_addr, config.nodes.master_port
        self._host = socket.gethostname()
        self._was_ready = False

    def __str__(self) -> str:
        return f"node {self._config.nodes.rank} ({self._host})"

    def run(self, rejoins: bool = True) -> None:
        """Return when node 0 has ended for good; without rejoining, when the first group breaks. Raises `ConfigError`
        or `LoadError` if this node cannot join, or if its first group does not become ready."""
        while True:
            with _Membership(self._config, self._description) as membership:
                joined = self._join(membership)
                end = membership.serve(joined, self._become_ready)
            if not self._was_ready and not end.is_over:
                raise LoadError(f"{self}: the group has not got ready: {end.reason}.")
            if end.is_over or not rejoins:
                logger.info("%s ends: %s", self, end.reason)
                return
            logger.error("%s has left the group: %s; it joins again", self, end.reason)

    def _become_ready(self) -> None:
        self._was_ready = True
        logger.info("%s: all workers of the group are ready", self)

    def _join(self, membership: _Membership) -> Joined:
        """Ask node 0 again and again until all nodes have joined."""

        def ask(deadline: float | None) -> Answer:
            return membership.ask(self._address, self._host, self._settings, deadline)

        return join(str(self), self._address, ask, self._ready_timeout_s)


class _Membership:
    """A node's membership in one group: its connections and worker processes."""

    def __init__(self, config: EngineConfig, description: ModelDescription) -> None:
        self._config, self._description = config, description
        self._nodes, self._size = config.nodes, config.tensor_parallel_size
        self._ends: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        self._listener: socket.socket | None = None  # accepts rows from the node before; None in node 1
        self._heartbeat: Heartbeat | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = _End("it was told to stop")

    def __enter__(self) -> _Membership:
        return self

    def __exit__(self, *error: object) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close(Ended(self._end.reason))
        for one in (self._connection, self._listener):
            if one is not None:
                one.close()
        for process in self._processes:
            process.kill()
        end_processes(self._processes)

    def ask(self, address: tuple[str, int], host: str, settings: dict[str, str], deadline: float | None) -> Answer:
        """Ask node 0 to join, and wait until all nodes have. Raises `OSError` and `EOFError` while there is no node 0,
        and `HandshakeError` if something else answers."""
        for one in (self._connection, self._listener):  # left from the last attempt
            if one is not None:
                one.close()
        self._connection = connection = connect(address, group_token())
        port = 0
        if self._nodes.rank > 1:
            self._listener = listen((connection.getsockname()[0], 0))
            port = self._listener.getsockname()[1]
            logger.info("node %d takes rows at %s", self._nodes.rank, show_address(self._listener.getsockname()[:2]))
        send_message(connection, Join(__version__, self._nodes.size, self._nodes.rank, host, settings, port))
        return receive_answer(connection, deadline)

    def serve(self, joined: Joined, become_ready: Callable[[], None]) -> _End:
        """Connect, start the workers, and wait until the group ends. A thread calls `become_ready` when all nodes'
        workers have loaded."""
        assert self._connection is not None

        def hear(news: News) -> None:
            if isinstance(news, Ended):
                self._ends.put(_End(news.reason, news.is_over))
            else:
                heartbeat.be_strict()
                become_ready()

        def lose(why: str) -> None:
            self._ends.put(_End(f"node 0 {why}"))

        heartbeat = self._heartbeat = Heartbeat(self._connection, "node 0", hear, lose)
        try:
            self._start(joined)
        except (OSError, EOFError, HandshakeError) as error:
            with contextlib.suppress(queue.Empty):  # node 0 may know the reason
                self._end = self._ends.get(timeout=_WORKER_GRACE_S)
                return self._end
            self._end = _End(f"the nodes cannot connect: {error}")
            return self._end
        self._end = self._ends.get()
        return self._end

    def _start(self, joined: Joined) -> None:
        """Open the connections to the other nodes. Raises `OSError`, `EOFError` and `HandshakeError`."""
        token, session = group_token(), joined.session
        address = self._nodes.master_addr, self._nodes.master_port
        behind = joined.next_address or address
        with contextlib.ExitStack() as open_files:  # descriptors are always closed, because this node may try again
            leaving, entering = list[int](), list[int]()
            for rank in range(self._size):
                leaving.append(self._open(behind, token, Rows(session, rank)))
                open_files.callback(os.close, leaving[-1])
            if self._listener is not None:
                entering = self._take_rows(self._listener, session, token)
                for connection in entering:
                    open_files.callback(os.close, connection)
            workers = HostWorkers(self._config, self._description, entering, leaving)
            open_files.pop_all()
            open_files.callback(workers.let_go)
            self._processes = workers.processes
            for worker_rank in workers.worker_ranks:
                control = self._open(address, token, Control(session, worker_rank.number))
                try:
                    workers.start(worker_rank, control)
                finally:
                    os.close(control)
                watcher = threading.Thread(target=self._watch, args=(worker_rank, workers.processes[-1]), daemon=True)
                watcher.start()

    def _open(self, address: tuple[str, int], token: bytes, first: Control | Rows) -> int:
        connection = connect(address, token)
        send_message(connection, first)
        return release(connection)

    def _take_rows(self, listener: socket.socket, session: bytes, token: bytes) -> list[int]:
        """Accept the connections from the node before, by rank. Raises `OSError` if it does not connect."""
        found: dict[int, int] = {}
        try:
            self._accept_rows(listener, session, token, found)
        except BaseException:
            for connection in found.values():
                os.close(connection)
            raise
        return [found[rank] for rank in range(self._size)]

    def _accept_rows(self, listener: socket.socket, session: bytes, token: bytes, found: dict[int, int]) -> None:
        deadline = time.monotonic() + 2 * HANDSHAKE_S
        while len(found) < self._size:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, _ = listener.accept()
            try:
                accept(connection, token)
                first = msgspec.msgpack.decode(receive_message(connection, HANDSHAKE_S), type=Rows)
            except (HandshakeError, EOFError, OSError, msgspec.MsgspecError):
                connection.close()  # not from the node before
                continue
            if first.session == session and 0 <= first.rank < self._size and first.rank not in found:
                found[first.rank] = release(connection)
            else:
                connection.close()

    def _watch(self, worker_rank: WorkerRank, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if status == 0:  # node 0 knows the reason: the worker has sent it, or has seen node 0 end
            time.sleep(_WORKER_GRACE_S)
        self._ends.put(_End(f"{worker_rank} ended with status {status}"))


def run_node(config: EngineConfig, ready_timeout_s: float | None) -> None:
    """Run a node until node 0 ends for good. See `Node.run`."""
    Node(config, ready_timeout_s).run()
