"""The thread that writes blocks to the folder of the cache on disk, and its queue. `DiskTier` decides which blocks are
queued."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import BlockFiles
from octavo.kv_cache.block_pool import BlockName
from octavo.stats import EngineStats

logger = logging.getLogger(__name__)

_MOST_QUEUED = 10_000  # entries of the queue; beyond this, last-used updates and the files of sessions are dropped
_WARNING_S = 60.0  # between two warnings of the same error
_COUNTERS = ("num_disk_written", "disk_written_bytes", "num_disk_dropped")

_Block = tuple[BlockName, NDArray[np.uint8]]


class BlockWriter(Container[BlockName]):
    """Writes blocks to `files` in the order of the queue, and does tasks in between. As a container it has the blocks
    of the queue, and the one being written.

    The fields change under the lock of `changed`. Without the lock the engine's thread reads single values, and the
    writer's thread changes fields that it alone has."""

    def __init__(self, files: BlockFiles, clock: Callable[[], float]) -> None:
        self._files, self._clock = files, clock
        self.changed = threading.Condition()  # notified when a block or task is queued or done, and at the end
        self.is_closed = False
        self.is_removing_all = False  # all files of the folder are being removed
        self.queued_bytes = 0  # of the blocks of the queue, and of the one being written
        self.write_s = 0.0  # moving average of the thread's processor time for a block
        self._queue: deque[_Block | Callable[[], None]] = deque()
        self._queued: dict[BlockName, NDArray[np.uint8]] = {}
        self._keep_until: dict[BlockName, float] = {}  # `time.time`, for pinned blocks: they are not written yet
        self._is_writing = False
        self._stats = EngineStats()
        self._last_error, self._next_warning = "", 0.0  # of the thread
        self._thread = threading.Thread(target=self._run, name="block-writer", daemon=True)
        self._thread.start()

    def __contains__(self, name: object) -> bool:
        return name in self._queued

    @property
    def num_blocks(self) -> int:
        return len(self._queued)

    @property
    def is_idle(self) -> bool:
        return not (self._queue or self._is_writing)

    def take_stats(self, stats: EngineStats) -> None:
        """Add the increments of the counters since the last call."""
        with self.changed:
            own, self._stats = self._stats, EngineStats()
        for name in _COUNTERS:
            setattr(stats, name, getattr(own, name))

    def count_dropped(self) -> None:
        """Count a block as lost that is not written."""
        with self.changed:
            self._stats.num_disk_dropped += 1

    def is_pinned(self, name: BlockName) -> bool:
        return name in self._keep_until

    def pin(self, names: Iterable[BlockName], keep_until: float) -> None:
        """Have blocks that are not written yet kept in the folder until `time.time` is `keep_until`, or longer if they
        are pinned for longer."""
        with self.changed:
            for name in names:
                self._keep_until[name] = max(keep_until, self._keep_until.get(name, 0.0))

    def unpin(self, name: BlockName) -> None:
        with self.changed:
            self._keep_until.pop(name, None)

    def enqueue(self, name: BlockName, contents: NDArray[np.uint8]) -> None:
        with self.changed:
            self._queue.append((name, contents))
            self._queued[name] = contents
            self.queued_bytes += contents.nbytes
            self.changed.notify_all()

    def enqueue_task(self, work: Callable[[], None], may_skip: bool = False) -> None:
        """Have the thread do `work` after everything queued before. With `may_skip` drop it if the queue is too
        long."""
        if may_skip and len(self._queue) >= _MOST_QUEUED:
            return
        with self.changed:
            self._queue.append(work)
            self.changed.notify_all()

    def remove_all(self) -> None:
        """Drop the queue, and have the thread remove all files of the folder."""
        with self.changed:
            self._keep_until.clear()
            self._queue.clear()  # tasks too: the files they are about are removed; peers' copies wait for their time
            self._queued.clear()
            self.queued_bytes = 0
            self.is_removing_all = True
            self.enqueue_task(self._remove_all)

    def _remove_all(self) -> None:
        try:
            self._files.remove_all()
        finally:
            with self.changed:
                self.is_removing_all = False

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and everything is done, or `close` was called. Returns whether it is so."""
        with self.changed:
            return self.changed.wait_for(lambda: self.is_idle or self.is_closed, timeout_s)

    def close(self, waits: bool) -> None:
        """End the thread after what is queued. With `waits`, wait for its end: if the disk hangs, there is none."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if waits:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self.changed:
                self._is_writing = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._queue or self.is_closed)
                if not self._queue:
                    return
                item = self._queue.popleft()
                self._is_writing = True
            try:
                if isinstance(item, tuple):
                    self._write_block(*item)
                else:
                    with contextlib.suppress(OSError):  # if the disk fails, later blocks report it
                        item()
            except Exception:  # the thread must go on: the engine waits for it
                logger.exception("the cache on disk could not be changed")

    def _write_block(self, name: BlockName, contents: NDArray[np.uint8]) -> None:
        begin, keep_until, latest = time.thread_time(), self._keep_until.get(name, 0.0), 0.0
        is_written = self.write_file(name, contents, keep_until)
        with self.changed:
            self.write_s += (time.thread_time() - begin - self.write_s) / 8
            # `remove_all` may have dropped it meanwhile, and the engine's thread may have queued it again.
            if self._queued.get(name) is contents:
                del self._queued[name]
                self.queued_bytes -= contents.nbytes
                latest = self._keep_until.pop(name, 0.0)
            self._stats.num_disk_written += is_written
            self._stats.disk_written_bytes += contents.nbytes * is_written
        if latest > keep_until:  # pinned during the write
            self._files.keep([name], latest)

    def write_file(self, name: BlockName, contents: NDArray[np.uint8], keep_until: float = 0.0) -> bool:
        """Write a block, in the writer's thread. Returns False, and counts the block as dropped, if the folder does not
        take it."""
        error, is_written = "", False
        try:
            is_written = self._files.write(name, contents, keep_until)
        except Exception as e:
            error = (isinstance(e, OSError) and e.strerror) or repr(e)
        now = self._clock()
        if error and (error != self._last_error or now >= self._next_warning):
            logger.warning("blocks of the KV cache are not kept on disk: %s", error)
            self._last_error, self._next_warning = error, now + _WARNING_S
        if not is_written:
            self.count_dropped()
        return is_written
