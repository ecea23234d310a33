"""Saves computed blocks to files: the tier below the block pools of the host's memory. `disk_fetches` brings them back.

On a CPU these are the cache's own pools. On a GPU they are the host pools that `host_tier` fills; a block that is not
copied to the host is not saved.

Blocks are saved outside of the steps: while the engine is idle, for a small share of its time while it is busy, and
when they are about to be evicted from a pool. Saves at eviction may take only as long as disk hits have gained (plus
1 s to start), so a workload without hits is not slowed. A thread writes the blocks, from a queue of bounded size; a
block that finds the queue full is not kept. `EngineCore` calls everything here, from one thread. See `block_files` for
the folder and what is evicted from it, and `cache_sessions` for the sessions that clients keep there.

States of a block: indexed (in a pool) -> unsaved -> queued -> written, or dropped: forgotten while it is unsaved,
evicted without time or room to save it, or refused by the folder. On GPUs a block may also leave the device before it
is copied to the host; `HostTier` counts it, and `num_disk_dropped` does not.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain, islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import BlockFiles, Name
from octavo.kv_cache.cache_sessions import CacheSessions
from octavo.kv_cache.disk_fetches import DiskFetches
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.saved_prompts import SavedPrompts
from octavo.stats import EngineStats
from octavo.step_cost import StepCostModel
from octavo.step_plan import BlockMoves

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 64 << 20  # of blocks on their way to the folder
_IDLE_QUEUE_BYTES = 4 << 20  # the limit while the engine is idle, so that the writer is done when the next step begins
_MOST_QUEUED = 10_000  # entries of the queue; beyond this, last-used updates and the files of sessions are dropped
_MOST_PASSED = 64  # unsaved blocks to look at, at most, for one that is not being copied
_BUSY_SHARE = 0.003  # of a busy engine's time that saving may take, the writer's time included
_GPU_BUSY_SHARE = 0.03  # on GPUs, where the writer delays no step, and planning has time while a step is computed
_INITIAL_EVICTION_SAVE_S = 1.0  # for saves at eviction, before disk hits have gained any time
_MAX_EVICTION_SAVE_S = 60.0  # upper bound of the time for saves at eviction
_MAX_BUSY_SAVE_S = 0.02  # upper bound of the time that a busy engine spends on saving in one go
_IDLE_WAIT_S = 0.01  # longest wait for the writer before the caller looks for messages again
_WARNING_S = 60.0  # between two warnings of the same error
_CLOSE_TIMEOUT_S = 10.0  # longest wait until all blocks are saved, in case the disk hangs
_COUNTERS = ("num_disk_written", "disk_written_bytes", "num_disk_dropped")

_Block = tuple[Name, NDArray[np.uint8]]


class BlockMemory(Protocol):
    """The memory of the blocks: the host's."""

    block_bytes: Sequence[int]  # of a block, by pool

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of the contents of blocks, [len(blocks), block_bytes[pool]]."""
        ...

    def wait_for_workers(self) -> bool:
        """Wait until `read_blocks` takes only the time of copying. Returns True if the wait delays the next step."""
        ...

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> bool:
        """Overwrite blocks with `contents`, [len(blocks), block_bytes[pool]]. Returns False, and changes nothing, while
        a step in flight uses them."""
        ...

    def move_blocks(self, moves: Sequence[BlockMoves]) -> None:
        """Move blocks, by pool, between a device and its host."""
        ...

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether no move of blocks is under way, or left for lack of memory. With `waits`, wait for moves under
        way."""
        ...


class _PoolWatch:
    """Tells the tier when blocks of one pool are indexed or lost."""

    def __init__(self, tier: DiskTier, pool: int) -> None:
        self._tier, self._pool = tier, pool

    def entered(self, block: int, key: bytes) -> None:
        self._tier.note_computed((self._pool, key), block)

    def leaves(self, block: int, key: bytes) -> None:
        self._tier.save_before_eviction((self._pool, key))


class _PoolOrDisk(Container[bytes]):
    """The keys of the blocks that are in one pool or on disk."""

    def __init__(self, tier: DiskTier, pool: int) -> None:
        self._tier, self._pool = tier, pool

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return key in self._tier.pools[self._pool] or self._tier.files.knows((self._pool, key))


