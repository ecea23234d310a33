"""Saves computed blocks to files: the tier below the block pools of the host's memory. `disk_fetches` brings them back.

On a CPU these are the cache's own pools. On a GPU they are the host pools that `host_tier` fills; a block that is not
copied to the host is not saved.

Blocks are saved outside of the steps: while the engine is idle, for a small share of its time while it is busy, and
when they are about to be evicted from a pool. Saves at eviction may take as much time in all as disk hits have gained,
and 1 s at first. So a workload without hits is not slowed. A thread writes the blocks (`block_writer`), from a queue of
bounded size; a block that must leave its pool while the queue is full is lost. All calls come from the engine's thread,
except where a docstring says that any thread may call. See `block_files` for the folder and what is evicted from it,
and `cache_sessions` for the sessions that clients keep there.

The states of a block, and what moves it there:

    on device   GPUs only: `HostTier` will copy it          `HostTier.note_indexed`
    unsaved     in a pool of the host's, not on disk        `note_indexed`, when it enters the index of its pool
    queued      a copy is in the writer's queue             `_save`
    written     the folder has it                           the writer's thread
    dropped     counted by `num_disk_dropped`               `_drop` (evicted without time or room), `BlockWriter` (the
                                                            folder does not take it)
    cancelled   not counted                                 `cancel_save`: resets of the cache, sessions that are
                                                            dropped, and blocks that `HostTier` has not copied (it
                                                            counts them)

Other threads ask for a block in this order, so that they never miss one that moves meanwhile.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain, islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import BlockFiles
from octavo.kv_cache.block_pool import BlockName, TierWatcher
from octavo.kv_cache.block_writer import BlockWriter
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
_MOST_PASSED = 64  # how many unsaved blocks `_next_savable` looks at for one that is not being copied
_BUSY_SHARE = 0.003  # the share of a busy engine's time for saving, the writer's time included
_GPU_BUSY_SHARE = 0.03  # on GPUs: there the writer delays no step, and blocks are copied while a step is computed
_INITIAL_EVICTION_SAVE_S = 1.0  # for saves at eviction, before disk hits have gained any time
_MAX_EVICTION_SAVE_S = 60.0  # upper bound of the time for saves at eviction
_MAX_BUSY_SAVE_S = 0.02  # upper bound of the time that a busy engine spends on saving in one go
_IDLE_WAIT_S = 0.01  # longest wait for the writer before the caller looks for messages again
_CLOSE_TIMEOUT_S = 10.0  # longest wait until all blocks are saved, in case the disk hangs


class BlockMemory(Protocol):
    """The memory of the blocks: the host's."""

    block_bytes: Sequence[int]  # of a block, by pool

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of the contents of blocks, [len(blocks), block_bytes[pool]]."""
        ...

    def wait_for_workers(self) -> bool:
        """Wait for the workers, so that `read_blocks` then only copies. Returns whether this delays the next step."""
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


class _KnownKeys(Container[bytes]):
    """The keys of the blocks that are in one pool or on disk."""

    def __init__(self, tier: DiskTier, pool: int) -> None:
        self._tier, self._pool = tier, pool

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return key in self._tier.pools[self._pool] or self._tier.files.knows((self._pool, key))


class DiskTier:
    """Keeps the indexed blocks of the pools of `cache`, or of its host pools with a `host_tier`, in `files`."""

    def __init__(
        self,
        files: BlockFiles,
        memory: BlockMemory,
        cache: KVCacheManager,
        cost: StepCostModel,
        clock: Callable[[], float] = time.monotonic,
        host_tier: HostTier | None = None,
    ) -> None:
        self.files, self._memory, self._cache, self._clock = files, memory, cache, clock
        self._host_tier = host_tier
        self.pools = cache.pools if host_tier is None else cache.host_pools  # in the host's memory
        self.known_keys = [_KnownKeys(self, pool) for pool in range(len(self.pools))]
        # This object's fields belong to the engine's thread; other threads only read how many blocks are unsaved. Three
        # accounts bound the time and memory of saving:
        #
        # account              | gains                            | spends                     | cap
        # _busy_save_s         | a share of a step's time, while  | `save_while_busy`          | _MAX_BUSY_SAVE_S
        #                      | blocks are unsaved               |                            |
        # _eviction_save_s     | time that disk hits have gained  | `save_before_eviction`     | _MAX_EVICTION_SAVE_S
        # writer.queued_bytes  | each block that is queued        | each block that is written | _QUEUE_BYTES; if idle
        #                      |                                  |                            | _IDLE_QUEUE_BYTES
        #
        # On CPUs a block also costs `writer.write_s`, the average time of a write (`_save`).
        self.writer = BlockWriter(files, clock)
        # Blocks that only a pool has, the oldest first; ordered dictionaries lose their first entry in constant time.
        self.unsaved = OrderedDict[BlockName, int]()
        self._prioritised = OrderedDict[BlockName, None]()  # blocks to save before others, unsaved or not yet here
        self._busy_save_s = 0.0  # may be overdrawn
        self._eviction_save_s = _INITIAL_EVICTION_SAVE_S  # may be overdrawn
        self._watches = [
            TierWatcher(number, self.note_indexed, lambda name, _: self.save_before_eviction(name))
            for number in range(len(self.pools))
        ]
        for pool, watch in zip(self.pools, self._watches, strict=True):
            pool.watchers.append(watch)
        if host_tier is not None:
            host_tier.on_drop, host_tier.on_present = self.cancel_save, self.save_if_lost
            host_tier.on_all_copied = self._wake
        self.sessions = CacheSessions(self, cache, min(memory.block_bytes))
        self.saved_prompts = SavedPrompts(self, cache, clock)
        self.fetches = DiskFetches(self, memory, cache, cost, clock)

    def take_stats(self, stats: EngineStats) -> None:
        """Add the gauges, and the increments of the counters since the last call."""
        self.writer.take_stats(stats)
        self.fetches.take_stats(stats)
        stats.num_disk_damaged, self.files.num_damaged = self.files.num_damaged, 0
        stats.disk_bytes, stats.disk_kept_bytes = self.files.num_bytes, self.files.num_kept_bytes
        stats.num_disk_sessions = self.sessions.count

    def forget_pools(self, removes_files: bool) -> None:
        """Forget the blocks of the pools, whose contents are about to be lost. With `removes_files` forget the folder's
        blocks too: the writer removes their files, and lookups miss until then."""
        for name in list(self.unsaved):
            self.cancel_save(name)
        self.fetches.end_all()
        if removes_files:
            self.sessions.clear()
            self.writer.remove_all()

    def wait_until_saved(self, timeout_s: float | None = None) -> bool:
        """Return when nothing is left to write, or after `timeout_s`. Any thread may call it, while the engine's thread
        saves blocks."""
        writer = self.writer
        with writer.changed:
            return writer.changed.wait_for(
                lambda: (not self._num_unsaved and writer.is_idle) or writer.is_closed, timeout_s
            )

    def save_all(self) -> bool:
        """Save all unsaved blocks, and wait up to `_CLOSE_TIMEOUT_S` until they are written. Returns whether they
        are."""
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        while time.monotonic() < end and self.save_while_idle():
            pass
        # Blocks that are unsaved now stay so: the time is over, the device lacks memory, or the disk hangs.
        is_written = self.writer.wait_until_idle(max(0.0, end - time.monotonic()))
        return is_written and not self._num_unsaved

    def close(self, saves: bool = True) -> None:
        """Save the unsaved blocks if `saves`, and end the threads. Pools are watched no longer. A second call does
        nothing."""
        if self.writer.is_closed:
            return
        is_saved = False
        try:
            is_saved = saves and self.save_all()
        except RuntimeError as e:  # a worker has ended
            logger.warning("blocks of the KV cache are not kept on disk: %s", e)
        finally:
            self.writer.close(waits=is_saved)
            self.fetches.close()
            for pool, watch in zip(self.pools, self._watches, strict=True):
                pool.watchers.remove(watch)

    # Blocks that go to the folder.

    @property
    def num_unwritten(self) -> int:
        """The number of blocks that are unsaved, or in the writer's queue. Any thread may ask."""
        with self.writer.changed:
            return self._num_unsaved + self.writer.num_blocks

    @property
    def _num_unsaved(self) -> int:
        # In the order in which blocks move, as other threads ask too.
        return (0 if self._host_tier is None else self._host_tier.num_uncopied) + len(self.unsaved)

    def _wake(self) -> None:
        """Have `wait_until_saved` look again."""
        with self.writer.changed:
            self.writer.changed.notify_all()

    def is_in_memory(self, name: BlockName) -> bool:
        """Return whether a block is in its pool, on the device or on the host."""
        pool, key = name
        return key in self._cache.pools[pool] or key in self.pools[pool]

    def is_pending(self, name: BlockName) -> bool:
        """Return whether a block is not written yet: unsaved, or in the writer's queue."""
        return name in self.unsaved or name in self.writer or self._will_be_copied(name)

    def _will_be_copied(self, name: BlockName) -> bool:
        """Return whether a block of a device is still to be copied to its host, and saved then."""
        return self._host_tier is not None and self._host_tier.copies_later(name) and self._must_be_saved(name)

    def _must_be_saved(self, name: BlockName) -> bool:
        """Return whether a block is neither in the writer's queue nor in the folder."""
        # In this order: the writer's thread makes a block known before it takes it from the queue.
        return name not in self.writer and (self.writer.is_removing_all or not self.files.knows(name))

    def may_overwrite(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether blocks can be overwritten now. Not if a copy of the plan that is being made still reads them:
        they may have been a sequence's until now. `waits`: as in `is_settled`."""
        if self._host_tier is None and self._cache.is_read_later(pool, blocks):
            return False
        return self.is_settled(pool, blocks, waits)

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether blocks can be read now: on GPUs, whether no copy to them is planned or under way. With
        `waits`, wait for copies under way."""
        if self._host_tier is None:
            return True
        is_planned = not self._cache.host_blocks_written_later[pool].isdisjoint(blocks)
        return not is_planned and self._memory.is_settled(pool, blocks, waits)

    def pin_pending_blocks(self, names: Iterable[BlockName], keep_until: float) -> None:
        """Have the pending ones of these blocks kept in the folder until `time.time` is `keep_until`, or longer if
        another session keeps them longer."""
        with self.writer.changed:  # none of them is written meanwhile
            self.writer.pin(filter(self.is_pending, names), keep_until)

    def cancel_save(self, name: BlockName) -> None:
        """Do not save a block, unless the writer has it already."""
        self.unsaved.pop(name, None)
        self._unpin(name)

    def _unpin(self, name: BlockName) -> None:
        """Forget that a block is to be saved before others, and how long it is to be kept."""
        self._prioritised.pop(name, None)
        self.writer.unpin(name)
        self._wake()  # `wait_until_saved` looks at `unsaved`

    def _drop(self, name: BlockName) -> None:
        """Count a block as lost that was unsaved until now."""
        self.cancel_save(name)
        self.writer.count_dropped()

    def forget(self, name: BlockName) -> None:
        """Remove a block from the pools, and do not save it."""
        if self._host_tier is not None:
            self._host_tier.forget(name)
        self.cancel_save(name)
        pool = self.pools[name[0]]
        if (block := pool.lookup(name[1])) is not None:
            pool.forget(block)

    def save_if_lost(self, name: BlockName) -> None:
        """Mark a block of the pools as unsaved if the folder has lost it."""
        pool, key = name
        if not self._must_be_saved(name):
            self._unpin_saved(name)
        elif (block := self.pools[pool].lookup(key)) is not None:
            self.note_indexed(name, block)
        elif self._host_tier is not None and (block := self._cache.pools[pool].lookup(key)) is not None:
            self._host_tier.note_indexed(name, block)

    def note_indexed(self, name: BlockName, block: int) -> None:
        """Mark a block of the host's memory as unsaved, unless the folder has it or the writer's queue does."""
        if self._must_be_saved(name):
            self.unsaved[name] = block
        else:
            self._unpin_saved(name)

    def _unpin_saved(self, name: BlockName) -> None:
        """On GPUs: unpin a block that the folder has already. No write of it follows, which would unpin it."""
        if self._host_tier is not None and name not in self.unsaved and name not in self.writer:
            self._unpin(name)

    def save_before_eviction(self, name: BlockName) -> None:
        """A block is about to be overwritten. If it is unsaved, save it. Drop it if the queue is full, if a copy to it
        is under way, or if neither a session keeps it nor disk hits have gained the time."""
        block = self.unsaved.get(name)
        if block is None:
            return
        is_kept = self.writer.is_pinned(name)
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
        wait_s = self._wait_for_workers()
        self._busy_save_s -= wait_s
        max_overdraft_s = 2 * wait_s  # waiting pays only if about as much time is used for saving
        while self._busy_save_s > -max_overdraft_s and (name := self._next_savable()) is not None:
            self._busy_save_s -= self._save(name)

    def save_while_idle(self) -> bool:
        """Save a block, or wait shortly for the writer. Returns False if no block is unsaved, if the device lacks
        memory to copy blocks, or after `close`."""
        if self._host_tier is not None and not self.writer.is_closed:
            self._copy_to_host(self._host_tier)
        if not self.unsaved:
            return False
        with self.writer.changed:
            has_room = self.writer.changed.wait_for(lambda: self._has_room(_IDLE_QUEUE_BYTES), _IDLE_WAIT_S)
        if has_room:
            if (name := self._next_savable(waits=True)) is None:
                return False
            self._save(name)
        return not self.writer.is_closed

    def _copy_to_host(self, host_tier: HostTier) -> None:
        """Make the copies that wait for a plan: none comes while the engine is idle. Then copy blocks that only the
        device has, until the pools have an unsaved block, or as long as such blocks are to be saved before others."""
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

    def prioritise(self, names: Iterable[BlockName]) -> None:
        """Save these blocks before others."""
        first = [name for name in names if name in self.unsaved or self._will_be_copied(name)]
        self._prioritised.update(dict.fromkeys(first))
        if self._host_tier is not None:
            self._host_tier.prioritise(first)

    def _next_savable(self, waits: bool = False) -> BlockName | None:
        """Return the block to save before all others, of those that are not being copied. With `waits`, wait for copies
        under way. Returns None if there is none, or if the queue has no room."""
        if not self._has_room():
            return None
        in_order = chain(filter(self.unsaved.__contains__, self._prioritised), self.unsaved)
        candidates = islice(in_order, _MOST_PASSED)
        return next((name for name in candidates if self.is_settled(name[0], [self.unsaved[name]], waits)), None)

    def _save(self, name: BlockName) -> float:
        """Queue a copy of an unsaved block, for which there is room. Returns by how many seconds it delays
        steps: by the copy and, on CPUs, by the writer's processor time."""
        wait_s = self._wait_for_workers()
        begin = self._clock()
        contents = self._memory.read_blocks(name[0], [self.unsaved[name]])[0]
        self._prioritised.pop(name, None)
        with self.writer.changed:  # `wait_until_saved` sees the block among the unsaved ones or in the queue
            del self.unsaved[name]
            self.writer.enqueue(name, contents)
        return wait_s + self._clock() - begin + (self.writer.write_s if self._host_tier is None else 0.0)

    def _wait_for_workers(self) -> float:
        """Wait for the workers. Returns the seconds that this delays steps: none if the next step waits for them
        too."""
        begin = self._clock()
        delays_step = self._memory.wait_for_workers()
        wait_s = self._clock() - begin
        return wait_s if delays_step else 0.0

    def _has_room(self, num_bytes: int = sys.maxsize) -> bool:
        """Return whether a queue limited to `num_bytes` has room for another block. An empty queue takes any block."""
        return self.writer.queued_bytes < min(num_bytes, _QUEUE_BYTES) and not self.writer.is_closed
