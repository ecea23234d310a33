"""The tier on disk below the pools: when blocks are saved, when they are read, and that nobody waits for a disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.kv_cache import block_writer, cache_sessions, disk_fetches, disk_tier
from octavo.kv_cache.block_files import BlockFiles, block_file_name
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.disk_fetches import Fetch, Readiness
from octavo.kv_cache.disk_tier import DiskTier
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence as TokenSequence
from octavo.stats import EngineStats
from octavo.step_cost import StepCostModel
from tests.waiting import wait_until

SIZE, NUM_BLOCKS = 4, 12
BLOCK_BYTES = 64
FULL = LayerCacheSpec("full", num_kv_heads=2, key_size=8, value_size=8)
WINDOW = LayerCacheSpec("window", num_kv_heads=2, key_size=8, value_size=8, window=6)
STATE = LayerCacheSpec("state", num_bytes=32)


class Memory:
    """The memory of the pools."""

    is_in_use = False  # by a step in flight

    def __init__(self, num_blocks: list[int]) -> None:
        self.block_bytes = [BLOCK_BYTES] * len(num_blocks)
        self.blocks = [np.zeros((count, BLOCK_BYTES), np.uint8) for count in num_blocks]

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self.blocks[pool][list(blocks)]

    def wait_for_workers(self) -> bool:
        return False

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> bool:
        if self.is_in_use:
            return False
        self.blocks[pool][list(blocks)] = contents
        return True


class Engine:
    """Pools, their memory, and the tier. A block is computed by writing a hash of its key."""

    def __init__(self, folder: Path, layers: Sequence[LayerCacheSpec] = (FULL,)) -> None:
        groups = group_layers(layers)
        num_pools = 1 + max(group.pool for group in groups)
        num_blocks = [NUM_BLOCKS * sum(group.pool == pool for group in groups) for pool in range(num_pools)]
        self.cache = KVCacheManager(groups, num_blocks, SIZE, [0] * num_pools, True)
        self.memory, self.now = Memory(num_blocks), 0.0
        self.cost = StepCostModel.derived(10**9, 1000, 1e10, 1e11)
        self.files = BlockFiles(str(folder), b"f" * 16, 1 << 20)
        self.tier = DiskTier(self.files, self.memory, self.cache, self.cost, lambda: self.now)

    def compute(self, tokens: list[int]) -> TokenSequence:
        """Run a prompt to its end, a block at a time as with states, and keep its blocks."""
        seq = TokenSequence(request=request(tokens), key=(0, 0), seed=0, token_ids=list(tokens))  # type: ignore[arg-type]
        assert self.cache.share_prefix(seq, self.cache.find_prefix(seq), 64)
        while seq.num_computed_tokens < len(tokens):
            end = min(len(tokens), seq.num_computed_tokens + SIZE)
            assert self.cache.grow(seq, end) is not None
            for pool, moves in enumerate(self.cache.take_moves()):
                for source, target in moves.copy:
                    self.memory.blocks[pool][target] = self.memory.blocks[pool][source]
            for group, table in enumerate(seq.block_tables):
                pool = self.cache._pool_of[group]
                self.memory.blocks[pool][table[-1]] = np.random.default_rng([group, *tokens[:end]]).integers(
                    0, 256, BLOCK_BYTES, np.uint8
                )
            seq.num_computed_tokens = end
            self.cache.register_computed(seq, end)
        self.cache.release(seq)
        return seq

    def contents(self) -> dict[BlockName, bytes]:
        """What the index of each pool leads to."""
        return {
            (number, key): self.memory.blocks[number][block].tobytes()
            for number, pool in enumerate(self.cache.pools)
            for key, block in pool._index.items()
        }

    def save(self) -> None:
        while self.tier.save_while_idle():
            pass
        self.tier.wait_until_saved()

    def begin(
        self, tokens: list[int], name: str = "r", may_wait: bool = True, **params: Any
    ) -> tuple[TokenSequence, Fetch | None]:
        """Let it be the turn of a prompt."""
        asked = request(tokens, **params)
        asked.request_id = name
        seq = TokenSequence(request=asked, key=(0, 0), seed=0, token_ids=list(tokens))  # type: ignore[arg-type]
        self.tier.fetches.prepare(seq, may_wait)
        return seq, self.tier.fetches._by_request[name]

    def fetched(self, tokens: list[int], **params: Any) -> Fetch | None:
        """Let it be the turn of a prompt until it starts."""
        seq, fetch = self.begin(tokens, **params)
        wait_until(lambda: self.tier.fetches.prepare(seq, may_wait=True) is Readiness.READY)
        self.tier.fetches.forget(seq)
        return fetch

    def stats(self) -> EngineStats:
        stats = EngineStats()
        self.tier.take_stats(stats)
        return stats


def request(tokens: list[int], **params: Any) -> EngineRequest:
    return EngineRequest("r", Prompt(list(tokens)), SamplingParams(**params), [0], 16, 0.0)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(disk_fetches, "_LOOKUP_GRACE_S", 60.0)
    made: list[Engine] = []

    def make(layers: Sequence[LayerCacheSpec] = (FULL,)) -> Engine:
        made.append(Engine(tmp_path, layers))
        return made[-1]

    yield make
    for one in made:
        one.tier.close()


@pytest.mark.parametrize("layers", [(FULL,), (FULL, WINDOW), (FULL, STATE), (STATE,), (FULL, WINDOW, STATE)], ids=str)
def test_the_next_engine_finds_what_was_computed(layers: Sequence[LayerCacheSpec], engines: Any) -> None:
    tokens = list(range(100, 122))
    first = engines(layers)
    first.compute(tokens)
    before = first.contents()
    first.save()
    assert first.stats().num_disk_written == len(before) == len(list(first.files._files))
    second = engines(layers)
    fetch = second.fetched(tokens)
    assert fetch is not None and fetch.num_found_blocks == 5
    assert second.contents().items() <= before.items() and second.contents()
    seq = TokenSequence(request=request(tokens), key=(0, 0), seed=0, token_ids=list(tokens))  # type: ignore[arg-type]
    assert second.cache.find_prefix(seq).num_tokens == 20
    assert all(pool.num_used == 0 for pool in second.cache.pools), "what was read waits as free blocks"
    second.cache.check([])
    stats = second.stats()
    assert (stats.num_disk_hits, stats.disk_read_bytes) == (20, BLOCK_BYTES * len(second.contents()))
    second.save()
    assert second.stats().num_disk_written == 0, "what came from the folder is not written again"
    assert second.fetched(tokens) is None, "the pools have it"


def test_a_block_is_saved_before_it_leaves_the_pool(engines: Any) -> None:
    one = engines()
    one.compute(list(range(40)))
    saved = one.contents()
    one.compute(list(range(100, 148)))  # takes every block
    one.tier.wait_until_saved(timeout_s=0)
    wait_until(lambda: len(list(one.files._files)) >= len(saved))
    for (pool, key), contents in saved.items():
        found = np.empty(BLOCK_BYTES, np.uint8)
        assert one.files.read((pool, key), found) and found.tobytes() == contents


def takes_3_ms(one: Engine) -> None:
    """Have the copy of a block take so long, and nothing else."""
    read = one.memory.read_blocks

    def slow(pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        one.now += 0.003
        one.tier.writer.write_s = 0.0
        return read(pool, blocks)

    one.memory.read_blocks = slow  # type: ignore[method-assign]


def test_what_leaves_a_pool_is_saved_in_the_time_that_reads_have_saved(engines: Any) -> None:
    one = engines()
    one.compute(list(range(22)))
    one.save()
    one.cache.forget_prefixes()
    takes_3_ms(one)
    one.tier._eviction_save_s = 0.004
    for number in range(1, 4):
        one.compute([1000 * number + place for place in range(48)])  # takes every block
    assert one.stats().num_disk_dropped == 24 - 2 and one.tier._eviction_save_s < 0
    one.tier.forget_pools(removes_files=False)
    one.cache.forget_prefixes()
    before, compute_s = one.tier._eviction_save_s, one.tier.fetches._compute_s(0, 5)
    assert compute_s > 0.01 and one.fetched(list(range(22))) is not None
    assert one.tier._eviction_save_s == pytest.approx(before + compute_s)


def test_a_busy_engine_saves_in_a_small_share_of_its_time(engines: Any) -> None:
    one = engines()
    one.compute(list(range(40)))
    takes_3_ms(one)
    for _ in range(6):
        one.tier.save_while_busy(0.001 / disk_tier._BUSY_SHARE)
    assert len(one.tier.unsaved) == 10 - 2
    one.tier.save_while_busy(1e9)
    assert len(one.tier.unsaved) >= 10 - 2 - 7, "saved-up time is bounded"


def test_workers_that_compute_are_waited_for_in_no_time_of_saving(engines: Any) -> None:
    one = engines()

    def wait() -> bool:
        one.now += 60.0
        return False

    one.memory.wait_for_workers = wait
    for start in (0, 100, 200):
        one.compute(list(range(start, start + 40)))
    assert one.stats().num_disk_dropped == 0 and one.now > 60.0


def test_a_wait_that_delays_steps_counts_and_serves_for_several_blocks(engines: Any) -> None:
    one = engines()
    one.compute(list(range(40)))
    takes_3_ms(one)
    waits, step = list[int](), 0

    def wait() -> bool:
        if step not in waits:  # once a step
            waits.append(step)
            one.now += 0.010
        return True

    one.memory.wait_for_workers = wait
    for _ in range(6):
        step += 1
        one.tier.save_while_busy(0.001 / disk_tier._BUSY_SHARE)
    assert waits == [1] and len(one.tier.unsaved) == 10 - 4, "10 ms of waiting, and as many of saving"
    for _ in range(44):
        step += 1
        one.tier.save_while_busy(0.001 / disk_tier._BUSY_SHARE)
    assert len(waits) == 3 and len(one.tier.unsaved) == 0
    one.tier._eviction_save_s, before = 0.015, one.stats().num_disk_dropped
    for number in range(1, 4):
        step += 1
        one.compute([1000 * number + place for place in range(48)])  # takes every block
    assert one.stats().num_disk_dropped - before == 24 - 2 and one.tier._eviction_save_s < 0


def test_an_idle_engine_leaves_the_writer_little_to_do(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_IDLE_QUEUE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(disk_tier, "_IDLE_WAIT_S", 0.0)
    one, may_go = engines(), threading.Event()
    write = one.files.write
    one.files.write = lambda *args: may_go.wait() and write(*args)
    one.compute(list(range(40)))
    for _ in range(10):
        assert one.tier.save_while_idle()
    assert (one.tier.writer.queued_bytes, len(one.tier.unsaved)) == (2 * BLOCK_BYTES, 10 - 2)
    assert one.tier.num_unwritten == 10
    may_go.set()
    one.save()
    assert one.stats().num_disk_written == 10 and one.tier.num_unwritten == 0


def test_blocks_that_find_the_queue_full_are_dropped_and_nobody_waits(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_QUEUE_BYTES", 2 * BLOCK_BYTES)
    one, may_go = engines(), threading.Event()
    write = one.files.write
    one.files.write = lambda *args: may_go.wait() and write(*args)  # a disk that hangs
    one.compute(list(range(40)))
    one.compute(list(range(100, 148)))
    may_go.set()
    one.save()
    stats = one.stats()
    assert stats.num_disk_dropped == 8 and stats.num_disk_written == 2 + 12


def test_a_disk_that_refuses_is_not_fatal(engines: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = engines()

    def refuse(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    write, one.files.write = one.files.write, refuse
    one.compute(list(range(40)))
    one.save()
    assert (one.stats().num_disk_dropped, caplog.text.count("No space left on device")) == (10, 1)
    one.files.write = write
    one.compute(list(range(200, 220)))
    one.save()
    assert one.stats().num_disk_written == 5
    one.files.write = refuse
    for number, after_s in enumerate((0.0, 59.0, 1.0)):
        one.now += after_s
        one.compute(list(range(300 + 40 * number, 340 + 40 * number)))
        one.save()
    assert caplog.text.count("No space left on device") == 2, "the same error is told once a minute"


def test_a_prompt_is_computed_where_that_is_faster(engines: Any) -> None:
    first = engines()
    first.compute(list(range(22)))
    first.save()
    second = engines()
    second.tier.fetches._read_cost.observe(1, 100.0)  # such a disk takes a day
    assert second.fetched(list(range(22))) is None
    second.tier.fetches._read_cost._s_per_byte = 0.0
    assert second.fetched(list(range(22)), prompt_logprobs=1) is None, "the whole prompt is computed"
    assert second.fetched(list(range(4))) is None, "one token is computed in any case"
    compute_s = second.tier.fetches._compute_s
    assert compute_s(0, 3) < compute_s(5, 9) < compute_s(0, 5), "only the blocks from 5 on count"
    assert second.fetched(list(range(22))) is not None


def test_a_damaged_block_ends_the_prefix(engines: Any, tmp_path: Path) -> None:
    first = engines()
    seq = first.compute(list(range(22)))
    first.save()
    path = tmp_path.joinpath(first.files._path_of("66" * 16, block_file_name((0, seq.block_hashes[3]))))
    path.write_bytes(path.read_bytes()[:-40])
    second = engines()
    second.fetched(list(range(22)))
    stats = second.stats()
    assert (stats.num_disk_hits, stats.num_disk_damaged, path.exists()) == (12, 1, False)
    before = first.contents()
    assert second.contents() == {name: before[name] for name in second.contents()}


def held(work: Callable[..., Any]) -> tuple[Callable[..., Any], threading.Event, threading.Event]:
    """Return `work` that says when it has begun and waits until it may go on."""
    began, may_go = threading.Event(), threading.Event()

    def wait(*args: Any) -> Any:
        began.set()
        may_go.wait()
        return work(*args)

    return wait, began, may_go


def with_held_read(engines: Any) -> tuple[Any, Any, Any, threading.Event, threading.Event]:
    """Return an engine that has begun to read a prompt's blocks, the prompt's sequence and fetch, and the events of
    `held`."""
    first = engines()
    first.compute(list(range(22)))
    first.save()
    second = engines()
    second.files.read, began, may_go = held(second.files.read)
    return second, *second.begin(list(range(22))), began, may_go


def test_a_disk_that_hangs_is_waited_for_no_longer_than_computing_takes(engines: Any) -> None:
    second, seq, fetch, began, may_go = with_held_read(engines)
    assert fetch is not None and not second.tier.fetches._advance(fetch, may_wait=True)
    began.wait()
    second.now = fetch.patience_s + 1
    assert second.tier.fetches.prepare(seq, may_wait=True) is Readiness.READY and second.contents() == {}
    second.tier.fetches.forget(seq)
    assert second.fetched(list(range(22))) is None, "and the next request does not wait at all"
    may_go.set()
    wait_until(lambda: all(future.done() for future in second.tier.fetches._abandoned))
    assert second.fetched(list(range(22))) is not None, "until it answers again"


def test_blocks_that_nobody_reads_any_more_are_not_waited_for(engines: Any) -> None:
    first = engines()
    first.compute(list(range(40)))
    first.save()
    second, began, may_go = engines(), threading.Semaphore(0), threading.Event()
    read = second.files.read

    def hang(*args: Any) -> Any:
        began.release()
        may_go.wait()
        return read(*args)

    second.files.read = hang
    second.tier.fetches._chunks = lambda names: deque([name] for name in names)
    seq, fetch = second.begin(list(range(40)))
    assert fetch is not None and sum(second.tier.fetches._reading_bytes.values()) == 9 * BLOCK_BYTES
    for _ in range(disk_fetches._NUM_READERS):
        began.acquire()
    second.tier.fetches.forget(seq)
    assert sum(second.tier.fetches._reading_bytes.values()) == disk_fetches._NUM_READERS * BLOCK_BYTES
    may_go.set()
    wait_until(lambda: all(future.done() for future in second.tier.fetches._abandoned))
    assert second.fetched(list(range(40))) is not None and second.tier.fetches._reading_bytes == {}


def test_the_read_of_an_aborted_request_does_not_keep_another_prompt_from_the_disk(engines: Any) -> None:
    second, seq, fetch, began, may_go = with_held_read(engines)
    began.wait()
    second.tier.fetches.forget(seq)
    assert second.tier.fetches._abandoned
    other, planned = second.begin(list(range(22)), "other")
    assert planned is not None, "a disk that reads does not hang"
    second.tier.fetches.forget(other)
    second.now = fetch.patience_s + 1
    assert second.begin(list(range(22)), "late")[1] is None, "by now it hangs"
    may_go.set()


@pytest.mark.parametrize("num_cached", [10, 22])
def test_prompts_that_wait_while_the_pools_are_forgotten_read_all_blocks(engines: Any, num_cached: int) -> None:
    """Where the pools had a part of the prompt, and where they had all of it."""
    first = engines()
    first.compute(list(range(22)))
    first.save()
    second = engines()
    second.compute(list(range(num_cached)))
    second.tier.fetches._fit = lambda names: False
    seq, _ = second.begin(list(range(22)))
    second.tier.forget_pools(removes_files=False)
    second.cache.forget_prefixes()
    del second.tier.fetches._fit
    wait_until(lambda: second.tier.fetches.prepare(seq, may_wait=True) is Readiness.READY)
    assert len(second.contents()) == 5


def test_a_disk_that_hangs_while_others_blocks_are_looked_for_stops_nobody(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_LOOKUP_GRACE_S", "_LOOKUP_S"):
        monkeypatch.setattr(disk_fetches, limit, 0.0)
    one, other, may_go, looks = engines(), engines(), threading.Event(), list[BlockName]()
    one.compute(list(range(22)))
    one.save()
    has = other.files.has

    def hang(name: BlockName) -> bool:
        looks.append(name)
        may_go.wait()
        return has(name)

    other.files.has = hang
    assert [other.fetched(list(range(22))) for _ in range(3)] == [None] * 3
    wait_until(lambda: looks)
    assert len(looks) == 1, "nobody looks again before the disk answers"
    may_go.set()
    wait_until(lambda: other.tier.fetches._late_lookup.done())
    assert other.fetched(list(range(22))) is not None, "the thread has found them"


def test_what_other_servers_have_is_looked_for_while_others_are_computed(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engines(), engines()
    one.compute(list(range(22)))
    one.save()
    monkeypatch.setattr(disk_fetches, "_LOOKUP_GRACE_S", 0.0)
    other.files.has, began, may_go = held(other.files.has)
    fetches = other.tier.fetches
    seqs = [TokenSequence(request=request(one), key=(0, 0), seed=0, token_ids=one) for one in ([*range(22)], [9] * 22)]  # type: ignore[arg-type]
    for number, seq in enumerate(seqs):
        seq.request.request_id = str(number)
        assert fetches.prepare(seq, may_wait=False) is Readiness.READING, "nobody waits for the disk"
    began.wait()
    assert fetches.prepare(seqs[0], may_wait=True) is Readiness.READING
    may_go.set()
    fetches.wait(60.0)
    wait_until(lambda: fetches.prepare(seqs[0], may_wait=False) is Readiness.READY)
    assert other.stats().num_disk_hits == 20
    wait_until(lambda: fetches.prepare(seqs[1], may_wait=False) is Readiness.READY)
    for seq in seqs:
        fetches.forget(seq)
    assert fetches._lookups == {} and fetches._late_lookup is None


def test_blocks_that_a_step_in_flight_uses_are_filled_after_it(engines: Any) -> None:
    first = engines()
    first.compute(list(range(22)))
    first.save()
    second = engines()
    second.compute(list(range(100, 140)))
    seq, fetch = second.begin(list(range(22)))
    assert fetch is not None
    wait_until(lambda: fetch.reading[0].done())
    second.memory.is_in_use = True
    num_free = second.cache.pools[0].num_free
    for _ in range(3):
        assert second.tier.fetches.prepare(seq, may_wait=False) is Readiness.READING
    assert second.cache.pools[0].num_free == num_free
    kept = len(second.cache.pools[0]._index)
    second.memory.is_in_use = False
    assert second.tier.fetches.prepare(seq, may_wait=False) is Readiness.READY
    expected, found = first.contents(), second.contents()
    assert kept + 5 == len(found) and expected.items() <= found.items() and second.stats().num_disk_hits == 20


def test_a_block_that_the_plan_copies_is_filled_after_it(engines: Any) -> None:
    """A sequence goes on from a snapshot in a copy. If the snapshot is the only free block, no read may overwrite it
    before the copy is made."""
    first = engines((FULL, STATE))
    first.compute(list(range(6)))
    first.save()
    second = engines((FULL, STATE))
    cache, memory, tokens = second.cache, second.memory, list(range(100, 110))
    [state], running = cache.states, TokenSequence(request=request(tokens), key=(0, 0), seed=0, token_ids=tokens)  # type: ignore[arg-type]
    number = cache._pool_of[state.group]
    assert cache.share_prefix(running, cache.find_prefix(running), 64) and cache.grow(running, SIZE) is not None
    cache.take_moves()
    running.num_computed_tokens = SIZE
    [snapshot] = running.block_tables[state.group]
    memory.blocks[number][snapshot] = 7
    while state.pool.num_free > 1:
        state.pool.allocate()
    assert cache.grow(running, 2 * SIZE) is not None
    assert state.pool.free_blocks() == [snapshot]
    seq, fetch = second.begin(list(range(6)), may_wait=False)
    assert fetch is not None
    wait_until(lambda: fetch.reading[0].done())
    assert second.tier.fetches.prepare(seq, may_wait=False) is Readiness.READING
    assert (memory.blocks[number][snapshot] == 7).all()
    cache.take_moves()
    assert second.tier.fetches.prepare(seq, may_wait=False) is Readiness.READY
    assert first.contents().items() <= second.contents().items()


def test_errors_end_no_thread(engines: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = engines()
    first.compute(list(range(22)))
    first.save()
    one = engines()

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake")

    methods = {name: getattr(one.files, name) for name in ("read", "write", "touch", "has")}
    for name in methods:
        setattr(one.files, name, fail)
    for start in range(3):  # there are two readers
        assert one.fetched(list(range(22 - start))) is not None and one.stats().num_disk_hits == 0
    assert one.fetched(list(range(300, 322))) is None
    one.compute(list(range(100, 122)))
    one.save()
    assert one.stats().num_disk_dropped == 5 and "a mistake" in caplog.text
    for name, method in methods.items():
        setattr(one.files, name, method)
    one.compute(list(range(200, 222)))
    one.save()
    assert one.stats().num_disk_written == 5 and one.fetched(list(range(22))) is not None
    assert one.stats().num_disk_hits == 20


def test_what_is_forgotten_does_not_come_back(engines: Any) -> None:
    one = engines()
    one.compute(list(range(22)))
    one.save()
    other = engines()
    seq, fetch = other.begin(list(range(22)))
    assert fetch is not None
    other.tier.forget_pools(removes_files=False)  # as when memory is freed: what was on its way is not put there
    wait_until(lambda: all(future.done() for future in other.tier.fetches._abandoned))
    assert fetch.has_ended and other.contents() == {}
    other.tier.fetches.forget(seq)
    assert other.fetched(list(range(22))) is not None
    other.tier.forget_pools(removes_files=True)
    other.cache.forget_prefixes()
    other.tier.wait_until_saved()
    assert list(other.files._files) == [] and other.fetched(list(range(22))) is None


@pytest.mark.parametrize("loss", ["forgotten", "dropped"])
def test_who_waits_until_all_is_saved_is_woken_when_the_last_unsaved_block_is_lost(engines: Any, loss: str) -> None:
    one = engines()
    one.compute(list(range(22)))
    one.tier._eviction_save_s = 0.0
    lock, *names = one.tier.writer.changed, *one.tier.unsaved
    lose = one.tier.cancel_save if loss == "forgotten" else one.tier.save_before_eviction
    for name in names[1:]:
        lose(name)
    wait_until(lambda: len(lock._waiters) == 1)  # the writer, which has nothing to do
    thread = threading.Thread(target=one.tier.wait_until_saved, daemon=True)
    thread.start()
    wait_until(lambda: len(lock._waiters) == 2)
    lose(names[0])
    wait_until(lambda: not thread.is_alive())


def test_a_block_that_is_written_while_the_tier_looks_for_it_is_not_saved_again(engines: Any) -> None:
    one = engines()
    one.compute(list(range(22)))
    name, block = next(iter(one.tier.unsaved.items()))
    knows, write, is_asked = one.files.knows, one.files.write, threading.Event()

    def knows_of_before(name: Any) -> bool:
        found = knows(name)
        if threading.current_thread() is threading.main_thread():
            is_asked.set()
            one.tier.writer.wait_until_idle(60.0)
        return bool(found)

    one.files.write = lambda *args: is_asked.wait(60.0) and write(*args)
    one.tier._save(name)
    one.files.knows = knows_of_before
    one.tier.note_indexed(name, block)
    is_asked.set()
    assert name not in one.tier.unsaved


def test_a_block_that_is_being_read_is_not_saved_yet(engines: Any) -> None:
    one = engines()
    one.compute(list(range(22)))
    read, answers = one.memory.read_blocks, []

    def asks(pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        answers.append(one.tier.wait_until_saved(timeout_s=0))
        return read(pool, blocks)

    one.memory.read_blocks = asks
    one.save()
    assert answers and True not in answers


@pytest.mark.parametrize("layers", [(FULL,), (FULL, WINDOW, STATE)], ids=str)
def test_a_session_keeps_the_blocks_of_its_turns_until_it_is_dropped(
    layers: Sequence[LayerCacheSpec], engines: Any
) -> None:
    one = engines(layers)
    first, other = one.compute(list(range(22))), one.compute(list(range(16)) + [99] * 6)
    for seq, session, salt in ((first, "mine", "salt"), (other, "mine", None)):
        seq.request.cache_session, seq.request.cache_ttl_s = session, 1000.0
        seq.request.prompt = Prompt(seq.request.prompt.token_ids, cache_salt=salt)  # the blocks stay those without
        one.tier.sessions.keep(seq)
    one.save()
    wait_until(lambda: len(one.files.sessions()) == 2)
    assert one.stats().disk_kept_bytes > 0 and one.stats().num_disk_sessions == 2
    again = engines(layers)
    for engine in (one, again):
        assert engine.tier.sessions.drop("mine", "nobody") is None
    assert again.fetched(list(range(22))) is not None
    assert again.tier.sessions.drop("mine", "salt") > 0
    again.tier.wait_until_saved()
    assert again.tier.sessions.drop("mine", "salt") is None
    tokens = list(range(22))
    seq = TokenSequence(request=request(tokens), key=(0, 0), seed=0, token_ids=tokens)  # type: ignore[arg-type]
    assert again.cache.find_prefix(seq).num_tokens <= 16, "neither in the pools"
    assert again.fetched(list(range(22))) is None or again.cache.find_prefix(seq).num_tokens <= 16
    assert again.fetched(list(range(16)) + [99] * 6) is not None, "the other one has its own"


def test_nobody_waits_until_a_disk_that_hangs_has_forgotten(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_writer, "_MOST_QUEUED", 3)
    first = engines()
    first.compute(list(range(22)))
    first.save()
    one, may_go = engines(), threading.Event()
    remove_all, one.files.remove_all = one.files.remove_all, lambda: may_go.wait() and remove_all()
    one.tier.forget_pools(removes_files=True)
    assert one.fetched(list(range(22))) is None, "what is there is as good as gone"
    for number in range(8):
        turn_of(one, list(range(22)), f"session {number}")
    assert len(one.tier.writer._queue) <= 3 and len(one.tier.unsaved) == 5
    may_go.set()
    one.save()
    assert engines().fetched(list(range(22))) is not None, "what was computed since is there"


def test_a_block_of_a_session_that_is_not_kept_leaves_nothing(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines()
    turn_of(one, list(range(22)), "mine")
    assert len(one.tier.writer._keep_until) == 5
    monkeypatch.setattr(disk_tier, "_QUEUE_BYTES", 0)
    for name in one.contents():
        one.tier.save_before_eviction(name)
    assert one.tier.writer._keep_until == {} and one.stats().num_disk_dropped == 5


def test_the_blocks_of_a_session_are_saved_also_where_reads_have_earned_no_time(engines: Any) -> None:
    one = engines()
    takes_3_ms(one)
    one.tier._eviction_save_s = -1.0
    turn_of(one, list(range(22)), "mine")
    own = one.contents()
    one.compute(list(range(100, 148)))  # takes every block
    one.compute(list(range(200, 248)))
    one.tier.wait_until_saved(timeout_s=0)
    wait_until(lambda: all(one.files.knows(name) for name in own))
    assert one.stats().num_disk_dropped == 12 and one.tier._eviction_save_s == -1.0


def test_a_block_that_is_kept_while_it_is_written_leaves_nothing(engines: Any) -> None:
    one = engines()
    one.files.write, began, may_go = held(one.files.write)
    seq = one.compute(list(range(4)))
    one.tier.save_while_idle()
    began.wait()
    seq.request.cache_session, seq.request.cache_ttl_s = "mine", 1000.0
    one.tier.sessions.keep(seq)
    may_go.set()
    one.save()
    wait_until(lambda: one.files.sessions())
    assert one.tier.writer._keep_until == {} and len(one.files._kept) == 2, "the block and the session's file"


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_block_that_is_pinned_during_its_write_is_kept(engines: Any, is_forgotten: bool) -> None:
    """Also if it is forgotten during its write, and computed again."""
    one = engines()
    one.files.write, began, may_go = held(one.files.write)
    one.compute(list(range(4)))
    one.tier.save_while_idle()
    began.wait()
    if is_forgotten:
        one.tier.forget_pools(removes_files=True)
        one.cache.forget_prefixes()
        one.compute(list(range(4)))
    one.tier.pin_pending_blocks(one.contents(), time.time() + 1000.0)
    if is_forgotten:
        one.tier.save_while_idle()
    may_go.set()
    one.save()
    assert one.tier.writer._keep_until == {} and one.stats().disk_kept_bytes > 0 and one.tier.writer.queued_bytes == 0


def turn_of(engine: Engine, tokens: list[int], session: str, ttl_s: float = 1000.0) -> None:
    """Run a prompt of a session."""
    seq = engine.compute(tokens)
    seq.request.cache_session, seq.request.cache_ttl_s = session, ttl_s
    engine.tier.sessions.keep(seq)


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("second", ["short", "long"])
def test_a_short_session_does_not_shorten_the_time_of_a_long_one(engines: Any, is_pending: bool, second: str) -> None:
    """They share blocks, or are turns of one session. The blocks of the first are written already, or pending."""
    one, begin = engines(), time.time()
    turn_of(one, list(range(22)), "long", ttl_s=10_000.0)
    if not is_pending:
        one.save()
    turn_of(one, list(range(22)), second, ttl_s=10.0)
    one.save()
    wait_until(lambda: len(one.files.sessions()) == (1 if second == "long" else 2))
    one.tier.wait_until_saved()
    for name in one.contents():
        assert one.files._files[one.files._own, block_file_name(name)].used > (begin + 9000.0) * 1e9
    assert max(one.files.sessions().values()) > begin + 9000.0, "the session can be dropped as long"
    assert max(session.keep_until for session in one.tier.sessions._sessions.values()) > begin + 9000.0


def test_a_client_of_sessions_takes_no_more_memory_than_there_are_blocks(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_sessions, "_LEAST_PRUNED", 4)
    one = engines()
    for number in range(20):
        turn_of(one, [number], f"short {number}")
    assert one.tier.sessions._sessions == {}, "a prompt without a full block leaves nothing to keep"
    for number in range(20):
        turn_of(one, [1000 * number + place for place in range(22)], "long")
        one.tier.unsaved.clear()  # as when the disk does not keep up: what has left the pool is nowhere
    one.tier.wait_until_saved()
    [(session, kept)] = one.tier.sessions._sessions.items()
    assert len(kept.names) <= 2 * (NUM_BLOCKS + 5) + 4 and one.tier.sessions._num_blocks == len(kept.names)
    assert len(one.files.session_names(session)) == 5
    one.tier.forget_pools(removes_files=True)
    assert one.tier.sessions._num_blocks == one.tier.sessions.count == 0


def test_a_dropped_session_frees_the_blocks_of_all_its_turns(engines: Any) -> None:
    """Most are on disk only, and lost blocks are looked for on the way."""
    one = engines()
    for number in range(14):
        turn_of(one, [100 * number + place for place in range(22)], "long")
        one.save()
    assert one.tier.sessions.drop("long", None) == 5 * 14 > cache_sessions._LEAST_PRUNED


def test_a_session_is_forgotten_after_its_time_and_where_others_have_more_blocks(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [cache_sessions.time.time()]
    monkeypatch.setattr(cache_sessions.time, "time", lambda: now[0])
    one = engines()
    turn_of(one, list(range(22)), "short", ttl_s=10.0)
    one.save()
    now[0] += 100
    turn_of(one, list(range(100, 122)), "second")
    turn_of(one, list(range(100, 126)), "third")
    one.save()
    assert one.stats().num_disk_sessions == 2 == len(one.files.sessions()) and one.tier.sessions._num_blocks == 11
    assert one.tier.sessions.drop("short", None) is None
    assert one.files.knows(next(iter(one.contents()))), "its blocks are like others' now"
    one.files.limit_bytes = 12 * BLOCK_BYTES
    one.tier.sessions._forget_old()
    assert one.tier.sessions._num_blocks == 11
    one.files.limit_bytes = 10 * BLOCK_BYTES
    one.tier.sessions._forget_old()
    one.tier.wait_until_saved()
    assert one.tier.sessions._num_blocks == 6 and len(one.files.sessions()) == 1
    assert one.tier.sessions.drop("second", None) is None and one.tier.sessions.drop("third", None) == 6


def test_a_dropped_session_frees_its_blocks_though_its_file_is_gone(engines: Any) -> None:
    one = engines()
    turn_of(one, list(range(22)), "mine")
    one.save()
    [session] = one.files.sessions()
    one.files.forget_session(session)  # as when room was made
    assert one.tier.sessions.drop("mine", None) == 5
    one.tier.wait_until_saved()
    assert one.files._files == {}


def test_engines_that_run_at_once_find_each_others_blocks(engines: Any) -> None:
    one, other = engines(), engines()
    one.compute(list(range(40)))
    one.save()
    fetch = other.fetched(list(range(40)))
    assert fetch is not None and fetch.num_found_blocks == 9
    other.save()
    assert other.stats().num_disk_written == 0


def test_what_is_read_for_a_waiting_request_is_not_replaced_by_what_others_want(engines: Any) -> None:
    one = engines()
    prompts = [[100 * number + place for place in range(32)] for number in range(3)]
    for prompt in prompts:
        one.compute(prompt)
    one.save()
    other = engines()
    first, _ = other.begin(prompts[0], "0")
    second, fetch = other.begin(prompts[1], "1")
    assert other.tier.fetches.prepare(second, may_wait=True) is Readiness.NO_ROOM, "two need 14 blocks of 12"
    wait_until(lambda: other.tier.fetches.prepare(first, may_wait=True) is Readiness.READY)
    assert (
        other.tier.fetches.prepare(second, may_wait=True) is Readiness.NO_ROOM
        and fetch is not None
        and not fetch.has_begun
    )
    other.tier.fetches.forget(first)
    wait_until(lambda: other.tier.fetches.prepare(second, may_wait=True) is Readiness.READY)
    assert fetch.has_ended
    other.tier.fetches.forget(second)
    third, _ = other.begin(prompts[2], "2")
    other.tier.fetches.forget(third)  # as when it is aborted
    assert other.tier.fetches._fetches == [] and other.tier.fetches._by_request == {}


def test_a_disk_that_hangs_does_not_keep_an_engine_from_its_end(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_CLOSE_TIMEOUT_S", 0.0)
    one, may_go = engines(), threading.Event()
    one.files.write = lambda *_: may_go.wait()
    one.compute(list(range(40)))
    one.tier.save_while_idle()
    one.tier.close()
    may_go.set()
