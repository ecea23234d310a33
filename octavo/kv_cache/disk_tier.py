"""The tier below the block pools of the host's memory: a folder on disk. Decides which blocks are saved, and when.

On a CPU the pools are the cache's own. On a GPU they are the host pools that `host_tier` fills; a block that is not
copied to the host is not saved.

Blocks are saved outside of the steps: while the engine is idle, for a small share of its time while it is busy, and
when they are about to be evicted from a pool. Saves at eviction may take as much time in all as disk hits have gained,
and 1 s at first. So a workload without hits is not slowed. A block that must leave its pool while the writer's queue is
full is lost.

`DiskTier` has these parts, and each one calls only the ones above it:

    block_files      the folder, and what is evicted from it
    saved_pools      the pools, and the prefixes that they and the folder have
    block_writer     the blocks on their way to the folder (a table of their states), and the thread that writes them
    cache_sessions   the blocks that clients keep
    saved_prompts    the prompts that another server waits for
    disk_fetches     brings blocks back into the pools; peer_blocks brings those of other servers into the folder

The engine's thread makes all calls, except where a docstring names other threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice

from octavo.kv_cache.block_files import BlockFiles
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.block_writer import BlockWriter
from octavo.kv_cache.cache_sessions import CacheSessions
from octavo.kv_cache.disk_fetches import DiskFetches
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.saved_pools import BlockMemory, SavedPools
from octavo.kv_cache.saved_prompts import SavedPrompts
from octavo.stats import EngineStats
from octavo.step_cost import StepCostModel

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 64 << 20  # of queued blocks
_IDLE_QUEUE_BYTES = 4 << 20  # the limit while the engine is idle, so that the writer is done when the next step begins
_MOST_PASSED = 64  # unsaved blocks that `_next_savable` looks at before it gives up: all of them are being copied
_BUSY_SHARE = 0.003  # the share of a busy engine's time for saving, the writer's time included
_GPU_BUSY_SHARE = 0.03  # on GPUs: there the writer delays no step, and blocks are copied while a step is computed
_INITIAL_EVICTION_SAVE_S = 1.0  # for saves at eviction, before disk hits have gained any time
_MAX_EVICTION_SAVE_S = 60.0  # upper bound of the time for saves at eviction
_MAX_BUSY_SAVE_S = 0.02  # upper bound of the time that a busy engine spends on saving in one go
_IDLE_WAIT_S = 0.01  # longest wait for the writer before the caller looks for messages again
_CLOSE_TIMEOUT_S = 10.0  # longest wait until all blocks are saved, in case the disk hangs


class DiskTier:
    """Keeps in `files` the indexed blocks of `cache`: of its pools, or with a `host_tier` of its host pools. Three
    accounts bound the time and memory of saving:

    account              | gains                            | spends                     | cap
    _busy_save_s         | a share of a step's time, while  | `save_while_busy`          | _MAX_BUSY_SAVE_S
                         | blocks are unsaved               |                            |
    _eviction_save_s     | time that disk hits have gained  | `leaves`                   | _MAX_EVICTION_SAVE_S
    writer.queued_bytes  | each block that is queued        | each block that is written | _QUEUE_BYTES; if idle
                         |                                  |                            | _IDLE_QUEUE_BYTES

    On CPUs a block also costs `writer.write_s`, the average time of a write (`_save`).
    """

    def __init__(
        self,
        files: BlockFiles,
        memory: BlockMemory,
        cache: KVCacheManager,
        cost: StepCostModel,
        clock: Callable[[], float] = time.monotonic,
        host_tier: HostTier | None = None,
    ) -> None:
        self.files, self._memory, self._clock, self._host_tier = files, memory, clock, host_tier
        self._pools = pools = SavedPools(files, memory, cache, host_tier)
        self.writer = BlockWriter(pools, clock)
        self.sessions = CacheSessions(pools, self.writer)
        self.saved_prompts = SavedPrompts(pools, self.writer, clock)
        self.fetches = DiskFetches(pools, self.writer, cost, clock)
        self._busy_save_s = 0.0  # may be overdrawn
        self._eviction_save_s = _INITIAL_EVICTION_SAVE_S  # may be overdrawn
        for pool in pools.pools:  # last: every part is there when a pool calls
            pool.watchers.append(self)

    def take_stats(self, stats: EngineStats) -> None:
        """Add the gauges, and the increments of the counters since the last call."""
        self.writer.take_stats(stats)
        self.fetches.take_stats(stats)
        stats.num_disk_damaged = self.files.take_num_damaged()
        stats.disk_bytes, stats.disk_kept_bytes = self.files.num_bytes, self.files.num_kept_bytes
        stats.num_disk_sessions = self.sessions.count

    def forget_pools(self, removes_files: bool) -> None:
        """Forget the blocks of the pools, whose contents are about to be lost. With `removes_files` forget the folder's
        blocks too: the writer removes their files, and lookups miss until then."""
        for name in list(self.writer.unsaved):
            self.writer.cancel(name)
        self.fetches.end_all()
        if removes_files:
            self.sessions.clear()
            self.writer.remove_all()

    def save_all(self) -> bool:
        """Save all unsaved blocks, and wait up to `_CLOSE_TIMEOUT_S` until they are written. Returns whether they
        are."""
        end = time.monotonic() + _CLOSE_TIMEOUT_S  # not of `clock`: the writer waits in real time
        while time.monotonic() < end and self.save_while_idle():
            pass
        # Blocks that are unsaved now stay so: the time is over, the device lacks memory, or the disk hangs.
        return self.writer.wait_until_idle(max(0.0, end - time.monotonic())) and not self.writer.num_unwritten

    def close(self, saves: bool = True) -> None:
        """Save the unsaved blocks if `saves`, and end the threads. Nothing is watched any longer. A second call does
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
            for pool in self._pools.pools:
                pool.watchers.remove(self)

    # Called by the pools.

    def entered(self, name: BlockName, block: int) -> None:
        self.writer.add(name, block)

    def leaves(self, name: BlockName, block: int) -> None:
        """Save an unsaved block that is about to be overwritten. Drop it instead if the queue is full, if a copy to it
        is under way, or if `_eviction_save_s` is spent and no session keeps the block."""
        if name not in self.writer.unsaved:
            return
        self._eviction_save_s = min(self._eviction_save_s + self.fetches.take_gained_s(), _MAX_EVICTION_SAVE_S)
        is_kept = self.writer.is_pinned(name)
        has_time = is_kept or self._eviction_save_s > 0
        if not (has_time and self.writer.has_room(_QUEUE_BYTES) and self._pools.may_read(name[0], [block])):
            self.writer.drop(name)
            return
        save_s = self._save(name)
        if not is_kept:
            self._eviction_save_s -= save_s

    # Called by `EngineCore`.

    def save_while_busy(self, step_s: float) -> None:
        """Save blocks after a step that took `step_s`: in a small share of its time, and as many as the writer's queue
        takes if another server waits for a prompt."""
        if self.writer.unsaved:
            self._save_in_share(step_s)
        if self.saved_prompts.are_awaited:
            while (name := self._next_savable()) is not None:
                self._save(name)

    def _save_in_share(self, step_s: float) -> None:
        """Save blocks until this step's share of time, and what is left of earlier ones, is used."""
        share = _BUSY_SHARE if self._host_tier is None else _GPU_BUSY_SHARE
        self._busy_save_s = min(self._busy_save_s + share * step_s, _MAX_BUSY_SAVE_S)
        if self._busy_save_s <= 0 or self._next_savable() is None:
            return
        wait_s = self._wait_for_workers()
        self._busy_save_s -= wait_s
        max_overdraft_s = 2 * wait_s  # the wait, and as long again for saving: with less the wait would not pay
        while self._busy_save_s > -max_overdraft_s and (name := self._next_savable()) is not None:
            self._busy_save_s -= self._save(name)

    def save_while_idle(self) -> bool:
        """Save a block, or wait shortly for the writer. Returns False if no block is unsaved, if the device lacks
        memory to copy blocks, or after `close`."""
        if self._host_tier is not None and not self.writer.is_closed:
            self._copy_to_host(self._host_tier)
        if not self.writer.unsaved:
            return False
        if self.writer.wait_for_room(_IDLE_QUEUE_BYTES, _IDLE_WAIT_S):
            if (name := self._next_savable(waits=True)) is None:
                return False
            self._save(name)
        return not self.writer.is_closed

    def save_or_wait(self) -> None:
        """Save a block, or wait shortly for the writer, while there is nothing to compute."""
        self.save_while_idle() or self.writer.wait_until_saved(_IDLE_WAIT_S)

    def _copy_to_host(self, host_tier: HostTier) -> None:
        """Make the copies that wait for a plan: none comes while the engine is idle. Then copy blocks that only the
        device has, until the pools have an unsaved block, or as long as such blocks are to be saved before others."""
        self._memory.move_blocks(host_tier.take_moves())
        while host_tier.num_uncopied and (not self.writer.unsaved or self.writer.awaits_copies):
            host_tier.begin_plan()
            self._memory.move_blocks(host_tier.take_moves())

    def _next_savable(self, waits: bool = False) -> BlockName | None:
        """Return the block to save before all others, of those that are not being copied. With `waits`, wait for copies
        under way. Returns None if there is none, or if the queue has no room."""
        if not self.writer.has_room(_QUEUE_BYTES):
            return None
        unsaved, candidates = self.writer.unsaved, islice(self.writer.in_order(), _MOST_PASSED)
        return next((name for name in candidates if self._pools.may_read(name[0], [unsaved[name]], waits)), None)

    def _save(self, name: BlockName) -> float:
        """Queue a copy of an unsaved block, for which there is room. Returns by how many seconds it delays
        steps: by the copy and, on CPUs, by the writer's processor time."""
        wait_s = self._wait_for_workers()
        begin = self._clock()
        contents = self._memory.read_blocks(name[0], [self.writer.unsaved[name]])[0]
        self.writer.enqueue(name, contents)
        return wait_s + self._clock() - begin + (self.writer.write_s if self._host_tier is None else 0.0)

    def _wait_for_workers(self) -> float:
        """Wait for the workers. Returns the seconds that this delays steps: none if the next step waits for them
        too."""
        begin = self._clock()
        delays_step = self._memory.wait_for_workers()
        wait_s = self._clock() - begin
        return wait_s if delays_step else 0.0
