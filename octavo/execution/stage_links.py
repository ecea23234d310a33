"""The links between pipeline stages: each sends its hidden states of a step to the next.

On one host rows are in shared memory (`SharedLink`) with room for more steps than may be in flight, so that no stage
waits for room. A socket signals that a step's rows are there, or that the other process has ended. Between hosts rows
go over TCP (`TcpLink`); a thread sends them, so that the stage does not wait for the network."""

import contextlib
import mmap
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.layers.tensor_parallel import WHOLE, Shard

_HEADER = struct.Struct("<QQ")  # before a step's rows over TCP: number of the step, bytes
HUNG_UP = getattr(select, "POLLRDHUP", 0)  # must be asked for; POLLHUP, of sockets within a host, is always reported


class WorkerRank(NamedTuple):
    """A worker's place among the workers of a model: its pipeline stage, and its shard of the stage's layers.

    Each node has equally many consecutive stages: node 1 has the first ones, and node 0 the last ones, as the first
    worker of the last stage runs in the engine core's process."""

    stage: int = 0
    num_stages: int = 1
    shard: Shard = WHOLE  # of the stage's layers
    num_nodes: int = 1

    @property
    def number(self) -> int:
        return self.stage * self.shard.size + self.shard.rank

    @property
    def node(self) -> int:
        return (self.stage // (self.num_stages // self.num_nodes) + 1) % self.num_nodes

    @property
    def stages_of_node(self) -> range:
        """The stages of the worker's node."""
        num_stages = self.num_stages // self.num_nodes
        first = self.stage // num_stages * num_stages
        return range(first, first + num_stages)

    @property
    def on_host(self) -> Shard:
        """Return the worker's index among the workers of its node."""
        num_workers = self.num_stages // self.num_nodes * self.shard.size
        return Shard(self.number % num_workers, num_workers)

    @property
    def compiles(self) -> bool:
        """Return whether the worker compiles kernels for all workers of its node. On node 0 that is the first worker of
        the last stage."""
        return self.number == (self.num_stages - 1) * self.shard.size if self.node == 0 else self.on_host.rank == 0

    def __str__(self) -> str:
        stage = f" of stage {self.stage} of {self.num_stages}" if self.num_stages > 1 else ""
        node = f" on node {self.node}" if self.num_nodes > 1 else ""
        return f"worker {self.shard.rank} of {self.shard.size}{stage}{node}"


def worker_ranks_of(num_stages: int, size: int, num_nodes: int) -> list[WorkerRank]:
    """Return the ranks of all workers, in order of their numbers."""
    return [
        WorkerRank(stage, num_stages, Shard(rank, size), num_nodes)
        for stage in range(num_stages)
        for rank in range(size)
    ]


class Link(Protocol):
    """One end of the link from a worker to the worker of the same rank in the next stage."""

    def send(self, rows: NDArray[np.uint8]) -> None:
        """Send the rows [T, bytes] of the next step. Raises `OSError` if the other end is closed."""

    def receive(self, rows: NDArray[np.uint8]) -> None:
        """Wait for the rows [T, bytes] of the next step. Raises `OSError` if the other end is closed."""


class _Watched:
    """A connection to read from while certain other processes live."""

    def __init__(self, connection: socket.socket, watched: Sequence[int]) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        for other in watched:
            self._poll.register(other, HUNG_UP)  # watches only for the end of the process

    def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer. Raises `ConnectionError` if one of the processes has ended."""
        while buffer:
            events = dict(self._poll.poll())
            count = 0
            if events.get(self._connection.fileno(), 0) & select.POLLIN:
                count = self._connection.recv_into(buffer)
            if not count:
                raise ConnectionError("a worker of another stage has ended.")
            buffer = buffer[count:]


class SharedLink:
    """A `Link` within a host."""

    def __init__(self, memory: int, slots: int, slot_bytes: int, notes: socket.socket, watched: Sequence[int]) -> None:
        """`memory` is a file of `slots` x `slot_bytes` bytes. `watched` are connections to processes: if one ends, no
        more rows come."""
        shared = mmap.mmap(memory, slots * slot_bytes)
        self._slots: NDArray[np.uint8] = np.frombuffer(shared, np.uint8).reshape(slots, slot_bytes)
        self._notes, self._count = notes, 0
        self._watched = _Watched(notes, watched)

    def send(self, rows: NDArray[np.uint8]) -> None:
        self._next_slot(rows)[:] = rows
        self._notes.sendall(b".")

    def receive(self, rows: NDArray[np.uint8]) -> None:
        self._watched.receive_into(memoryview(bytearray(1)))
        rows[:] = self._next_slot(rows)

    def _next_slot(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        slot = self._slots[self._count % len(self._slots), : rows.size]
        self._count += 1
        return slot.reshape(rows.shape)


class TcpLink:
    """A `Link` between hosts: each step's rows after a header with the number of the step."""

    def __init__(self, connection: socket.socket, watched: Sequence[int]) -> None:
        self._connection, self._count = connection, 0
        self._watched = _Watched(connection, watched)
        self._waiting: queue.SimpleQueue[memoryview] = queue.SimpleQueue()  # at most the steps in flight
        self._num_given = self._num_sent = 0  # steps given to the thread, and sent by it
        self._sender: threading.Thread | None = None

    def send(self, rows: NDArray[np.uint8]) -> None:
        data = memoryview(_HEADER.pack(self._count, rows.nbytes) + rows.tobytes())
        self._count += 1
        if self._num_given == self._num_sent:  # rows that fit in the socket's buffer need no thread
            with contextlib.suppress(BlockingIOError):
                data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
        if not data:
            return
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name="to the next stage", daemon=True)
            self._sender.start()
        self._num_given += 1
        self._waiting.put(data)

    def receive(self, rows: NDArray[np.uint8]) -> None:
        header = bytearray(_HEADER.size)
        self._watched.receive_into(memoryview(header))
        if _HEADER.unpack(header) != (self._count, rows.nbytes):
            raise ConnectionError("a worker of another stage is at another step.")
        self._watched.receive_into(rows.reshape(-1).data)
        self._count += 1

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # the connection to the first worker reports the end too
            while True:
                self._connection.sendall(self._waiting.get())
                self._num_sent += 1


