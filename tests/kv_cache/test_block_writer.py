"""The states of blocks on their way to the folder, as the table of `block_writer` says."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.block_writer import BlockWriter
from octavo.stats import EngineStats

SIZE = 8
NAMES: list[BlockName] = [(0, b"a"), (0, b"b"), (1, b"a")]


class Folder:
    """Files of which the test ends each write."""

    def __init__(self) -> None:
        self.kept: dict[BlockName, float] = {}  # until when, of each block
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.outcome = ""

    def knows(self, name: BlockName) -> bool:
        return name in self.kept

    def write(self, name: BlockName, contents: NDArray[np.uint8], keep_until: float) -> bool:
        self.begun.release()
        self.may_end.acquire()
        if self.outcome == "failed":
            raise OSError(28, "No space left on device")
        if self.outcome == "written":
            self.kept[name] = keep_until
        return self.outcome == "written"

    def keep(self, names: list[BlockName], keep_until: float) -> None:
        self.kept |= {name: max(keep_until, self.kept[name]) for name in names if name in self.kept}

    def remove_all(self) -> None:
        self.kept.clear()


class WriterMachine(RuleBasedStateMachine):
    """Against a list for the queue, whose first entry is being written, and sets and dictionaries for the rest."""

    @initialize()
    def start(self) -> None:
        self.folder = Folder()
        pools: Any = SimpleNamespace(files=self.folder, host_tier=None)
        self.writer = BlockWriter(pools, lambda: 0.0)
        self.unsaved = set[BlockName]()
        self.queue: list[
            list[Any]
        ] = []  # name, whether it counts, and the pin when its write began; name None: removal
        self.pins: dict[BlockName, float] = {}
        self.kept: dict[BlockName, float] = {}
        self.counts = Counter[str]()

    @property
    def queued(self) -> list[BlockName]:
        return [name for name, counts, _ in self.queue if name is not None and counts]

    @property
    def is_removing_all(self) -> bool:
        return any(name is None for name, _, _ in self.queue)

    def begin_next(self) -> None:
        """Let the thread get to its next block."""
        while self.queue and self.queue[0][0] is None:
            self.kept.clear()
            del self.queue[0]
        if self.queue:
            self.queue[0][2] = self.pins.get(self.queue[0][0], 0.0)
            self.folder.begun.acquire()
        else:
            self.writer.wait_until_idle(60.0)

    def put(self, entry: list[Any]) -> None:
        self.queue.append(entry)
        if len(self.queue) == 1:
            self.begin_next()

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: BlockName) -> None:
        self.writer.add(name, 1)
        if name not in self.queued and (self.is_removing_all or name not in self.kept):
            self.unsaved.add(name)
        elif name not in self.queued and name not in self.unsaved:
            self.pins.pop(name, None)

    @precondition(lambda self: self.unsaved)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.unsaved)))
        self.writer.enqueue(name, np.zeros(SIZE, np.uint8))
        self.unsaved.remove(name)
        self.put([name, True, 0.0])

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name: BlockName) -> None:
        self.writer.cancel(name)
        self.unsaved.discard(name)
        self.pins.pop(name, None)

    @precondition(lambda self: self.unsaved)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.unsaved)))
        self.writer.drop(name)
        self.unsaved.remove(name)
        self.pins.pop(name, None)
        self.counts["dropped"] += 1

    @rule(keep_until=st.sampled_from([1.0, 2.0, 3.0]))
    def pin(self, keep_until: float) -> None:
        self.writer.pin_pending(NAMES, keep_until)
        for name in {*self.unsaved, *self.queued}:
            self.pins[name] = max(keep_until, self.pins.get(name, 0.0))

    @rule()
    def remove_all(self) -> None:
        self.writer.remove_all()
        del self.queue[1:]
        for entry in self.queue:  # its write goes on
            entry[1] = False
        self.pins.clear()
        self.put([None, False, 0.0])

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: BlockName) -> None:
        """Another server removes a file."""
        self.kept.pop(name, None)
        self.folder.kept.pop(name, None)

    @precondition(lambda self: self.queue)
    @rule(outcome=st.sampled_from(["written", "refused", "failed"]))
    def end_write(self, outcome: str) -> None:
        name, counts, keep_until = self.queue.pop(0)
        if counts:
            latest = self.pins.pop(name, 0.0)
        if outcome == "written":
            self.kept[name] = max(keep_until, latest) if counts else keep_until
        self.counts["written" if outcome == "written" else "dropped"] += 1
        self.folder.outcome = outcome
        self.folder.may_end.release()
        self.begin_next()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "writer"):
            return
        writer, pending = self.writer, self.unsaved | {*self.queued}
        assert set(writer.unsaved) == self.unsaved and self.folder.kept == self.kept
        assert {name for name in NAMES if writer.is_pending(name)} == pending
        assert writer.num_unwritten == len(pending) and writer.queued_bytes == SIZE * len(self.queued)
        assert {name for name in NAMES if writer.is_pinned(name)} == self.pins.keys() <= pending
        assert writer.is_removing_all == self.is_removing_all
        assert writer.wait_until_saved(0.0) == (not self.unsaved and not self.queue)
        writer.take_stats(stats := EngineStats())
        assert (stats.num_disk_written, stats.num_disk_dropped) == (self.counts["written"], self.counts["dropped"])
        self.counts.clear()

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.folder.may_end.release(100)
            self.writer.close(waits=True)


WriterMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, derandomize=True, deadline=None)
test_blocks_move_as_the_table_says = WriterMachine.TestCase
