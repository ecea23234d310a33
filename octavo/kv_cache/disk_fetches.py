"""Blocks on disk that waiting sequences need: they are read before a prompt is computed.

When it is a waiting sequence's turn, threads read the blocks of its prefix that the pools lack, if reading is predicted
to be faster than computing them. `peer_blocks` brings blocks of another server into the folder first. The scheduler and
`EngineCore` call everything here. `DiskTier` saves the blocks.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import BlockFiles
from octavo.kv_cache.block_hashes import extend_block_hashes
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.block_writer import BlockWriter
from octavo.kv_cache.peer_blocks import Copy, PeerBlocks
from octavo.kv_cache.reader_threads import ReaderThreads
from octavo.kv_cache.saved_pools import SavedPools
from octavo.request import BlockPeer
from octavo.sequence import Sequence as TokenSequence
from octavo.stats import EngineStats
from octavo.step_cost import ReadCost, StepCostModel, StepWork

_READING_BYTES = 64 << 20  # of blocks on their way from the folder
_CHUNK_BYTES = 4 << 20  # of blocks that are read together: a few milliseconds
_FILE_BYTES = 32 << 10  # the least that a block counts in a chunk: opening its file takes as long as reading this much
_NUM_READERS = 2
# A prompt is computed after all if reading its blocks takes this many times as long as computing them.
_PATIENCE = 2.0
_LEAST_PATIENCE_S = 1.0  # and at least this long: a busy machine may read slowly
_MAX_FAILED_LOOKUPS = 4  # files that a lookup may find missing, for one pool and prompt: each costs microseconds
# Longest wait of a step for the lookups of a prompt: enough on a local disk. Otherwise a later step has the result.
_LOOKUP_GRACE_S = 0.001
_LOOKUP_S = 0.05  # for all lookups of a prompt; if the disk takes longer, only known files are used

_Part = tuple[list[bytes], NDArray[np.uint8]]  # keys of one pool, and the contents of their blocks


class Readiness(Enum):
    """Whether a waiting sequence may start."""

    READY = auto()
    NO_ROOM = auto()  # it waits until the pools have room for its blocks
    READING = auto()  # it waits until its blocks are read


def _lookup(files: BlockFiles) -> Callable[[BlockName], bool]:
    """Return a function that returns whether the folder has a block, even if another server has written it. It may
    access the disk."""
    num_failures = Counter[int]()  # by pool

    def has(name: BlockName) -> bool:
        pool, _ = name
        found = files.has(name) if num_failures[pool] < _MAX_FAILED_LOOKUPS else files.knows(name)
        num_failures[pool] += not found
        return found

    return has


@dataclass(slots=True)
class _Chunk:
    """Blocks that were read together."""

    parts: dict[int, _Part]  # by pool
    is_whole: bool  # no block was missing or damaged
    seconds: float


@dataclass(slots=True)
class Fetch:
    """Blocks of a prompt that come from the folder."""

    keys: list[bytes]  # hashes of the sequence's full blocks
    num_cached_blocks: int  # of the prefix in the pools, when it was looked up
    num_found_blocks: int  # of the prefix in pools and folder together
    used: list[BlockName]  # all blocks that this prefix needs
    missing: list[BlockName]  # blocks of `used` that the pools lacked
    patience_s: float  # after this time the rest is computed instead
    has_begun: bool = False
    began: float = 0.0  # on `clock`
    unread: deque[list[BlockName]] = field(default_factory=deque)  # in chunks
    reading: deque[Future[_Chunk]] = field(default_factory=deque)  # the next chunks
    has_ended: bool = False


class DiskFetches:
    """Brings blocks of the folder back into the `pools`."""

    def __init__(self, pools: SavedPools, writer: BlockWriter, cost: StepCostModel, clock: Callable[[], float]) -> None:
        self._pools, self._writer, self._cost, self._clock = pools, writer, cost, clock
        self._files, self._memory, self._cache = pools.files, pools.memory, pools.cache
        self._fetches: list[Fetch] = []  # under way
        self._reading_bytes: dict[Future[_Chunk], int] = {}  # of chunks that are being read
        self._peers = PeerBlocks(pools, writer, clock)
        self._copies: dict[str, Copy | None] = {}  # of blocks from other servers, by request; None: nothing to copy
        self._by_request: dict[str, Fetch | None] = {}  # from a request's turn until it starts; None: nothing to read
        self._read_cost = ReadCost()
        self._readers = ReaderThreads(_NUM_READERS, "read blocks of the disk")
        self._lookup_thread = ReaderThreads(1, "look for blocks on disk")
        self._lookups: dict[str, tuple[Future[int], float]] = {}  # by request, and when they began on `clock`
        self._late_lookup: Future[int] | None = None  # while the disk has not answered it, nobody looks
        # Chunks that are being read for fetches that have ended, and the end of each fetch's patience.
        self._abandoned: dict[Future[_Chunk], float] = {}
        self._num_hits = self._read_bytes = 0  # since `take_stats`
        self._gained_s = 0.0  # since `take_gained_s`

    def take_stats(self, stats: EngineStats) -> None:
        """Add the increments of the counters since the last call."""
        stats.num_disk_hits, self._num_hits = self._num_hits, 0
        stats.disk_read_bytes, self._read_bytes = self._read_bytes, 0
        stats.disk_copied_bytes = self._peers.take_copied_bytes()

    def take_gained_s(self) -> float:
        """Return the seconds of computing that disk hits have saved since the last call."""
        gained_s, self._gained_s = self._gained_s, 0.0
        return gained_s

    def close(self) -> None:
        """End the threads."""
        self._readers.close()
        self._lookup_thread.close()
        self._peers.close()

    def end_all(self) -> None:
        for copy in filter(None, self._copies.values()):
            copy.is_cancelled = True
        for fetch in list(self._fetches):
            self._end(fetch)
        self._by_request.clear()  # the plans and lookups count blocks of the pools; each prompt gets new ones
        self._lookups.clear()

    def prepare(self, seq: TokenSequence, may_wait: bool) -> Readiness:
        """Have the blocks of a waiting sequence read, now that it is its turn: begin once the pools have room, and put
        into the pools what has been read. With `may_wait`, as nothing runs, wait for copies of host blocks that are
        under way; otherwise what has been read waits for a later call."""
        is_beam = seq.beam_search is not None and seq.num_output_tokens > 0  # its siblings wait for it
        if seq.host_blocks or is_beam:
            return Readiness.READY
        request_id = seq.request_id
        if request_id not in self._by_request:
            if seq.request.blocks_from is not None and self._copies_blocks(seq, seq.request.blocks_from):
                return Readiness.READING
            if (num_found := self._num_found(seq)) is None:
                return Readiness.READING
            self._by_request[request_id] = self._plan(seq, num_found)
        fetch = self._by_request[request_id]
        if fetch is None:
            return Readiness.READY
        if not fetch.has_begun:
            if not self._fit(fetch.missing):
                return Readiness.NO_ROOM
            self._begin(fetch)
        return Readiness.READY if self._advance(fetch, may_wait) else Readiness.READING

    def forget(self, seq: TokenSequence) -> None:
        """Forget the fetch of a sequence that has started or ended."""
        self._lookups.pop(seq.request_id, None)
        if (copy := self._copies.pop(seq.request_id, None)) is not None:
            copy.is_cancelled = True
        if (fetch := self._by_request.pop(seq.request_id, None)) is not None:
            self._end(fetch)

    def wait(self, timeout_s: float) -> None:
        """Wait until a chunk has been read, or blocks have been found or copied, if any are under way."""
        working: list[Future[Any]] = [fetch.reading[0] for fetch in self._fetches if fetch.reading]
        working += [lookup for lookup, _ in self._lookups.values()]
        working += [copy.done for copy in self._copies.values() if copy is not None and not copy.done.done()]
        if working:
            wait(working, timeout_s, FIRST_COMPLETED)

    def _plan(self, seq: TokenSequence, num_found: int) -> Fetch | None:
        """Return the blocks to read for a sequence's prefix, of which pools and folder have `num_found` blocks. Returns
        None if the pools have as much of the prefix, or if computing the tokens is faster; then the files of the prefix
        count as used now. In the latter case the predicted cost of reading is lowered a little (`ReadCost.doubt`)."""
        keys, pools = seq.block_hashes, self._pools.pools
        num_cached = self._cache.num_prefix_blocks(keys, self._most_blocks(seq), pools)
        used = self._cache.prefix_names(keys, num_found)
        missing = [name for name in used if not self._pools.is_in_memory(name)]
        counts = Counter(pool for pool, _ in missing)
        if num_found <= num_cached or any(counts[i] > pools[i].num_usable for i in counts):
            self._touch(used)
            return None
        compute_s = self._compute_s(num_cached, num_found)
        if self._read_s(missing) >= compute_s:
            self._read_cost.doubt()
            self._touch(used)
            return None
        return Fetch(keys, num_cached, num_found, used, missing, _patience_s(compute_s))

    def _most_blocks(self, seq: TokenSequence) -> int:
        """Return the number of a sequence's first blocks that need not be computed, and hash them."""
        if seq.params.prompt_logprobs is not None:
            return 0
        extend_block_hashes(seq, self._cache.block_size)
        return min(len(seq.block_hashes), (seq.num_tokens - 1) // self._cache.block_size)

    def _copies_blocks(self, seq: TokenSequence, peer: BlockPeer) -> bool:
        """Return whether blocks of a sequence are being copied from another server. The first call begins that."""
        if seq.request_id not in self._copies:
            self._copies[seq.request_id] = self._begin_copy(seq, peer)
        copy = self._copies[seq.request_id]
        return copy is not None and not self._peers.has_ended(copy)

    def _begin_copy(self, seq: TokenSequence, peer: BlockPeer) -> Copy | None:
        limit = self._most_blocks(seq)
        num_known = self._pools.num_known_blocks(seq.block_hashes, limit)
        if num_known >= limit or self._writer.is_removing_all:
            return None
        compute_s = self._compute_s(num_known, limit)
        return self._peers.begin(peer, seq.block_hashes[:limit], num_known, compute_s, _patience_s(compute_s))

    def _begin(self, fetch: Fetch) -> None:
        for pool, key in fetch.used:  # count cached blocks as used now, so that the blocks being read do not evict them
            self._cache.pools[pool].touch(key)
            self._pools.pools[pool].touch(key)
        fetch.has_begun, fetch.began, fetch.unread = True, self._clock(), self._chunks(fetch.missing)
        self._fetches.append(fetch)
        self._read_ahead(fetch)

    def _num_found(self, seq: TokenSequence) -> int | None:
        """Return the longest prefix of a sequence, in blocks, that pools and folder have together. A thread looks for
        other servers' files. None: it is still looking. If it takes too long, only known files count, for this sequence
        and for others until it has looked."""
        limit, request_id = self._most_blocks(seq), seq.request_id
        self._drop_done_abandoned()
        if limit <= 0 or self._writer.is_removing_all or self._hangs():
            return 0
        keys = seq.block_hashes
        num_known = self._pools.num_known_blocks(keys, limit)
        if request_id not in self._lookups:
            if num_known == limit or (self._late_lookup is not None and not self._late_lookup.done()):
                return num_known
            grace_s = 0.0 if self._lookups else _LOOKUP_GRACE_S  # behind others it will not be done
            find = partial(self._pools.num_prefix_blocks, keys, limit, _lookup(self._files))
            lookup = self._lookup_thread.run(find)
            self._lookups[request_id] = lookup, self._clock()
            wait([lookup], grace_s)
        lookup, began = self._lookups[request_id]
        if not lookup.done():
            if self._clock() - began < _LOOKUP_S:
                return None
            self._late_lookup = lookup
        del self._lookups[request_id]
        return lookup.result() if lookup.done() and lookup.exception() is None else num_known

    def _advance(self, fetch: Fetch, may_wait: bool) -> bool:
        """Put the chunks that have been read into the pools, and end the fetch if all are, or if it takes too long.
        Returns whether the prompt may start."""
        while not fetch.has_ended and fetch.reading and fetch.reading[0].done():
            future = fetch.reading[0]
            chunk = future.result() if future.exception() is None else None
            taken = None if chunk is None else self._take_in(chunk, may_wait)  # None: the read has failed
            if taken is Readiness.READING:
                break
            fetch.reading.popleft()
            del self._reading_bytes[future]
            if chunk is not None:
                num_bytes = sum(contents.nbytes for _, contents in chunk.parts.values())
                self._read_bytes += num_bytes
                self._read_cost.observe(num_bytes, chunk.seconds)
            if chunk is None or not chunk.is_whole or taken is Readiness.NO_ROOM:
                self._end(fetch)
            self._read_ahead(fetch)
        is_late = self._clock() - fetch.began > fetch.patience_s
        if not fetch.has_ended and (not fetch.reading or is_late):
            self._end(fetch)
        return fetch.has_ended

    def _end(self, fetch: Fetch) -> None:
        """End a fetch. The blocks that it has read count as found on disk."""
        if fetch.has_ended or not fetch.has_begun:
            return
        fetch.has_ended = True
        self._fetches.remove(fetch)
        self._touch(fetch.used)  # not earlier: the readers would have waited for the writer
        fetch.unread.clear()
        for future in fetch.reading:
            if future.cancel() or future.done():
                del self._reading_bytes[future]
            else:
                self._abandoned[future] = fetch.began + fetch.patience_s
        fetch.reading.clear()
        num_blocks = self._cache.num_prefix_blocks(fetch.keys, fetch.num_found_blocks, self._pools.pools)
        if num_blocks > fetch.num_cached_blocks:
            gained_s = self._compute_s(fetch.num_cached_blocks, num_blocks) - (self._clock() - fetch.began)
            self._gained_s += max(0.0, gained_s)
            self._num_hits += (num_blocks - fetch.num_cached_blocks) * self._cache.block_size

    def _compute_s(self, num_cached_blocks: int, num_found_blocks: int) -> float:
        """Return the predicted seconds to compute the tokens of blocks num_cached_blocks .. num_found_blocks."""
        first, end = num_cached_blocks * self._cache.block_size, num_found_blocks * self._cache.block_size
        return self._cost.seconds(StepWork().plus(first, end - first, 1))

    def _read_s(self, names: Sequence[BlockName]) -> float:
        """Return the predicted seconds to read blocks, behind all reads that are under way."""
        return self._read_cost.seconds(self._pools.num_bytes(names) + sum(self._reading_bytes.values()))

    def _hangs(self) -> bool:
        """Return whether the disk hangs: a chunk that nobody waits for any more takes longer than its fetch would have
        waited."""
        return any(self._clock() > end for end in self._abandoned.values())

    def _drop_done_abandoned(self) -> None:
        for future in [future for future in self._abandoned if future.done()]:
            del self._abandoned[future], self._reading_bytes[future]

    def _fit(self, names: Sequence[BlockName]) -> bool:
        """Return whether the pools have free blocks for all of `names`, and for the blocks that other waiting sequences
        have read. The latter must not be evicted before these sequences start."""
        others = [fetch.missing for fetch in self._by_request.values() if fetch is not None and fetch.has_begun]
        counts = Counter(pool for one in (names, *others) for pool, _ in one)
        return all(count <= self._pools.pools[pool].num_free for pool, count in counts.items())

    def _chunks(self, names: Sequence[BlockName]) -> deque[list[BlockName]]:
        """Return `names` in chunks to read together."""
        chunks = deque[list[BlockName]]()
        num_bytes = _CHUNK_BYTES
        for name in names:
            if num_bytes >= _CHUNK_BYTES:
                chunks.append([])
                num_bytes = 0
            chunks[-1].append(name)
            num_bytes += max(self._memory.block_bytes[name[0]], _FILE_BYTES)
        return chunks

    def _touch(self, names: Sequence[BlockName]) -> None:
        """Mark the blocks of a prompt as used."""
        if names:
            self._writer.enqueue_task(partial(self._files.touch, names), may_skip=True)

    def _read_ahead(self, fetch: Fetch) -> None:
        """Have the next chunks read: at least one, and as many as `_READING_BYTES` allow for all fetches."""
        while fetch.unread and (not fetch.reading or sum(self._reading_bytes.values()) < _READING_BYTES):
            names = fetch.unread.popleft()
            future = self._readers.run(partial(self._read_chunk, names))
            fetch.reading.append(future)
            self._reading_bytes[future] = self._pools.num_bytes(names)

    def _read_chunk(self, names: Sequence[BlockName]) -> _Chunk:
        """Read blocks, in each pool up to the first one that is missing or damaged."""
        begin, parts, num_read = time.monotonic(), dict[int, _Part](), 0
        for pool, num_bytes in enumerate(self._memory.block_bytes):
            if keys := [key for of, key in names if of == pool]:
                contents, count = np.empty((len(keys), num_bytes), np.uint8), 0
                while count < len(keys) and self._files.read((pool, keys[count]), contents[count]):
                    count += 1
                parts[pool] = keys[:count], contents[:count]
                num_read += count
        return _Chunk(parts, num_read == len(names), time.monotonic() - begin)

    def _take_in(self, chunk: _Chunk, may_wait: bool) -> Readiness:
        """Put blocks into the pools, as free, indexed blocks. Returns `NO_ROOM` if there are too few free blocks, and
        `READING`, for a later step, if copies or steps under way still use a block that it would overwrite."""
        for number, (keys, contents) in chunk.parts.items():
            pool = self._pools.pools[number]
            missing = [i for i, key in enumerate(keys) if pool.lookup(key) is None]
            if len(missing) > pool.num_free:
                return Readiness.NO_ROOM
            if not missing:
                continue
            blocks = [pool.allocate() for _ in missing]
            own = contents if len(missing) == len(keys) else contents[missing]
            may_overwrite = self._pools.may_overwrite(number, blocks, may_wait)
            begin = time.monotonic()  # waits for copies say nothing about the disk
            is_taken = may_overwrite and self._memory.write_blocks(number, blocks, own)
            if is_taken:
                chunk.seconds += time.monotonic() - begin  # other nodes get their parts by the network
            for block, i in zip(blocks, missing, strict=True):
                if is_taken:
                    pool.register(block, keys[i])
                pool.release(block)
            if not is_taken:  # where a wait does not help, the device lacks memory
                return Readiness.NO_ROOM if may_wait else Readiness.READING
        return Readiness.READY


def _patience_s(compute_s: float) -> float:
    """Return the seconds after which the rest of a prompt that takes `compute_s` to compute is computed after all."""
    return max(_LEAST_PATIENCE_S, _PATIENCE * compute_s)