@dataclass(frozen=True, slots=True)
class StageLinks:
    """A worker's links to the previous and the next stage; None at the ends of the pipeline."""

    previous: Link | None = None
    next: Link | None = None

    def hang_up(self) -> None:
        """Close the links to other hosts, so that no stage waits for another."""
        for link in (self.previous, self.next):
            if isinstance(link, TcpLink):
                link.hang_up()


NO_LINKS = StageLinks()


class LinkEnd(NamedTuple):
    """One end of a link, as file descriptors."""

    connection: int
    memory: int | None = None  # None: the connection is TCP


class LinkEnds(NamedTuple):
    """A worker's ends of the links to the previous and the next stage."""

    slots: int
    slot_bytes: int
    previous: LinkEnd | None
    next: LinkEnd | None

    @property
    def descriptors(self) -> list[int]:
        return [fd for end in (self.previous, self.next) if end is not None for fd in end if fd is not None]

    def open(self, watched: list[int]) -> StageLinks:
        """Open the links. `watched` are the connections of `WorkerGroup`."""
        return StageLinks(*(None if end is None else self._open(end, watched) for end in (self.previous, self.next)))

    def _open(self, end: LinkEnd, watched: list[int]) -> Link:
        connection = socket.socket(fileno=end.connection)
        if end.memory is None:
            return TcpLink(connection, watched)
        return SharedLink(end.memory, self.slots, self.slot_bytes, connection, watched)


class LinkPair:
    """The shared memory and the pair of sockets of a link."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._memory = shared_memory(slots * slot_bytes)
        self._sockets = socket.socketpair()
        for one in self._sockets:
            os.set_inheritable(one.fileno(), True)
        self.start, self.end = (LinkEnd(one.fileno(), self._memory) for one in self._sockets)

    def let_go(self, keeps_end: bool = False) -> None:
        """Close descriptors that only other processes use."""
        start, end = self._sockets
        os.close(self._memory)
        start.close()
        if keeps_end:
            end.detach()
        else:
            end.close()


def shared_memory(num_bytes: int) -> int:
    """Return the descriptor of a file of zeros: shared memory that is freed when the last process closes it. It is not
    in /dev/shm, which has only 64 MB in containers."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("--tensor-parallel-size and --pipeline-parallel-size above 1 need Linux.")
    memory = os.memfd_create("octavo")
    os.set_inheritable(memory, True)
    os.ftruncate(memory, num_bytes)
    return memory
