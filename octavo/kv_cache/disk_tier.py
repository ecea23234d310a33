"""The tier below the block pools: computed blocks go to files, and come back before a prompt is computed.

Blocks are saved outside of the steps: while the engine is idle, for a small share of its time while it is busy, and
when they are about to leave a pool. Saving blocks that leave a pool takes no more time than reads have saved, plus an
advance, so that a load that never reads is not slowed down. A thread writes the blocks, from a queue of bounded size; a
block that finds the queue full is not kept. When it is a waiting sequence's turn, threads read the blocks of its prefix
that the pools lack, if reading is predicted to be faster than computing them. `EngineCore` and its scheduler call
everything here, from one thread. See `block_files` for the folder, and `cache_sessions` for the sessions that clients
keep there.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import BlockFiles, Name
from octavo.kv_cache.block_hashes import extend_block_hashes
from octavo.kv_cache.cache_sessions import CacheSessions
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.saved_prompts import SavedPrompts
from octavo.sequence import Sequence as TokenSequence
from octavo.stats import EngineStats
from octavo.step_cost import StepCostModel, StepWork

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 64 << 20  # of blocks on their way to the folder, and as much on their way back
_IDLE_QUEUE_BYTES = 4 << 20  # the limit while the engine is idle, so that the writer is done when the next step begins
_MOST_QUEUED = 10_000  # entries of the queue; beyond them notes of use are dropped, which pile up if the disk hangs
_CHUNK_BYTES = 4 << 20  # of blocks that are read together: a few milliseconds
_FILE_BYTES = 32 << 10  # a smaller block counts as so many in a chunk: opening its file takes as long
_NUM_READERS = 2
_BUSY_SHARE = 0.003  # of a busy engine's time that saving may take, the writer's time included
_ADVANCE_S = 1.0  # time for saving blocks that leave a pool, before reads have saved any
_MOST_EARNED_S = 60.0  # upper bound of the time that reads earn for saving such blocks
_MOST_CREDIT_S = 0.02  # upper bound of the time that a busy engine spends on saving in one go
_PATIENCE = 2.0  # a prompt is computed if reading its blocks takes longer than this multiple of computing them,
_LEAST_PATIENCE_S = 1.0  # but not before this time, because reading may be slow on a busy machine
_IDLE_WAIT_S = 0.01  # longest wait for the writer before the caller looks for messages again
_MOST_LOOKS = 4  # failed lookups on disk for a prompt in a pool: each takes some microseconds
_LOOK_S = 0.01  # for all lookups of a prompt; if the disk takes longer, only known files are used
_WARNING_S = 60.0  # between two warnings of the same error
_SAVING_S = 10.0  # longest wait until all blocks are saved, in case the disk hangs
_COUNTERS = ("num_disk_hits", "disk_read_bytes", "num_disk_written", "disk_written_bytes", "num_disk_dropped")

# A waiting sequence starts now, waits for free blocks to read its own into, or waits until they are read.
Turn = Literal["starts", "waits", "reads"]

_Block = tuple[Name, NDArray[np.uint8]]
_Part = tuple[list[bytes], NDArray[np.uint8]]  # keys of one pool, and the contents of their blocks
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class BlockMemory(Protocol):
    """The memory of the blocks."""

    block_bytes: Sequence[int]  # of a block, by pool

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of the contents of blocks, [len(blocks), block_bytes[pool]]."""
        ...

    def wait_for_workers(self) -> bool:
        """Wait until `read_blocks` takes only the time of copying. Returns whether steps are later for it."""
        ...

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> None:
        """Overwrite blocks with `contents`, [len(blocks), block_bytes[pool]]."""
        ...


class _PoolWatch(Container[bytes]):
    """Tells the tier when blocks of one pool are indexed or lost. As a container it has the keys of the pool's blocks
    on disk."""

    def __init__(self, tier: DiskTier, pool: int) -> None:
        self._tier, self._pool = tier, pool

    def entered(self, block: int, key: bytes) -> None:
        self._tier.note_computed((self._pool, key), block)

    def leaves(self, block: int, key: bytes) -> None:
        self._tier.save_before_loss((self._pool, key))

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return self._tier.files.knows((self._pool, key))


