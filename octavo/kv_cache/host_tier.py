"""The tier between a device with memory of its own and the disk: copies of indexed blocks in pinned host memory.

Computed blocks are copied to the host with later plans, a bounded number with each, and otherwise when they leave their
pool. They come back when a waiting sequence begins with their tokens. The copies are moves of the plan, as for swapped
sequences: `execution.block_mover` orders them after the steps that compute the blocks and before the steps that read
them. The copies are free, indexed blocks of the cache's host pools, the block used longest ago is evicted first, and
swapped sequences evict them too. The scheduler calls everything here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.manager import KVCacheManager
from octavo.sequence import HostLoad
from octavo.sequence import Sequence as TokenSequence
from octavo.stats import EngineStats
from octavo.step_cost import StepCost, StepWork
from octavo.step_plan import BlockMoves

# To the host, with one plan: as much as `block_mover` has staging buffers for, so that no step waits for the bus.
_COPY_BYTES = 128 << 20
# Back to the device, with a plan that computes other sequences too. The step waits for the bus: 27 ms at 10 GB/s.
_LOAD_BYTES = 256 << 20
_MOST_COPIES = 256  # to the host, with one plan: each takes the scheduler some microseconds, however small it is
_LOAD_S_PER_BYTE = 1e-10  # 10 GB/s: PCIe 3.0 with 16 lanes; computing tokens of any model but the smallest takes longer


class CopyWatcher(Protocol):
    """Is called with a block that the host has already or does not get, and when `num_uncopied` is 0 again."""

    def not_copied(self, name: BlockName) -> None: ...
    def all_copied(self) -> None: ...


class HostTier:
    """Keeps copies of the indexed blocks of `cache` in its host pools."""

    def __init__(
        self,
        cache: KVCacheManager,
        block_bytes: Sequence[int],
        cost: StepCost,
        copy_bytes: int = _COPY_BYTES,
        load_bytes: int = _LOAD_BYTES,
    ) -> None:
        """`block_bytes` are by pool: of the part of a block that one device has, as each has a bus of its own. A plan
        copies about `copy_bytes` to the host and `load_bytes` back, for each device."""
        self._cache, self._block_bytes, self._cost = cache, block_bytes, cost
        self._copy_bytes, self._load_bytes = copy_bytes, load_bytes
        self._counted_bytes = [max(num_bytes, copy_bytes // _MOST_COPIES) for num_bytes in block_bytes]
        for pool in cache.pools:
            pool.watchers.append(self)
        cache.on_release.append(self.note_released)
        # Blocks that the host lacks, the oldest first: those indexed before this plan, and those indexed since, whose
        # contents may come only with this plan's moves.
        self._uncopied = OrderedDict[BlockName, int]()
        self._fresh: dict[BlockName, int] = {}
        self._copied_first: list[BlockName] = []  # to be copied before others, once this plan is made
        self._released = deque[Sequence[BlockName]]()  # blocks that sequences had, still to be counted as used
        self._is_forgetting = False
        self.watchers: list[CopyWatcher] = []
        self._copy_left, self._load_left = copy_bytes, load_bytes  # of the plan that is being made
        self._num_hits = self._num_copied = self._num_dropped = 0  # since `take_stats`

    def take_stats(self, stats: EngineStats) -> None:
        """Add the increments of the counters since the last call."""
        stats.num_host_hits, self._num_hits = self._num_hits, 0
        stats.num_host_copied, self._num_copied = self._num_copied, 0
        stats.num_host_dropped, self._num_dropped = self._num_dropped, 0

    def begin_plan(self) -> None:
        """Copy blocks that the host lacks. Nothing may be planned yet: the copies come before the plan's other
        moves."""
        self._uncopied |= self._fresh
        self._fresh = {}
        for name in reversed(self._copied_first):
            if name in self._uncopied:
                self._uncopied.move_to_end(name, last=False)
        self._copied_first.clear()
        while self._uncopied and self._copy_left > 0:
            name = next(iter(self._uncopied))
            self._copy(name, self._uncopied[name])
        # A prefix without its first blocks is never found: the last block is evicted first. It is copied last.
        while self._released and self._released[0][-1] not in self._uncopied:
            for pool, key in reversed(self._released.popleft()):
                self._cache.host_pools[pool].touch(key)

    def take_moves(self) -> list[BlockMoves]:
        """Return the moves of the plan, by pool, and end it: the next plan may have as many."""
        self._copy_left, self._load_left = self._copy_bytes, self._load_bytes
        return self._cache.take_moves()

    @property
    def num_uncopied(self) -> int:
        """The number of the device's blocks that are to be copied to the host. Any thread may ask: a block counts until
        the tier below has it or it is lost, and in between it may count twice."""
        return len(self._fresh) + len(self._uncopied)  # in the order in which blocks go on

    def copies_later(self, name: BlockName) -> bool:
        """Return whether a later plan copies a block to the host."""
        return name in self._uncopied or name in self._fresh

    def copy_first(self, names: Sequence[BlockName]) -> None:
        """Copy these blocks before others."""
        self._copied_first += names

    def forget(self, name: BlockName) -> None:
        """Remove a block from the index of the device; it is not copied."""
        self._uncopied.pop(name, None)
        self._fresh.pop(name, None)
        pool = self._cache.pools[name[0]]
        if (block := pool.lookup(name[1])) is not None:
            self._is_forgetting = True
            pool.forget(block)
            self._is_forgetting = False

    def forget_prefixes(self) -> None:
        """Empty the prefix index of the device and of the host; nothing is copied."""
        lost = [*self._uncopied, *self._fresh]
        for blocks in (self._uncopied, self._fresh, self._copied_first, self._released):
            blocks.clear()
        self._is_forgetting = True
        self._cache.forget_prefixes()
        self._is_forgetting = False
        for name in lost:
            self._tell_not_copied(name)

    def entered(self, name: BlockName, block: int) -> None:
        """Have a block of the device's index copied by a later plan, unless the host has it."""
        if not self._has(name):
            self._fresh[name] = block

    def note_released(self, names: Sequence[BlockName]) -> None:
        """Count the copies of a prefix that a sequence had as used, once all are made."""
        self._released.append(names)

    def leaves(self, name: BlockName, block: int) -> None:
        """Copy a block that is about to be overwritten, if the host lacks it and the plan has not too many copies. One
        that was indexed since the plan began is not copied: its contents may come only with this plan's moves."""
        self._cache.cancel_load(name[0], block)
        if self._is_forgetting:
            return
        self._copy(name, block, is_computed=name not in self._fresh)

    def load(self, seq: TokenSequence, num_step_tokens: int, is_alone: bool) -> bool:
        """Have the plan bring back the blocks of a waiting sequence's prefix that only the host has, if all its tokens
        fit and if that is predicted to be faster than computing them. Returns False if later plans have to bring more,
        as this one has enough to bring and computes other sequences (not `is_alone`)."""
        cache, load = self._cache, seq.host_load
        if seq.host_blocks or not cache.looks_up(seq):
            return True
        if load is None or load.num_tokens != seq.num_tokens or self._has_lost(load):
            load = seq.host_load = self._look_up(seq, num_step_tokens)
            if load is None:
                return True
        missing = load.missing
        while missing:
            name = pool, key = missing[0]
            if cache.pools[pool].lookup(key) is not None:  # another sequence has computed it since
                missing.popleft()
                continue
            if not self._has(name):
                missing.clear()
                break
            if not cache.pools[pool].num_free:
                break
            if self._load_left <= 0 and not is_alone:
                return False
            missing.popleft()
            cache.load_from_host(*name)
            self._load_left -= self._block_bytes[pool]
            load.planned = (*load.planned[:1], name)
        return True

    def count_hits(self, seq: TokenSequence, num_cached_tokens: int) -> None:
        """Count the prompt tokens that the host brought back, of the cached ones that a sequence starts with."""
        if (load := seq.host_load) is not None and load.planned:
            self._num_hits += max(0, num_cached_tokens - load.num_cached_tokens)

    def _look_up(self, seq: TokenSequence, num_step_tokens: int) -> HostLoad | None:
        """Return what to bring back for a sequence; None if its tokens do not fit, or the device has its prefix. A
        look-up takes milliseconds for 100,000 tokens."""
        cache = self._cache
        prefix = cache.find_prefix(seq)
        num_cached, limit = prefix.num_tokens // cache.block_size, (seq.num_tokens - 1) // cache.block_size
        if num_cached >= limit or not cache.has_room(seq, prefix.tables, num_step_tokens):
            return None
        load = HostLoad(seq.num_tokens, prefix.num_tokens, deque())
        num_found = cache.num_prefix_blocks(seq.block_hashes, limit, cache.host_pools)
        used = cache.prefix_names(seq.block_hashes, num_found)
        missing = [(pool, key) for pool, key in used if cache.pools[pool].lookup(key) is None]
        if num_found <= num_cached or not self._is_worth_it(missing, num_cached, num_found):
            return load
        # The loads evict none of these blocks: the blocks used longest ago leave first, and the last of these before
        # the others.
        for pool, key in reversed(used):
            for block_pool in (cache.pools[pool], cache.host_pools[pool]):
                block_pool.touch(key)
        load.missing.extend(missing)
        return load

    def _has_lost(self, load: HostLoad) -> bool:
        """Return whether the device has lost the first or the last of the blocks that were planned."""
        return any(self._cache.pools[pool].lookup(key) is None for pool, key in load.planned)

    def _is_worth_it(self, missing: Sequence[BlockName], num_cached_blocks: int, num_found_blocks: int) -> bool:
        """Return whether the pools have room for the `missing` blocks, and loading them is faster than computing."""
        counts = Counter(pool for pool, _ in missing)
        if any(count > self._cache.pools[pool].num_free for pool, count in counts.items()):
            return False
        first, end = num_cached_blocks * self._cache.block_size, num_found_blocks * self._cache.block_size
        compute_s = self._cost.seconds(StepWork().plus(first, end - first, 1))
        return sum(self._block_bytes[pool] for pool, _ in missing) * _LOAD_S_PER_BYTE < compute_s

    def _has(self, name: BlockName) -> bool:
        pool, key = name
        return key in self._cache.host_pools[pool]

    def _copy(self, name: BlockName, block: int, is_computed: bool = True) -> None:
        """Copy a block to the host, if the host lacks it and has room and the plan has not too many copies. Then it
        counts as uncopied no longer."""
        if not is_computed or self._has(name):
            self._tell_not_copied(name)
        elif self._copy_left > 0 and self._cache.copy_to_host(*name, block):
            self._copy_left -= self._counted_bytes[name[0]]
            self._num_copied += 1
        else:
            self._num_dropped += 1
            self._tell_not_copied(name)
        if self.copies_later(name):
            self._uncopied.pop(name, None)
            self._fresh.pop(name, None)
            if not self.num_uncopied:
                for watcher in self.watchers:
                    watcher.all_copied()

    def _tell_not_copied(self, name: BlockName) -> None:
        for watcher in self.watchers:
            watcher.not_copied(name)
