"""The tier on disk below the host pools of a device: which blocks are copied and saved first, and which are not waited
for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from octavo.kv_cache import disk_fetches, disk_tier
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.disk_fetches import Readiness
from octavo.kv_cache.disk_tier import DiskTier
from octavo.kv_cache.groups import group_layers
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.sequence import Sequence as TokenSequence
from octavo.step_plan import BlockMoves
from tests.kv_cache.disk_engine import BLOCK_BYTES, FULL, NUM_BLOCKS, SIZE, Engine, Memory
from tests.waiting import wait_until


class HostMemory(Memory):
    has_left = False  # moves, for lack of the device's memory

    def move_blocks(self, moves: Sequence[BlockMoves]) -> None:
        pass

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        return not self.has_left


class DeviceEngine(Engine):
    """An engine with a device of its own, whose plans copy two blocks to the host."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tier.close()
        self.cache = KVCacheManager(group_layers([FULL]), [NUM_BLOCKS], SIZE, [NUM_BLOCKS], True)
        self.memory: HostMemory = HostMemory([NUM_BLOCKS])
        self.host = HostTier(self.cache, [BLOCK_BYTES], self.cost, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
        self.tier = DiskTier(self.files, self.memory, self.cache, self.cost, lambda: self.now, host_tier=self.host)

    def names(self, seq: TokenSequence) -> list[BlockName]:
        return self.cache.prefix_names(seq.block_hashes, len(seq.block_hashes))

    def end(self, seq: TokenSequence) -> None:
        seq.request.saves_prompt = True
        self.tier.saved_prompts.end(seq)

    def end_turn(self, seq: TokenSequence, session: str) -> None:
        seq.request.cache_session, seq.request.cache_ttl_s = session, 1000.0
        self.tier.sessions.keep(seq)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[[], DeviceEngine]]:
    made: list[DeviceEngine] = []

    def make() -> DeviceEngine:
        made.append(DeviceEngine(tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.tier.close(saves=False)


@pytest.mark.parametrize("num_on_host", [0, 2])
def test_blocks_of_a_saved_prompt_are_copied_and_saved_before_others(
    num_on_host: int, engines: Callable[[], DeviceEngine]
) -> None:
    one = engines()
    others = one.compute(list(range(22)))
    if num_on_host:
        one.host.begin_plan()
    assert len(one.tier.writer.unsaved) == num_on_host
    first = one.compute([*range(50, 62)])
    written: list[BlockName] = []
    write = one.files.write

    def noted(name: BlockName, *args: Any) -> bool:
        written.append(name)
        return write(name, *args)

    one.files.write = noted  # type: ignore[method-assign]
    one.end(first)
    one.save()
    assert written[:3] == one.names(first)
    assert set(written[3:]) == set(one.names(others)) and not one.tier.writer._saved_first


def test_a_saved_prompt_that_the_folder_has_is_not_copied_again(engines: Callable[[], DeviceEngine]) -> None:
    one = engines()
    seq = one.compute(list(range(22)))
    one.save()
    for name in one.names(seq):
        one.cache.host_pools[0].forget(one.cache.host_pools[0].lookup(name[1]))
    one.end(seq)
    assert not one.host.num_uncopied
    again = engines()
    seq = again.compute(list(range(22)))
    assert again.host.num_uncopied
    again.end(seq)
    assert not any(map(again.tier.writer.is_pending, again.names(seq)))


def test_what_a_session_keeps_is_noted_only_until_the_folder_has_it(engines: Callable[[], DeviceEngine]) -> None:
    one = engines()
    seq = one.compute(list(range(22)))
    one.end_turn(seq, "a")
    assert len(one.tier.writer._keep_until) == 5
    for name in one.names(seq)[:2]:  # as another server does
        one.files.write(name, one.memory.blocks[0][0])
    one.save()
    assert not one.tier.writer._keep_until
    again = engines()
    again.end_turn(again.compute(list(range(22))), "b")
    assert not again.tier.writer._keep_until


def test_a_session_lists_blocks_of_earlier_turns_that_only_the_device_has(engines: Callable[[], DeviceEngine]) -> None:
    one, listed = engines(), list[set[BlockName]]()
    one.files.keep_session = lambda session, names, until: listed.append(set(names))  # type: ignore[method-assign]
    turns = [one.compute(list(range(first, first + 12))) for first in (0, 50)]
    for seq in turns:
        one.end_turn(seq, "a")
    wait_until(lambda: len(listed) == 2)
    assert listed[1] == {name for seq in turns for name in one.names(seq)}


@pytest.mark.parametrize("way", ["the folder has the block", "the host has the block", "the cache is reset"])
def test_who_waits_until_all_is_saved_is_woken_when_nothing_is_left_to_copy(
    way: str, engines: Callable[[], DeviceEngine]
) -> None:
    one = engines()
    [name] = one.names(one.compute(list(range(SIZE))))
    lock = one.tier.writer._changed
    if way != "the cache is reset":
        one.files.write(name, one.memory.blocks[0][0])
    if way == "the host has the block":
        pool = one.cache.host_pools[0]
        pool.register(pool.allocate(), name[1])
    tell = one.tier.writer.not_copied

    def tell_slowly(name: BlockName) -> None:
        """The thread looks again before the block counts as copied."""
        tell(name)
        with lock:
            lock.notify_all()
        wait_until(lambda: len(lock._waiters) == 2)  # type: ignore[attr-defined]

    if way != "the cache is reset":  # otherwise no block counts any more
        one.tier.writer.not_copied = tell_slowly  # type: ignore[method-assign]
    wait_until(lambda: len(lock._waiters) == 1)  # type: ignore[attr-defined]  # the writer, which has nothing to do
    thread = threading.Thread(target=one.tier.writer.wait_until_saved, daemon=True)
    thread.start()
    wait_until(lambda: len(lock._waiters) == 2)  # type: ignore[attr-defined]
    if way == "the cache is reset":
        one.host.forget_prefixes()
    else:
        one.host.begin_plan()
    wait_until(lambda: not thread.is_alive())


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_block_that_is_being_copied_is_not_saved_yet(is_evicted: bool, engines: Callable[[], DeviceEngine]) -> None:
    one = engines()
    [name] = one.names(one.compute(list(range(SIZE))))
    block, copy, answers = one.cache.pools[0].lookup(name[1]), one.cache.copy_to_host, list[bool]()
    assert block is not None

    def asked(*args: Any) -> bool:
        answers.append(one.tier.writer.wait_until_saved(timeout_s=0))
        return copy(*args)

    one.cache.copy_to_host = asked  # type: ignore[method-assign]
    if is_evicted:
        one.host._uncopied[name] = one.host._fresh.pop(name)
        one.cache.pools[0].forget(block)
    else:
        one.host.begin_plan()
    assert answers == [False] and one.tier.writer.is_pending(name) and one.tier.writer.num_unwritten == 1


def test_a_device_that_lacks_memory_is_not_waited_for(
    engines: Callable[[], DeviceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_CLOSE_TIMEOUT_S", 3600.0)
    one = engines()
    one.compute(list(range(22)))
    one.memory.has_left = True
    assert not one.tier.save_all() and one.tier.writer.num_unwritten == 5


def test_copies_under_way_are_waited_for_only_while_nothing_runs(engines: Callable[[], DeviceEngine]) -> None:
    one = engines()
    one.compute(list(range(22)))
    one.save()
    other, waits = engines(), list[bool]()

    def is_settled(pool: int, blocks: Sequence[int], may_wait: bool = False) -> bool:
        waits.append(may_wait)
        return may_wait

    other.memory.is_settled = is_settled  # type: ignore[method-assign]
    seq, fetch = other.begin(list(range(22)), may_wait=False)
    assert fetch is not None
    wait_until(lambda: fetch.reading[0].done())
    for _ in range(3):
        assert other.tier.fetches.prepare(seq, may_wait=False) is Readiness.READING
    assert waits and not any(waits) and not other.cache.host_pools[0]._index
    assert other.tier.fetches.prepare(seq, may_wait=True) is Readiness.READY
    assert waits[-1] and len(other.cache.host_pools[0]._index) == 5


def test_waits_for_copies_are_no_time_of_reading(
    engines: Callable[[], DeviceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engines()
    one.compute(list(range(22)))
    one.save()
    other, now, seconds = engines(), [0.0], list[float]()

    def is_settled(pool: int, blocks: Sequence[int], may_wait: bool = False) -> bool:
        now[0] += 100.0
        return may_wait

    other.memory.is_settled = is_settled  # type: ignore[method-assign]
    seq, fetch = other.begin(list(range(22)), may_wait=False)
    assert fetch is not None
    wait_until(lambda: fetch.reading[0].done())
    monkeypatch.setattr(disk_fetches, "time", Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr(other.tier.fetches._read_cost, "observe", lambda _, read_s: seconds.append(read_s))
    assert other.tier.fetches.prepare(seq, may_wait=False) is Readiness.READING
    assert other.tier.fetches.prepare(seq, may_wait=True) is Readiness.READY
    assert seconds and max(seconds) < 100.0


def test_a_device_that_lacks_memory_computes_what_has_been_read(engines: Callable[[], DeviceEngine]) -> None:
    one = engines()
    one.compute(list(range(22)))
    one.save()
    other = engines()
    other.memory.has_left = True
    assert other.fetched(list(range(22))) is not None and not other.cache.host_pools[0]._index


def test_a_block_that_is_being_copied_leaves_its_turn_to_others(engines: Callable[[], DeviceEngine]) -> None:
    one = engines()
    names = one.names(one.compute(list(range(12))))
    one.host.begin_plan()
    copied = one.tier.writer.unsaved[names[0]]
    one.memory.is_settled = lambda pool, blocks, waits=False: copied not in blocks  # type: ignore[method-assign]
    one.cache.take_moves()
    order = [*one.tier.writer.unsaved]
    assert one.tier._next_savable() == one.tier._next_savable() == order[1], "who asks changes nothing"
    assert [*one.tier.writer.unsaved] == order
    one.tier.saved_prompts._expected.add("r")
    one.tier.save_while_busy(0.0)
    assert [*one.tier.writer.unsaved] == [names[0]]


def test_a_closed_tier_watches_nothing(engines: Callable[[], DeviceEngine]) -> None:
    one = engines()
    seq = one.compute(list(range(22)))
    one.tier.close(saves=False)
    assert one.host.watchers == [] == one.cache.host_pools[0].watchers and one.cache.pools[0].watchers == [one.host]
    one.host.begin_plan()
    assert not one.tier.writer.unsaved and one.names(seq)[0][1] in one.cache.host_pools[0]
