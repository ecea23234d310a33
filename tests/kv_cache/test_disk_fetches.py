"""The tier on disk: which blocks waiting prompts read, and that nobody waits for a disk."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from octavo.kv_cache import disk_fetches
from octavo.kv_cache.block_files import block_file_name
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.disk_fetches import Readiness
from octavo.sequence import Sequence as TokenSequence
from tests.kv_cache.disk_engine import BLOCK_BYTES, FULL, SIZE, STATE, held, request
from tests.waiting import wait_until


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
    second.memory.is_in_use = True
    seq, fetch = second.begin(list(range(22)), may_wait=False)
    assert fetch is not None
    wait_until(lambda: fetch.reading[0].done())
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


def test_what_is_forgotten_does_not_come_back(engines: Any) -> None:
    other, seq, fetch, began, may_go = with_held_read(engines)
    began.wait()
    other.tier.forget_pools(removes_files=False)  # as when memory is freed: what was on its way is not put there
    may_go.set()
    wait_until(lambda: all(future.done() for future in other.tier.fetches._abandoned))
    assert fetch.has_ended and other.contents() == {}
    other.tier.fetches.forget(seq)
    assert other.fetched(list(range(22))) is not None
    other.tier.forget_pools(removes_files=True)
    other.cache.forget_prefixes()
    other.tier.writer.wait_until_saved()
    assert list(other.files._files) == [] and other.fetched(list(range(22))) is None


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
