"""The ways between the stages of a model: what one has made of a step's tokens goes on to the next.

Rows lie in memory that both processes have, which has room for more steps than may be under way, so that nobody waits
for room. A socket says when a step's rows are there, and tells of the other process's end.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.layers.share import WHOLE, Share


class Seat(NamedTuple):
    """A worker's place among those that share a model."""

    stage: int = 0
    num_stages: int = 1
    share: Share = WHOLE  # of each of the stage's layers

    @property
    def number(self) -> int:
        return self.stage * self.share.size + self.share.rank

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.share.size

    def __str__(self) -> str:
        stage = f" of stage {self.stage} of {self.num_stages}" if self.num_stages > 1 else ""
        return f"worker {self.share.rank} of {self.share.size}{stage}"


class Link:
    """One end of the way from a stage's worker to the next stage's worker of the same rank."""

    def __init__(self, memory: int, slots: int, slot_bytes: int, notes: socket.socket, watched: Sequence[int]) -> None:
        """`memory` is a file of `slots` x `slot_bytes` bytes. `watched` are connections to processes without which
        nothing more comes."""
        shared = mmap.mmap(memory, slots * slot_bytes)
        self._slots: NDArray[np.uint8] = np.frombuffer(shared, np.uint8).reshape(slots, slot_bytes)
        self._notes, self._count = notes, 0
        self._poll = select.poll()
        self._poll.register(notes.fileno(), select.POLLIN)
        for connection in watched:
            self._poll.register(connection, 0)  # only that it is hung up

    def send(self, rows: NDArray[np.uint8]) -> None:
        """rows [T, bytes] of the next step."""
        self._next_slot(rows)[:] = rows
        self._notes.sendall(b".")

    def receive(self, rows: NDArray[np.uint8]) -> None:
        """Wait for the rows [T, bytes] of the next step. Raises `ConnectionError` if they are not going to come."""
        events = dict(self._poll.poll())
        if not (events.get(self._notes.fileno(), 0) & select.POLLIN and self._notes.recv(1)):
            raise ConnectionError("a worker of another stage has ended.")
        rows[:] = self._next_slot(rows)

    def _next_slot(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        slot = self._slots[self._count % len(self._slots), : rows.size]
        self._count += 1
        return slot.reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class StageLinks:
    """What a worker has before and behind it; the first stage has nothing before it, the last one nothing behind."""

    before: Link | None = None
    behind: Link | None = None


NO_LINKS = StageLinks()


class LinkEnds(NamedTuple):
    """The ways between a worker and the stages beside its own, as file descriptors (memory, socket)."""

    slots: int
    slot_bytes: int
    before: tuple[int, int] | None
    behind: tuple[int, int] | None

    @property
    def descriptors(self) -> list[int]:
        return [fd for end in (self.before, self.behind) if end is not None for fd in end]

    def open(self, watched: list[int]) -> StageLinks:
        """`watched` are the connections of `Team`."""
        links: list[Link | None] = []
        for end in (self.before, self.behind):
            if end is None:
                links.append(None)
                continue
            memory, notes = end
            links.append(Link(memory, self.slots, self.slot_bytes, socket.socket(fileno=notes), watched))
        return StageLinks(*links)


class Way:
    """Memory and a pair of sockets between a worker and the next stage's."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self.memory = shared_memory(slots * slot_bytes)
        self.start, self.end = socket.socketpair()
        for one in (self.start, self.end):
            os.set_inheritable(one.fileno(), True)

    def let_go(self, keeps_end: bool) -> None:
        """Of what only other processes have to do with."""
        os.close(self.memory)
        self.start.close()
        if keeps_end:
            self.end.detach()
        else:
            self.end.close()


def ends_of(ways: list[list[Way]], seat: Seat) -> LinkEnds:
    """Those of one worker, of the ways by stage that they start from, and by rank."""
    before = ways[seat.stage - 1][seat.share.rank] if seat.stage else None
    behind = ways[seat.stage][seat.share.rank] if seat.stage < len(ways) else None
    slots, slot_bytes = next(((way.slots, way.slot_bytes) for way in (before, behind) if way is not None), (0, 0))
    return LinkEnds(
        slots, slot_bytes, None if before is None else (before.memory, before.end.fileno()),
        None if behind is None else (behind.memory, behind.start.fileno()),
    )  # fmt: skip


def shared_memory(num_bytes: int) -> int:
    """A file of zeros that takes memory only where it is written, and is gone with the last process that has it. Not
    in /dev/shm, of which containers have 64 MB."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("--tensor-parallel-size and --pipeline-parallel-size above 1 need Linux.")
    memory = os.memfd_create("octavo")
    os.set_inheritable(memory, True)
    os.ftruncate(memory, num_bytes)
    return memory
