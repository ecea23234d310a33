"""Node 0's view of a group of nodes: it waits for the others, checks that they fit, and notices when one is lost."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, Self

from octavo.config import EngineConfig
from octavo.distributed.connection import release, send_message, show_address
from octavo.distributed.heartbeat import Heartbeat
from octavo.distributed.listener import Caller, Listener, Member, has_gone, refuse
from octavo.distributed.messages import Control, Ended, GroupReady, Join, Joined, Refused, Rows
from octavo.distributed.node_settings import difference, settings_of
from octavo.errors import ConfigError, LoadError
from octavo.node_token import TOKEN_VARIABLE, check_token, group_token
from octavo.version import __version__

logger = logging.getLogger(__name__)

_FIRST_NOTICE_S, _NOTICE_S = 5.0, 30.0  # when to log which nodes are missing
_LOSS_CHECK_S = 0.2


class Loss(NamedTuple):
    """The loss of a node, in words."""

    for_clients: str  # without names of hosts and addresses
    for_log: str

    def __str__(self) -> str:
        return self.for_log


class Starter(Protocol):
    """Starts the other nodes, if the user does not."""

    def start(self, fail: Callable[[int, str, str], None]) -> None:
        """Start the nodes. Any thread calls `fail` when a node will not join or has ended, with its rank, what
        happened, and details for the log."""

    def close(self) -> None:
        """End the remaining nodes. May be called twice."""


class NodeGroup:
    """A group of nodes. `gather` makes it, and returns when it is complete."""

    def __init__(self, config: EngineConfig, starter: Starter | None = None) -> None:
        """Raises `ConfigError` if this host cannot listen at the address."""
        self._starter = starter
        self._nodes, self._settings = config.nodes, settings_of(config)
        self._size = config.tensor_parallel_size
        self._num_seats = config.pipeline_parallel_size * self._size
        self._session = os.urandom(16)
        self._members: dict[int, Member] = {}
        self._heartbeats: list[Heartbeat] = []
        self.controls: dict[int, int] = {}  # by number of the worker: the descriptor of its connection
        self.links: list[int] = []  # by rank: descriptors of connections from the last node's last stage
        self.lost: Loss | None = None
        self._acts: list[Callable[[Loss], None]] = []
        self._lock = threading.Lock()
        self._is_closed = self._is_ready = False
        self._callers: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        check_token(self._nodes.master_addr, "--master-addr")
        address = self._nodes.master_addr, self._nodes.master_port
        try:
            self._door = Listener(address, self._callers.put)
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen at {show_address(address)}: {error.strerror or error}. --master-addr must be an "
                "address of this host, and no other node 0 may be there."
            ) from None
        secret = f"a token of {TOKEN_VARIABLE}" if group_token() else "no token"
        logger.info("node 0 of %d listens at %s, with %s", self._nodes.size, show_address(address), secret)

    @classmethod
    def gather(cls, config: EngineConfig, starter: Starter | None = None) -> Self:
        """Wait for all nodes and return the complete group. Raises `ConfigError` for a node that does not fit,
        `LoadError` for a node that is lost."""
        group = cls(config, starter)
        try:
            if starter is not None:
                starter.start(group._lose)
            group._wait_for_nodes()
            group._wait_for_connections()
        except BaseException as error:
            group.close(str(error))
            raise
        threading.Thread(target=group._turn_away, name="late nodes", daemon=True).start()
        return group

    def on_loss(self, act: Callable[[Loss], None]) -> None:
        """Have `act` called, by any thread, when a node is lost; immediately if a node is lost already."""
        with self._lock:
            self._acts.append(act)
            lost = self.lost
        if lost is not None:
            act(lost)

    def be_ready(self) -> None:
        """Tell the nodes that all workers have loaded, and shorten the allowed silence."""
        self._is_ready = True
        for heartbeat in self._heartbeats:
            heartbeat.be_strict()
            heartbeat.say(GroupReady())

    def close(self, error: str | None = None) -> None:
        """Tell the other nodes that the group has ended and why, and end them if a starter has started them. May be
        called twice."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        reason = error or "node 0 has ended"
        for heartbeat in self._heartbeats:
            heartbeat.close(Ended(reason, is_over=self._is_ready))
        if not self._heartbeats:
            for member in self._members.values():
                refuse(member.connection, Refused(reason))
        self._door.close()
        if self._starter is not None:
            self._starter.close()

    def _wait_for_nodes(self) -> None:
        next_notice = time.monotonic() + _FIRST_NOTICE_S
        while missing := [rank for rank in range(1, self._nodes.size) if rank not in self._members]:
            caller = self._next_caller()
            if caller is None:
                if time.monotonic() > next_notice:
                    next_notice += _NOTICE_S
                    logger.warning(
                        "node 0 waits for node %s of %d to join at %s", ", ".join(map(str, missing)), self._nodes.size,
                        show_address((self._nodes.master_addr, self._nodes.master_port)),
                    )  # fmt: skip
                continue
            if isinstance(caller.message, Join):
                self._take(Member("node", caller.message, caller.connection, caller.host))
            else:
                caller.connection.close()  # from an earlier group
        for rank, member in sorted(self._members.items()):
            behind = self._members.get(rank + 1)
            address = None if behind is None else (behind.host, behind.join.link_port)
            try:
                send_message(member.connection, Joined(self._session, address))
            except OSError as error:
                raise LoadError(f"{member} is gone: {error.strerror or error}.") from None
            lose = partial(self._lose, rank)
            self._heartbeats.append(Heartbeat(member.connection, str(member), lambda news: None, lose))

    def _take(self, member: Member) -> None:
        """Let a node join, or refuse it. Raises `ConfigError` if it does not fit."""
        join = member.join
        wrong = None
        if join.version != __version__:
            wrong = f"it is Octavo {join.version}, and node 0 {__version__}"
        elif join.num_nodes != self._nodes.size:
            wrong = f"its --nnodes is {join.num_nodes}, and node 0's {self._nodes.size}"
        elif not 0 < join.rank < self._nodes.size:
            wrong = f"its --node-rank must be 1 to {self._nodes.size - 1}"
        elif found := difference(self._settings, join.settings):
            wrong = found
        if wrong is not None:
            refuse(member.connection, Refused(wrong))
            raise ConfigError(f"{member} cannot join: {wrong}.")
        other = self._members.get(join.rank)
        if other is not None and not has_gone(other.connection):
            logger.warning("%s is turned away: there is %s", member, other)
            refuse(member.connection, Refused(f"there is {other} already", may_pass=True))
            return
        logger.info("%s has joined", member)
        self._members[join.rank] = member

    def _wait_for_connections(self) -> None:
        """Wait for the connections of the other nodes' workers, and for the connections that carry rows."""
        own = self._num_seats // self._nodes.size
        links: dict[int, int] = {}
        while len(self.controls) < self._num_seats - own or len(links) < self._size:
            caller = self._next_caller()
            if caller is None:
                continue
            match caller.message:
                case Control(self._session, worker_rank) if (
                    0 <= worker_rank < self._num_seats - own and worker_rank not in self.controls
                ):
                    self.controls[worker_rank] = release(caller.connection)
                case Rows(self._session, rank) if 0 <= rank < self._size and rank not in links:
                    links[rank] = release(caller.connection)
                case _:
                    self._refuse_late(caller)
        self.links = [links[rank] for rank in range(self._size)]

    def _next_caller(self) -> Caller | None:
        """Return the next caller, or None if there is none within `_LOSS_CHECK_S`. Raises `LoadError` if a node is
        lost."""
        if self.lost is not None:
            raise LoadError(f"{self.lost}.")
        try:
            return self._callers.get(timeout=_LOSS_CHECK_S)
        except queue.Empty:
            return None

    def _turn_away(self) -> None:
        while not self._is_closed:
            self._refuse_late(self._callers.get())

    def _refuse_late(self, caller: Caller) -> None:
        if isinstance(caller.message, Join):
            rank = caller.message.rank
            there = self._members.get(rank, f"no node {rank}, but the group is complete")
            logger.warning(
                "node %d (%s, %s) is turned away: there is %s", rank, caller.message.host, caller.host, there
            )
            refuse(caller.connection, Refused(f"there is {there} already", may_pass=True))
        else:
            caller.connection.close()

    def _lose(self, rank: int, why: str, details: str = "") -> None:
        with self._lock:
            if self._is_closed or self.lost is not None:
                return
            member = self._members.get(rank)
            where = "" if member is None else f" ({member.join.host}, {member.host})"
            self.lost = loss = Loss(f"node {rank} {why}", f"node {rank}{where} {why}{details}")
            acts = list(self._acts)
        logger.error("%s", loss)
        for heartbeat in self._heartbeats:
            heartbeat.say(Ended(str(loss)))
        for act in acts:
            act(loss)
