"""The blocks that are on their way to the folder of the cache on disk, and the thread that writes them. `DiskTier`
decides which blocks go on, and when.

The states of a block, and what moves it there:

    on device   GPUs only: `HostTier` will copy it       `HostTier.entered`
    unsaved     in a pool, not in the folder             `add`, `add_if_lost`
    queued      a copy of it is in the queue             `enqueue`
    written     the folder has it                        the writer's thread
    dropped     not written; `num_disk_dropped` counts   `drop`, or the thread if the folder does not take the block
    cancelled   not written, and not counted             `cancel`, `remove`, `remove_all`

A block enters a state before it leaves the one above. So a thread that asks for the states from the top down misses no
block, but may see one twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.saved_pools import SavedPools
from octavo.stats import EngineStats

logger = logging.getLogger(__name__)

_MOST_QUEUED = 10_000  # entries of the queue; beyond this, last-used updates and the files of sessions are dropped
_WARNING_S = 60.0  # between two warnings of the same error
_COUNTERS = ("num_disk_written", "disk_written_bytes", "num_disk_dropped")

_Block = tuple[BlockName, NDArray[np.uint8]]


class BlockWriter:
    """Writes blocks to the folder of `pools` in the order of the queue, and does tasks in between.

    The engine's thread makes all calls, except where a docstring names other threads. Fields change under the lock of
    `_changed`. The engine's thread reads them without it: no other thread adds blocks, and the writer's removes only
    what it has written."""

    def __init__(self, pools: SavedPools, clock: Callable[[], float]) -> None:
        self._pools, self._files, self._host_tier, self._clock = pools, pools.files, pools.host_tier, clock
        self._changed = threading.Condition()  # notified when a block changes its state, or a task is queued or done
        self.is_closed = False
        self.is_removing_all = False  # all files of the folder are being removed
        self.queued_bytes = 0
        self.write_s = 0.0  # moving average of the thread's processor time for a block
        # Blocks of the pools, the oldest first; ordered dictionaries lose their first entry in constant time.
        self.unsaved = OrderedDict[BlockName, int]()
        self._saved_first = OrderedDict[BlockName, None]()  # blocks to save before others: unsaved, or on the device
        self._queue: deque[_Block | Callable[[], None]] = deque()
        self._queued: dict[BlockName, NDArray[np.uint8]] = {}  # the blocks of the queue, and the one being written
        self._keep_until: dict[BlockName, float] = {}  # `time.time`; only of pinned blocks that are still pending
        self._is_busy = False  # the thread writes a block or does a task
        self._stats = EngineStats()
        self._last_error, self._next_warning = "", 0.0  # of the thread
        self._thread = threading.Thread(target=self._run, name="block-writer", daemon=True)
        self._thread.start()
        if self._host_tier is not None:
            self._host_tier.watchers.append(self)

    def take_stats(self, stats: EngineStats) -> None:
        """Add the increments of the counters since the last call."""
        with self._changed:
            own, self._stats = self._stats, EngineStats()
        for name in _COUNTERS:
            setattr(stats, name, getattr(own, name))

    # The states of blocks.

    @property
    def num_unwritten(self) -> int:
        """The number of blocks on the device, unsaved or queued. Any thread may ask."""
        with self._changed:
            num_on_device = 0 if self._host_tier is None else self._host_tier.num_uncopied
            return num_on_device + len(self.unsaved) + len(self._queued)

    def is_pending(self, name: BlockName) -> bool:
        """Return whether a block is not written yet: on the device, unsaved or queued."""
        return self._will_be_copied(name) or name in self.unsaved or name in self._queued

    def _will_be_copied(self, name: BlockName) -> bool:
        """Return whether a block of a device is still to be copied to its host, and saved then."""
        return self._host_tier is not None and self._host_tier.copies_later(name) and self._needs_saving(name)

    def _needs_saving(self, name: BlockName) -> bool:
        """Return whether a block is neither queued nor written."""
        # In this order: the thread makes a block known before it takes it from the queue.
        return name not in self._queued and (self.is_removing_all or not self._files.knows(name))

    def add(self, name: BlockName, block: int) -> None:
        """Note that a pool has a block: it is unsaved, unless it is queued or written."""
        with self._changed:
            if self._needs_saving(name):
                self.unsaved[name] = block
            else:
                self._unpin_written(name)

    def add_if_lost(self, name: BlockName) -> None:
        """Have a block of the pools or of the device saved, if the folder has lost it."""
        if not self._needs_saving(name):
            self._unpin_written(name)
        elif (block := self._pools.lookup(name)) is not None:
            self.add(name, block)
        elif self._host_tier is not None and (block := self._pools.cache.pools[name[0]].lookup(name[1])) is not None:
            self._host_tier.entered(name, block)

    def _unpin_written(self, name: BlockName) -> None:
        """Forget the pin of a block that the folder has. `_write_block` forgets the pins of blocks that it writes; it
        never writes a block that was pinned on the device and that another server has written since."""
        if name not in self.unsaved and name not in self._queued:
            self.cancel(name)

    def enqueue(self, name: BlockName, contents: NDArray[np.uint8]) -> None:
        """Have the thread write an unsaved block."""
        with self._changed:
            del self.unsaved[name]
            self._saved_first.pop(name, None)
            self._queue.append((name, contents))
            self._queued[name] = contents
            self.queued_bytes += contents.nbytes
            self._changed.notify_all()

    def cancel(self, name: BlockName) -> None:
        """Do not save a block, unless it is queued already, and keep it no longer."""
        with self._changed:
            self.unsaved.pop(name, None)
            self._saved_first.pop(name, None)
            self._keep_until.pop(name, None)
            self._changed.notify_all()

    def drop(self, name: BlockName) -> None:
        """Do not save an unsaved block, and count it as lost."""
        self.cancel(name)
        with self._changed:
            self._stats.num_disk_dropped += 1

    def remove(self, name: BlockName) -> None:
        """Remove a block from the pools and the device, and do not save it."""
        if self._host_tier is not None:
            self._host_tier.forget(name)
        self.cancel(name)
        if (block := self._pools.lookup(name)) is not None:
            self._pools.pools[name[0]].forget(block)

    def remove_all(self) -> None:
        """Drop the queue, and have the thread remove all files of the folder."""
        with self._changed:
            self._keep_until.clear()
            self._queue.clear()  # tasks too: their files are removed anyway; a peer's copy ends at its time limit
            self._queued.clear()
            self.queued_bytes = 0
            self.is_removing_all = True
            self.enqueue_task(self._remove_all)

    # Called by `HostTier`.

    def not_copied(self, name: BlockName) -> None:
        if self._pools.lookup(name) is not None:
            self.add_if_lost(name)
        else:
            self.cancel(name)

    def all_copied(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # The order of saving, and how long blocks are kept.

    def save_first(self, names: Iterable[BlockName]) -> None:
        """Save these blocks before others."""
        first = [name for name in names if name in self.unsaved or self._will_be_copied(name)]
        with self._changed:
            self._saved_first.update(dict.fromkeys(first))
        if self._host_tier is not None:
            self._host_tier.copy_first(first)

    @property
    def awaits_copies(self) -> bool:
        """Whether a block to save before others is still to be copied from the device."""
        return self._host_tier is not None and any(map(self._host_tier.copies_later, self._saved_first))

    def in_order(self) -> Iterator[BlockName]:
        """Yield the unsaved blocks in the order of saving. Those of `save_first` come twice."""
        return chain(filter(self.unsaved.__contains__, self._saved_first), self.unsaved)

    def is_pinned(self, name: BlockName) -> bool:
        return name in self._keep_until

    def pin_pending(self, names: Iterable[BlockName], keep_until: float) -> None:
        """Have the pending ones of these blocks kept in the folder until `time.time` is `keep_until`, or longer if they
        are pinned for longer."""
        with self._changed:  # none of them is written meanwhile
            for name in filter(self.is_pending, names):
                self._keep_until[name] = max(keep_until, self._keep_until.get(name, 0.0))

    # The queue, and its thread.

    @property
    def is_idle(self) -> bool:
        return not (self._queue or self._is_busy)

    def has_room(self, limit_bytes: int) -> bool:
        """Return whether a queue of up to `limit_bytes` has room for another block. An empty queue takes any block."""
        return self.queued_bytes < limit_bytes and not self.is_closed

    def wait_for_room(self, limit_bytes: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.has_room(limit_bytes), timeout_s)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and everything is done, or `close` was called. Returns whether it is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle or self.is_closed, timeout_s)

    def wait_until_saved(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to write, or `close` was called. Returns whether it is so. Any thread may call
        this, while the engine's thread saves blocks."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (not self.num_unwritten and self.is_idle) or self.is_closed, timeout_s
            )

    def enqueue_task(self, work: Callable[[], None], may_skip: bool = False) -> None:
        """Have the thread do `work` after everything queued before. With `may_skip` drop it if the queue is too
        long. The threads of `PeerBlocks` call this too."""
        if may_skip and len(self._queue) >= _MOST_QUEUED:
            return
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def _remove_all(self) -> None:
        try:
            self._files.remove_all()
        finally:
            with self._changed:
                self.is_removing_all = False

    def close(self, waits: bool) -> None:
        """End the thread after what is queued. With `waits`, wait for its end: if the disk hangs, there is none."""
        assert not self.is_closed, "the writer is closed once"
        if self._host_tier is not None:
            self._host_tier.watchers.remove(self)
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        if waits:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self.is_closed)
                if not self._queue:
                    return
                item = self._queue.popleft()
                self._is_busy = True
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
        with self._changed:
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
        """Write a block. Tasks may call this. Returns False, and counts the block as dropped, if the folder does not
        take it."""
        assert threading.current_thread() is self._thread, "one thread writes"
        error, is_written = "", False
        try:
            is_written = self._files.write(name, contents, keep_until)
        except Exception as e:
            error = (isinstance(e, OSError) and e.strerror) or repr(e)
        now = self._clock()
        if error and (error != self._last_error or now >= self._next_warning):
            logger.warning("blocks of the KV cache are not kept on disk: %s", error)
            self._last_error, self._next_warning = error, now + _WARNING_S
        with self._changed:
            self._stats.num_disk_dropped += not is_written
        return is_written