class _Looks(Container[bytes]):
    """Contains the keys of a pool's blocks on disk, including blocks that another server has written. A lookup may
    touch the disk."""

    def __init__(self, files: BlockFiles, pool: int) -> None:
        self._files, self._pool = files, pool
        self._num_left = _MOST_LOOKS  # failed lookups that are still allowed

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        name = self._pool, key
        if self._files.knows(name) or (self._num_left > 0 and self._files.has(name)):
            return True
        self._num_left -= 1
        return False


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
    used: list[Name]  # all blocks that this prefix needs
    missing: list[Name]  # blocks of `used` that the pools lacked
    patience_s: float  # after this time the rest is computed instead
    has_begun: bool = False
    began: float = 0.0  # on the tier's clock
    unread: list[list[Name]] = field(default_factory=list)  # in chunks, the next one last
    reading: deque[Future[_Chunk]] = field(default_factory=deque)
    has_ended: bool = False


class DiskTier:
    """Keeps the indexed blocks of the pools of `cache` in `files`."""

    def __init__(
        self,
        files: BlockFiles,
        memory: BlockMemory,
        cache: KVCacheManager,
        cost: StepCostModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files, self._memory, self._cache, self._cost, self._clock = files, memory, cache, cost, clock
        self.watches = [_PoolWatch(self, pool) for pool in range(len(cache.pools))]
        for pool, watch in zip(cache.pools, self.watches, strict=True):
            pool.watchers.append(watch)
        self.unsaved: dict[Name, int] = {}  # blocks that only a pool has, the oldest first
        self._credit_s = 0.0  # time that saving may take now while the engine is busy
        self._earned_s = _ADVANCE_S  # time that saving blocks that leave a pool may take now
        self._fetches: list[Fetch] = []
        self._reading_bytes: dict[Future[_Chunk], int] = {}  # of chunks that are being read
        self._turns: dict[str, Fetch | None] = {}  # by request, from its turn until it starts
        self._to_read: _Jobs = SimpleQueue()
        self._to_look: _Jobs = SimpleQueue()
        self._look: Future[int] | None = None  # the last one
        self._abandoned: list[Future[_Chunk]] = []  # chunks that nobody waits for any more
        for jobs in (*[self._to_read] * _NUM_READERS, self._to_look):
            # Daemon threads, so that the process can end even if the disk hangs.
            threading.Thread(target=_do_jobs, args=(jobs,), name="block-reader", daemon=True).start()
        self._lock = threading.Condition()  # guards what the writer's thread shares: everything below
        self._queue: deque[_Block | Callable[[], None]] = deque()  # blocks to write, and other work in between
        self._queued: set[Name] = set()
        self._queued_bytes = 0
        self._is_writing = self._is_closed = False
        self._is_emptying = False  # all files of the folder are being removed
        self.keep_until: dict[Name, float] = {}  # for blocks that are not written yet
        self._write_s = 0.0  # the writer's processor time for a block, lately
        self._last_error, self._next_warning = "", 0.0
        self._stats = EngineStats()
        self._writer = threading.Thread(target=self._write, name="block-writer", daemon=True)
        self._writer.start()
        self.sessions = CacheSessions(self, cache, min(memory.block_bytes))
        self.saved_prompts = SavedPrompts(self, cache, clock)

    def take_stats(self, stats: EngineStats) -> None:
        """Add the gauges, and the increments of the counters since the last call."""
        with self._lock:
            own, self._stats = self._stats, EngineStats()
        for name in _COUNTERS:
            setattr(stats, name, getattr(own, name))
        stats.num_disk_damaged, self.files.num_damaged = self.files.num_damaged, 0
        stats.disk_bytes, stats.disk_kept_bytes = self.files.num_bytes, self.files.num_kept_bytes
        stats.num_disk_sessions = self.sessions.count

    def forget(self, removes_files: bool) -> None:
        """Forget the blocks of the pools, whose contents are about to be lost. With `removes_files` forget the folder's
        blocks too: the writer removes their files, and they are not found meanwhile."""
        for name in list(self.unsaved):
            self.forget_block(name)
        for fetch in list(self._fetches):
            self.end(fetch)
        if removes_files:
            self.sessions.clear()
            with self._lock:
                self.keep_until.clear()
                self._queue.clear()
                self._queued.clear()
                self._queued_bytes = 0
            self._is_emptying = True
            self.do_in_turn(self._remove_all)

    def _remove_all(self) -> None:
        try:
            self.files.remove_all()
        finally:
            self._is_emptying = False

    def wait_until_saved(self, timeout_s: float | None = None) -> bool:
        """Return when nothing is left to write, or after `timeout_s`. Any thread may call it, while the engine's thread
        saves blocks."""
        with self._lock:
            return self._lock.wait_for(
                lambda: not (self.unsaved or self._queue or self._is_writing) or self._is_closed, timeout_s
            )

    def save_all(self) -> bool:
        """Save all unsaved blocks, and wait up to `_SAVING_S` until they are written. Returns whether they are."""
        end = time.monotonic() + _SAVING_S
        while time.monotonic() < end and self.save_while_idle():
            pass
        return self.wait_until_saved(max(0.0, end - time.monotonic()))

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
            with self._lock:
                self._is_closed = True
                self._lock.notify_all()
        if is_saved:
            self._writer.join()  # the thread holds the executor; not joined if the disk hangs: it would never end
        for _ in range(_NUM_READERS):
            self._to_read.put(None)
        self._to_look.put(None)

    # Blocks that go to the folder.

    def is_on_its_way(self, name: Name) -> bool:
        """Return whether a block is to be written."""
        return name in self.unsaved or name in self._queued

    def keep_on_arrival(self, names: Iterable[Name], keep_until: float) -> None:
        """Note that those of these blocks that are not written yet are to be kept until `time.time` is `keep_until`."""
        with self._lock:
            self.keep_until |= {name: keep_until for name in names if self.is_on_its_way(name)}

    def forget_block(self, name: Name) -> None:
        """Do not save a block, unless the writer has it already."""
        self.unsaved.pop(name, None)
        with self._lock:
            self.keep_until.pop(name, None)

    def note_computed(self, name: Name, block: int) -> None:
        if (self._is_emptying or not self.files.knows(name)) and name not in self._queued:
            self.unsaved[name] = block

    def save_before_loss(self, name: Name) -> None:
        """Save a block that is about to be overwritten, if it is unsaved, if the writer keeps up, and if a session
        keeps the block or reads have earned the time."""
        block = self.unsaved.pop(name, None)
        if block is None:
            return
        if name in self.keep_until:
            self._save(name, block)
        else:
            self._earned_s -= self._save(name, block, self._earned_s > 0)

    def save_while_busy(self, step_s: float) -> None:
        """Save blocks in a small share of the time of a step, which took `step_s`."""
        if not self.unsaved:
            return
        self._credit_s = min(self._credit_s + _BUSY_SHARE * step_s, _MOST_CREDIT_S)
        if self._credit_s <= 0 or not self._has_room():
            return
        # Saving may take as long again as a wait that delays steps: later waits would delay them too.
        wait_s = self._wait_for_workers()
        self._credit_s -= wait_s
        while self._credit_s > -2 * wait_s and self.unsaved and self._has_room():
            self._credit_s -= self._save_oldest()

    def save_while_idle(self) -> bool:
        """Save a block, or wait shortly for the writer. Returns False if no block is unsaved."""
        if not self.unsaved:
            return False
        with self._lock:
            has_room = self._lock.wait_for(lambda: self._has_room(_IDLE_QUEUE_BYTES), _IDLE_WAIT_S)
        if has_room:
            self._save_oldest()
        return not self._is_closed

    def save_while_room(self) -> None:
        """Save blocks until the writer has no room for more."""
        while self.unsaved and self._has_room():
            self._save_oldest()

    def save_first(self, names: Iterable[Name]) -> None:
        """Save these blocks before others."""
        first = {name: self.unsaved.pop(name) for name in names if name in self.unsaved}
        self.unsaved = first | self.unsaved

    def _save_oldest(self) -> float:
        name = next(iter(self.unsaved))
        return self._save(name, self.unsaved.pop(name))

    def _save(self, name: Name, block: int, is_earned: bool = True) -> float:
        """Queue a copy of a block, if there is room. Returns the seconds that copying takes and writing will take."""
        if not is_earned or not self._has_room():
            with self._lock:
                self.keep_until.pop(name, None)
                self._stats.num_disk_dropped += 1
            return 0.0
        wait_s = self._wait_for_workers()
        begin = self._clock()
        contents = self._memory.read_blocks(name[0], [block])[0]
        with self._lock:
            self._queue.append((name, contents))
            self._queued.add(name)
            self._queued_bytes += contents.nbytes
            self._lock.notify_all()
        return wait_s + self._clock() - begin + self._write_s

    def _wait_for_workers(self) -> float:
        """Wait for the workers. Returns the seconds that this delays steps: none if the next step waits for them
        too."""
        begin = self._clock()
        return self._clock() - begin if self._memory.wait_for_workers() else 0.0

    def _has_room(self, num_bytes: int = sys.maxsize) -> bool:
        """Return whether a queue limited to `num_bytes` has room for another block. An empty queue takes any block."""
        return self._queued_bytes < min(num_bytes, _QUEUE_BYTES) and not self._is_closed

    def _write(self) -> None:
        """The writer's thread: write queued blocks until the tier is closed."""
        while True:
            with self._lock:
                self._is_writing = False
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._queue or self._is_closed)
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
        begin, error, is_written = time.thread_time(), "", False
        try:
            is_written = self.files.write(name, contents, self.keep_until.get(name, 0.0))
        except Exception as e:
            error = (isinstance(e, OSError) and e.strerror) or repr(e)
        now = self._clock()
        if error and (error != self._last_error or now >= self._next_warning):
            logger.warning("blocks of the KV cache are not kept on disk: %s", error)
            self._last_error, self._next_warning = error, now + _WARNING_S
        with self._lock:
            self._write_s += (time.thread_time() - begin - self._write_s) / 8
            if name in self._queued:  # it was not forgotten
                self._queued.remove(name)
                self._queued_bytes -= contents.nbytes
                self.keep_until.pop(name, None)
            self._stats.num_disk_written += is_written
            self._stats.num_disk_dropped += not is_written
            self._stats.disk_written_bytes += contents.nbytes * is_written

    # Blocks that come back.

    def turn(self, seq: TokenSequence) -> Turn:
        """Return what a waiting sequence does now that it is its turn. Begins to read its blocks once they have
        room."""
        if seq.host_blocks or (seq.beam_search is not None and seq.num_preemptions):  # beams wait for each other
            return "starts"
        request_id = seq.request.request_id
        if request_id not in self._turns:
            self._turns[request_id] = self.find(seq)
        fetch = self._turns[request_id]
        if fetch is None:
            return "starts"
        if not fetch.has_begun:
            if not self._fit(fetch.missing):
                return "waits"
            self._begin(fetch)
        return "starts" if self.is_over(fetch) else "reads"

    def leave(self, seq: TokenSequence) -> None:
        """Forget the fetch of a sequence that has started or ended."""
        if (fetch := self._turns.pop(seq.request.request_id, None)) is not None:
            self.end(fetch)

    def wait(self, timeout_s: float) -> None:
        """Wait until a chunk has been read, if a fetch is under way."""
        if reading := [fetch.reading[0] for fetch in self._fetches if fetch.reading]:
            wait(reading, timeout_s, FIRST_COMPLETED)

    def find(self, seq: TokenSequence) -> Fetch | None:
        """Return the blocks to read for a sequence's prefix. Returns None if the pools have as much of the prefix, or
        if computing the tokens is faster."""
        extend_block_hashes(seq, self._cache.block_size)
        keys, pools = seq.block_hashes, self._cache.pools
        limit = min(len(keys), (seq.num_tokens - 1) // self._cache.block_size)
        if limit <= 0 or seq.params.prompt_logprobs is not None:
            return None
        if self._is_emptying or self._hangs():
            return None
        num_cached, num_found = self._cache.num_prefix_blocks(keys, limit), self._num_found(keys, limit)
        used = self._cache.prefix_names(keys, num_found)
        missing = [(pool, key) for pool, key in used if pools[pool].lookup(key) is None]
        counts = Counter(pool for pool, _ in missing)
        if num_found <= num_cached or any(counts[i] > pools[i].num_usable for i in counts):
            self._touch(used)
            return None
        compute_s = self._compute_s(num_cached, num_found)
        if self._read_s(missing) >= compute_s:
            self._cost.doubt_reads()
            self._touch(used)
            return None
        return Fetch(keys, num_cached, num_found, used, missing, max(_LEAST_PATIENCE_S, _PATIENCE * compute_s))

    def _begin(self, fetch: Fetch) -> None:
        for pool, key in fetch.used:  # count cached blocks as used now, so that the blocks being read do not evict them
            if (block := self._cache.pools[pool].lookup(key)) is not None:
                self._cache.pools[pool].share(block)
                self._cache.pools[pool].release(block)
        fetch.has_begun, fetch.began, fetch.unread = True, self._clock(), self._chunks(fetch.missing)
        self._fetches.append(fetch)
        self._read_ahead(fetch)

    def _num_found(self, keys: list[bytes], limit: int) -> int:
        """Return the longest prefix, in blocks up to `limit`, that pools and folder have together. A thread looks for
        other servers' files; if it takes too long, or is still busy with an earlier lookup, only known files count."""
        num_known = self._cache.num_prefix_blocks(keys, limit, self.watches)
        if num_known == limit or (self._look is not None and not self._look.done()):
            return num_known
        looks = [_Looks(self.files, pool) for pool in range(len(self._cache.pools))]
        self._look = Future()
        self._to_look.put((self._look, partial(self._cache.num_prefix_blocks, keys, limit, looks)))
        wait([self._look], _LOOK_S)
        return self._look.result() if self._look.done() and self._look.exception() is None else num_known

    def is_over(self, fetch: Fetch) -> bool:
        """Put the chunks that have been read into the pools. Returns whether the prompt may start."""
        while not fetch.has_ended and fetch.reading and fetch.reading[0].done():
            future = fetch.reading.popleft()
            del self._reading_bytes[future]
            if future.exception() is not None:
                self.end(fetch)
                break
            chunk = future.result()
            num_bytes = sum(contents.nbytes for _, contents in chunk.parts.values())
            with self._lock:
                self._stats.disk_read_bytes += num_bytes
            self._cost.observe_read(num_bytes, chunk.seconds)
            if not self._take_in(chunk) or not chunk.is_whole:
                self.end(fetch)
            self._read_ahead(fetch)
        is_late = self._clock() - fetch.began > fetch.patience_s
        if not fetch.has_ended and (not fetch.reading or is_late):
            self.end(fetch)
        return fetch.has_ended

    def end(self, fetch: Fetch) -> None:
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
                self._abandoned.append(future)
        fetch.reading.clear()
        num_blocks = self._cache.num_prefix_blocks(fetch.keys, fetch.num_found_blocks)
        if num_blocks > fetch.num_cached_blocks:
            saved_s = self._compute_s(fetch.num_cached_blocks, num_blocks) - (self._clock() - fetch.began)
            self._earned_s = min(_MOST_EARNED_S, self._earned_s + max(0.0, saved_s))
            with self._lock:
                self._stats.num_disk_hits += (num_blocks - fetch.num_cached_blocks) * self._cache.block_size

    def _compute_s(self, num_cached_blocks: int, num_found_blocks: int) -> float:
        """Return the predicted seconds to compute the tokens of blocks num_cached_blocks .. num_found_blocks."""
        first, end = num_cached_blocks * self._cache.block_size, num_found_blocks * self._cache.block_size
        return self._cost.seconds(StepWork().plus(first, end - first, 1))

    def _read_s(self, names: Sequence[Name]) -> float:
        """Return the predicted seconds to read blocks, behind all reads that are under way."""
        return self._cost.read_s(self._num_bytes(names) + sum(self._reading_bytes.values()))

    def _num_bytes(self, names: Sequence[Name]) -> int:
        return sum(self._memory.block_bytes[pool] for pool, _ in names)

    def _hangs(self) -> bool:
        """Return whether a reader is still reading a chunk whose fetch has ended."""
        for future in [future for future in self._abandoned if future.done()]:
            self._abandoned.remove(future)
            del self._reading_bytes[future]
        return bool(self._abandoned)

    def _fit(self, names: Sequence[Name]) -> bool:
        """Return whether the pools have free blocks for all of `names`, in addition to the blocks that other waiting
        sequences have read: these must not be evicted before those start."""
        others = [fetch.missing for fetch in self._turns.values() if fetch is not None and fetch.has_begun]
        counts = Counter(pool for one in (names, *others) for pool, _ in one)
        return all(count <= self._cache.pools[pool].num_free for pool, count in counts.items())

    def _chunks(self, names: Sequence[Name]) -> list[list[Name]]:
        """Return `names` in chunks to read together, the first one last."""
        chunks: list[list[Name]] = []
        num_bytes = _CHUNK_BYTES
        for name in names:
            if num_bytes >= _CHUNK_BYTES:
                chunks.append([])
                num_bytes = 0
            chunks[-1].append(name)
            num_bytes += max(self._memory.block_bytes[name[0]], _FILE_BYTES)
        return chunks[::-1]

    def _touch(self, names: Sequence[Name]) -> None:
        """Mark the blocks of a prompt as used."""
        if names:
            self.do_in_turn(partial(self.files.touch, names), may_skip=True)

    def do_in_turn(self, work: Callable[[], None], may_skip: bool = False) -> None:
        """Have the writer do `work` after everything queued before. With `may_skip` drop it if the queue is too
        long."""
        if may_skip and len(self._queue) >= _MOST_QUEUED:
            return
        with self._lock:
            self._queue.append(work)
            self._lock.notify_all()

    def _read_ahead(self, fetch: Fetch) -> None:
        """Have the next chunks read: at least one, and as many as `_QUEUE_BYTES` allow for all fetches."""
        while fetch.unread and (not fetch.reading or sum(self._reading_bytes.values()) < _QUEUE_BYTES):
            names, future = fetch.unread.pop(), Future[_Chunk]()
            fetch.reading.append(future)
            self._reading_bytes[future] = self._num_bytes(names)
            self._to_read.put((future, partial(self._read_chunk, names)))

    def _read_chunk(self, names: Sequence[Name]) -> _Chunk:
        """Read blocks, in each pool up to the first one that is missing or damaged."""
        begin, parts, num_read = time.monotonic(), dict[int, _Part](), 0
        for pool, num_bytes in enumerate(self._memory.block_bytes):
            if keys := [key for of, key in names if of == pool]:
                contents, count = np.empty((len(keys), num_bytes), np.uint8), 0
                while count < len(keys) and self.files.read((pool, keys[count]), contents[count]):
                    count += 1
                parts[pool] = keys[:count], contents[:count]
                num_read += count
        return _Chunk(parts, num_read == len(names), time.monotonic() - begin)

    def _take_in(self, chunk: _Chunk) -> bool:
        """Put blocks into the pools, as free, indexed blocks. Returns False if there are too few free blocks."""
        for number, (keys, contents) in chunk.parts.items():
            pool = self._cache.pools[number]
            missing = [i for i, key in enumerate(keys) if pool.lookup(key) is None]
            if len(missing) > pool.num_free:
                return False
            if missing:
                blocks = [pool.allocate() for _ in missing]
                own = contents if len(missing) == len(keys) else contents[missing]
                self._memory.write_blocks(number, blocks, own)
                for block, i in zip(blocks, missing, strict=True):
                    pool.register(block, keys[i])
                    pool.release(block)
        return True


def _do_jobs(jobs: _Jobs) -> None:
    """A reader's thread: run jobs, and complete their futures, until it gets None."""
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as e:
                logger.exception("the cache on disk could not be read")
                future.set_exception(e)
        del job, future, work  # otherwise they would keep the engine alive while the thread waits