class DiskTier:
    """Keeps the indexed blocks of the pools of `cache` in `files`: with a `host_tier`, those of the host pools."""

    def __init__(
        self,
        files: BlockFiles,
        memory: BlockMemory,
        cache: KVCacheManager,
        cost: StepCostModel,
        clock: Callable[[], float] = time.monotonic,
        host_tier: HostTier | None = None,
    ) -> None:
        self.files, self._memory, self._cache, self._cost, self._clock = files, memory, cache, cost, clock
        self._host_tier = host_tier
        self.pools = cache.pools if host_tier is None else cache.host_pools  # in the host's memory
        self.pools_or_disk = [_PoolOrDisk(self, pool) for pool in range(len(self.pools))]
        # Fields belong to the engine's thread, or change only under the lock of `_changed`. The engine's thread reads
        # single values without the lock: `is_removing_all`, `_queued`, `_queued_bytes`, the length of `_queue`,
        # `keep_until`, `_write_s`, `_is_closed`. The writer's thread reads `keep_until` so. What bounds saving:
        #
        # account          | gains                              | spends                        | cap
        # _busy_save_s     | a share of each step's time        | `save_while_busy`             | _MAX_BUSY_SAVE_S
        # _eviction_save_s | time that disk hits have gained    | `save_before_eviction`        | _MAX_EVICTION_SAVE_S
        # _write_s         | an average of writes, no account   | part of each block's price    | none
        # _queued_bytes    | each block that is queued          | each block that is written    | _QUEUE_BYTES; if idle
        #                  |                                    |                               | _IDLE_QUEUE_BYTES
        # len(_queue)      | blocks, and tasks (`enqueue_task`) | the writer takes the next one | _MOST_QUEUED; only
        #                  |                                    |                               | `may_skip` tasks obey
        # Blocks that only a pool has, the oldest first; ordered dictionaries lose their first entry in constant time.
        self.unsaved = OrderedDict[Name, int]()  # engine's thread
        self._prioritised = OrderedDict[Name, None]()  # blocks to save before others, unsaved or not yet here; engine's
        self._busy_save_s = 0.0  # engine's thread; may be overdrawn
        self._eviction_save_s = _INITIAL_EVICTION_SAVE_S  # engine's thread; may be overdrawn
        self._changed = threading.Condition()  # notified when something is queued, written, forgotten or dropped
        self.is_removing_all = False  # all files of the folder are being removed; lock
        self._queue: deque[_Block | Callable[[], None]] = deque()  # blocks to write, and tasks in between; lock
        self._queued: dict[Name, NDArray[np.uint8]] = {}  # blocks of the queue, and the one being written; lock
        self._queued_bytes = 0  # lock
        self._is_writing = self._is_closed = False  # lock
        self.keep_until: dict[Name, float] = {}  # for blocks that are not written yet; lock
        self._write_s = 0.0  # moving average of the writer's processor time for a block; lock
        self._stats = EngineStats()  # lock
        self._last_error, self._next_warning = "", 0.0  # writer's thread
        self._writer = threading.Thread(target=self._write, name="block-writer", daemon=True)
        self._writer.start()
        for number, pool in enumerate(self.pools):
            pool.watchers.append(_PoolWatch(self, number))
        if host_tier is not None:
            host_tier.on_drop, host_tier.on_present = self.forget_unsaved, self.note_in_memory
            host_tier.on_all_copied = self._wake
        self.sessions = CacheSessions(self, cache, min(memory.block_bytes))
        self.saved_prompts = SavedPrompts(self, cache, clock)
        self.fetches = DiskFetches(self, memory, cache, cost, clock)

    def take_stats(self, stats: EngineStats) -> None:
        """Add the gauges, and the increments of the counters since the last call."""
        with self._changed:
            own, self._stats = self._stats, EngineStats()
        for name in _COUNTERS:
            setattr(stats, name, getattr(own, name))
        self.fetches.take_stats(stats)
        stats.num_disk_damaged, self.files.num_damaged = self.files.num_damaged, 0
        stats.disk_bytes, stats.disk_kept_bytes = self.files.num_bytes, self.files.num_kept_bytes
        stats.num_disk_sessions = self.sessions.count

    def forget_pools(self, removes_files: bool) -> None:
        """Forget the blocks of the pools, whose contents are about to be lost. With `removes_files` forget the folder's
        blocks too: the writer removes their files, and lookups miss until then."""
        for name in list(self.unsaved):
            self.forget_unsaved(name)
        self.fetches.end_all()
        if removes_files:
            self.sessions.clear()
            with self._changed:
                self.keep_until.clear()
                self._queue.clear()  # tasks too: `_remove_all` removes their files; peers' copies wait for their time
                self._queued.clear()
                self._queued_bytes = 0
                self.is_removing_all = True
                self.enqueue_task(self._remove_all)

    def _remove_all(self) -> None:
        try:
            self.files.remove_all()
        finally:
            with self._changed:
                self.is_removing_all = False

    def wait_until_saved(self, timeout_s: float | None = None) -> bool:
        """Return when nothing is left to write, or after `timeout_s`. Any thread may call it, while the engine's thread
        saves blocks."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._num_unsaved or self._queue or self._is_writing) or self._is_closed, timeout_s
            )

    def save_all(self) -> bool:
        """Save all unsaved blocks, and wait up to `_CLOSE_TIMEOUT_S` until they are written. Returns whether they
        are."""
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        while time.monotonic() < end and self.save_while_idle():
            pass
        # Blocks that are unsaved now stay so: the device lacks memory to copy them, or the disk hangs.
        with self._changed:
            is_written = self._changed.wait_for(
                lambda: not (self._queue or self._is_writing) or self._is_closed, max(0.0, end - time.monotonic())
            )
        return is_written and not self._num_unsaved

    def close(self, saves: bool = True) -> None:
        """Save the unsaved blocks if `saves`, and end the threads. A second call does nothing."""
        if self._is_closed:
            return
        is_saved = False
        try:
            is_saved = saves and self.save_all()
        except RuntimeError as e:  # a worker has ended
            logger.warning("blocks of the KV cache are not kept on disk: %s", e)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
        # The writer's thread refers to `self`, and so to the executor: join it to free both. If the disk hangs, this
        # wait would be endless.
        if is_saved:
            self._writer.join()
        self.fetches.close()

    # Blocks that go to the folder.

    @property
    def num_unwritten(self) -> int:
        """The number of blocks that are unsaved, or in the writer's queue. Any thread may ask."""
        with self._changed:
            return self._num_unsaved + len(self._queued)

    @property
    def _num_unsaved(self) -> int:
        # In the order in which blocks go on, as other threads ask too.
        return (0 if self._host_tier is None else self._host_tier.num_uncopied) + len(self.unsaved)

    def _wake(self) -> None:
        """Have `wait_until_saved` look again."""
        with self._changed:
            self._changed.notify_all()

    def is_in_memory(self, name: Name) -> bool:
        """Return whether a block is in its pool, on the device or on the host."""
        pool, key = name
        return key in self._cache.pools[pool] or key in self.pools[pool]

    def is_pending(self, name: Name) -> bool:
        """Return whether a block is not written yet: unsaved, or in the writer's queue."""
        return name in self.unsaved or name in self._queued or self._will_be_copied(name)

    def _will_be_copied(self, name: Name) -> bool:
        """Return whether a block of a device is still to be copied to its host, and saved then."""
        return self._host_tier is not None and self._host_tier.copies_later(name) and self._must_be_saved(name)

    def _must_be_saved(self, name: Name) -> bool:
        """Return whether a block is neither in the folder nor in the writer's queue."""
        return (self.is_removing_all or not self.files.knows(name)) and name not in self._queued

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether blocks can be read and written now: on GPUs, whether they are neither copied with the next
        plan nor are being copied. With `waits`, wait for copies under way."""
        if self._host_tier is None:
            return True
        is_planned = not self._cache.host_blocks_written_later[pool].isdisjoint(blocks)
        return not is_planned and self._memory.is_settled(pool, blocks, waits)

    def pin_pending_blocks(self, names: Iterable[Name], keep_until: float) -> None:
        """Have the pending ones of these blocks kept in the folder until `time.time` is `keep_until`."""
        with self._changed:
            self.keep_until |= {name: keep_until for name in names if self.is_pending(name)}

    def forget_unsaved(self, name: Name) -> None:
        """Do not save a block, unless the writer has it already."""
        self.unsaved.pop(name, None)
        self._prioritised.pop(name, None)
        with self._changed:
            self.keep_until.pop(name, None)
            self._changed.notify_all()  # `wait_until_saved` looks at `unsaved`

    def _drop(self, name: Name) -> None:
        """Count a block as lost that was unsaved until now."""
        self.forget_unsaved(name)
        with self._changed:
            self._stats.num_disk_dropped += 1

    def forget(self, name: Name) -> None:
        """Forget a block in the pools, and do not save it."""
        if self._host_tier is not None:
            self._host_tier.forget(name)
        self.forget_unsaved(name)
        pool = self.pools[name[0]]
        if (block := pool.lookup(name[1])) is not None:
            pool.forget(block)

    def note_in_memory(self, name: Name) -> None:
        """Save a block of the pools if the folder has lost it."""
        pool, key = name
        if not self._must_be_saved(name):
            self._clear_priority_and_pin(name)
        elif (block := self.pools[pool].lookup(key)) is not None:
            self.note_computed(name, block)
        elif self._host_tier is not None and (block := self._cache.pools[pool].lookup(key)) is not None:
            self._host_tier.note_indexed(name, block)

    def note_computed(self, name: Name, block: int) -> None:
        """Save a block of the host's memory, unless the folder has it or the writer's queue does."""
        if self._must_be_saved(name):
            self.unsaved[name] = block
        else:
            self._clear_priority_and_pin(name)

    def _clear_priority_and_pin(self, name: Name) -> None:
        """Wait no longer for a block of a device that the folder has got in another way."""
        if self._host_tier is not None and name not in self.unsaved and name not in self._queued:
            self.forget_unsaved(name)

    def save_before_eviction(self, name: Name) -> None:
        """Save a block that is about to be overwritten, if it is unsaved, if the writer keeps up, and if a session
        keeps the block or disk hits have gained the time. Drop it otherwise."""
        block = self.unsaved.get(name)
        if block is None:
            return
        is_kept = name in self.keep_until
        has_time = is_kept or self._eviction_save_s > 0
        if not (has_time and self._has_room() and self.is_settled(name[0], [block])):
            self._drop(name)
            return
        save_s = self._save(name)
        if not is_kept:
            self._eviction_save_s -= save_s

    def add_eviction_budget(self, gained_s: float) -> None:
        """Let saves at eviction take `gained_s` seconds more: the time that a disk hit has gained."""
        self._eviction_save_s = min(_MAX_EVICTION_SAVE_S, self._eviction_save_s + gained_s)

    def save_while_busy(self, step_s: float) -> None:
        """Save blocks in a small share of the time of a step, which took `step_s`."""
        if not self.unsaved:
            return
        share = _BUSY_SHARE if self._host_tier is None else _GPU_BUSY_SHARE
        self._busy_save_s = min(self._busy_save_s + share * step_s, _MAX_BUSY_SAVE_S)
        if self._busy_save_s <= 0 or self._next_savable() is None:
            return
        # After paying the wait once, save for at least as long as it took.
        wait_s = self._wait_for_workers()
        self._busy_save_s -= wait_s
        while self._busy_save_s > -2 * wait_s and (name := self._next_savable()) is not None:
            self._busy_save_s -= self._save(name)

    def save_while_idle(self) -> bool:
        """Save a block, or wait shortly for the writer. Returns False if no block is unsaved, or if the device lacks
        memory to copy blocks."""
        if self._host_tier is not None and not self._is_closed:
            self._copy_to_host(self._host_tier)
        if not self.unsaved:
            return False
        with self._changed:
            has_room = self._changed.wait_for(lambda: self._has_room(_IDLE_QUEUE_BYTES), _IDLE_WAIT_S)
        if has_room:
            if (name := self._next_savable(waits=True)) is None:
                return False
            self._save(name)
        return not self._is_closed

    def _copy_to_host(self, host_tier: HostTier) -> None:
        """Make the copies that wait for a plan. Then copy blocks that only the device has, if the pools have no unsaved
        block or if these blocks are to be saved before others."""
        self._memory.move_blocks(self._cache.take_moves())
        host_tier.end_plan()
        while host_tier.num_uncopied and (not self.unsaved or any(map(host_tier.copies_later, self._prioritised))):
            host_tier.begin_plan()
            self._memory.move_blocks(self._cache.take_moves())
            host_tier.end_plan()

    def fill_queue(self) -> None:
        """Queue unsaved blocks until the writer's queue is full."""
        while (name := self._next_savable()) is not None:
            self._save(name)

    def prioritise(self, names: Iterable[Name]) -> None:
        """Save these blocks before others."""
        first = [name for name in names if name in self.unsaved or self._will_be_copied(name)]
        self._prioritised.update(dict.fromkeys(first))
        if self._host_tier is not None:
            self._host_tier.prioritise(first)

    def _next_savable(self, waits: bool = False) -> Name | None:
        """Return the block to save before all others, of those that are not being copied. With `waits`, wait for copies
        under way. Returns None if there is none, or if the queue has no room."""
        if not self._has_room():
            return None
        in_order = chain(filter(self.unsaved.__contains__, self._prioritised), self.unsaved)
        candidates = islice(in_order, _MOST_PASSED)
        return next((name for name in candidates if self.is_settled(name[0], [self.unsaved[name]], waits)), None)

    def _save(self, name: Name) -> float:
        """Queue a copy of an unsaved block, for which there is room. Returns the seconds that steps are later for it:
        those of copying the block and, on CPUs, of writing it."""
        wait_s = self._wait_for_workers()
        begin = self._clock()
        contents = self._memory.read_blocks(name[0], [self.unsaved[name]])[0]
        self._prioritised.pop(name, None)
        with self._changed:  # `wait_until_saved` sees the block among the unsaved ones or in the queue
            del self.unsaved[name]
            self._queue.append((name, contents))
            self._queued[name] = contents
            self._queued_bytes += contents.nbytes
            self._changed.notify_all()
        return wait_s + self._clock() - begin + (self._write_s if self._host_tier is None else 0.0)

    def _wait_for_workers(self) -> float:
        """Wait for the workers. Returns the seconds that this delays steps: none if the next step waits for them
        too."""
        begin = self._clock()
        delays_step = self._memory.wait_for_workers()
        wait_s = self._clock() - begin
        return wait_s if delays_step else 0.0

    def _has_room(self, num_bytes: int = sys.maxsize) -> bool:
        """Return whether a queue limited to `num_bytes` has room for another block. An empty queue takes any block."""
        return self._queued_bytes < min(num_bytes, _QUEUE_BYTES) and not self._is_closed

    def enqueue_task(self, work: Callable[[], None], may_skip: bool = False) -> None:
        """Have the writer do `work` after everything queued before. With `may_skip` drop it if the queue is too
        long."""
        if may_skip and len(self._queue) >= _MOST_QUEUED:
            return
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def _write(self) -> None:
        """The writer's thread: write queued blocks until the tier is closed."""
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closed)
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

    def _write_block(self, name: Name, contents: NDArray[np.uint8]) -> None:
        begin, keep_until, latest = time.thread_time(), self.keep_until.get(name, 0.0), 0.0
        is_written = self.write_file(name, contents, keep_until)
        with self._changed:
            self._write_s += (time.thread_time() - begin - self._write_s) / 8
            # `forget_pools` may have forgotten it meanwhile, and the engine's thread may have queued it again.
            if self._queued.get(name) is contents:
                del self._queued[name]
                self._queued_bytes -= contents.nbytes
                latest = self.keep_until.pop(name, 0.0)
            self._stats.num_disk_written += is_written
            self._stats.disk_written_bytes += contents.nbytes * is_written
        if latest > keep_until:  # pinned during the write
            self.files.keep([name], latest)

    def write_file(self, name: Name, contents: NDArray[np.uint8], keep_until: float = 0.0) -> bool:
        """Write a block, in the writer's thread. Returns False, and counts the block as dropped, if the folder does not
        take it."""
        error, is_written = "", False
        try:
            is_written = self.files.write(name, contents, keep_until)
        except Exception as e:
            error = (isinstance(e, OSError) and e.strerror) or repr(e)
        now = self._clock()
        if error and (error != self._last_error or now >= self._next_warning):
            logger.warning("blocks of the KV cache are not kept on disk: %s", error)
            self._last_error, self._next_warning = error, now + _WARNING_S
        with self._changed:
            self._stats.num_disk_dropped += not is_written
        return is_written
