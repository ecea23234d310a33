"""The tier on disk below the pools: when blocks are saved, and when they are dropped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.kv_cache import disk_tier
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.sequence import Sequence as TokenSequence
from tests.kv_cache.disk_engine import BLOCK_BYTES, FULL, STATE, WINDOW, request, takes_3_ms
from tests.waiting import wait_until


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
    one.tier.writer.wait_until_saved(timeout_s=0)
    wait_until(lambda: len(list(one.files._files)) >= len(saved))
    for (pool, key), contents in saved.items():
        found = np.empty(BLOCK_BYTES, np.uint8)
        assert one.files.read((pool, key), found) and found.tobytes() == contents


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
    compute_s = one.tier.fetches._compute_s(0, 5)
    assert compute_s > 0.01 and one.fetched(list(range(22))) is not None
    assert one.tier.fetches.take_gained_s() == pytest.approx(compute_s) and one.tier.fetches.take_gained_s() == 0.0


def test_a_busy_engine_saves_in_a_small_share_of_its_time(engines: Any) -> None:
    one = engines()
    one.compute(list(range(40)))
    takes_3_ms(one)
    for _ in range(6):
        one.tier.save_while_busy(0.001 / disk_tier._BUSY_SHARE)
    assert len(one.tier.writer.unsaved) == 10 - 2
    one.tier.save_while_busy(1e9)
    assert len(one.tier.writer.unsaved) >= 10 - 2 - 7, "saved-up time is bounded"


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
    assert waits == [1] and len(one.tier.writer.unsaved) == 10 - 4, "10 ms of waiting, and as many of saving"
    for _ in range(44):
        step += 1
        one.tier.save_while_busy(0.001 / disk_tier._BUSY_SHARE)
    assert len(waits) == 3 and len(one.tier.writer.unsaved) == 0
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
    assert (one.tier.writer.queued_bytes, len(one.tier.writer.unsaved)) == (2 * BLOCK_BYTES, 10 - 2)
    assert one.tier.writer.num_unwritten == 10
    may_go.set()
    one.save()
    assert one.stats().num_disk_written == 10 and one.tier.writer.num_unwritten == 0


def test_blocks_that_find_the_queue_full_are_dropped_and_nobody_waits(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_QUEUE_BYTES", "_IDLE_QUEUE_BYTES"):
        monkeypatch.setattr(disk_tier, limit, 2 * BLOCK_BYTES)
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


@pytest.mark.parametrize("loss", ["forgotten", "dropped"])
def test_who_waits_until_all_is_saved_is_woken_when_the_last_unsaved_block_is_lost(engines: Any, loss: str) -> None:
    one = engines()
    one.compute(list(range(22)))
    one.tier._eviction_save_s = 0.0
    lock, *blocks = one.tier.writer._changed, *one.tier.writer.unsaved.items()
    lose = one.tier.leaves if loss == "dropped" else lambda name, _: one.tier.writer.cancel(name)
    for name, block in blocks[1:]:
        lose(name, block)
    wait_until(lambda: len(lock._waiters) == 1)  # the writer, which has nothing to do
    thread = threading.Thread(target=one.tier.writer.wait_until_saved, daemon=True)
    thread.start()
    wait_until(lambda: len(lock._waiters) == 2)
    lose(*blocks[0])
    wait_until(lambda: not thread.is_alive())


def test_a_block_that_is_written_while_the_tier_looks_for_it_is_not_saved_again(engines: Any) -> None:
    one = engines()
    one.compute(list(range(22)))
    name, block = next(iter(one.tier.writer.unsaved.items()))
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
    one.tier.entered(name, block)
    is_asked.set()
    assert name not in one.tier.writer.unsaved


def test_a_block_that_is_being_read_is_not_saved_yet(engines: Any) -> None:
    one = engines()
    one.compute(list(range(22)))
    read, answers = one.memory.read_blocks, []

    def asks(pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        answers.append(one.tier.writer.wait_until_saved(timeout_s=0))
        return read(pool, blocks)

    one.memory.read_blocks = asks
    one.save()
    assert answers and True not in answers


def test_a_disk_that_hangs_does_not_keep_an_engine_from_its_end(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_CLOSE_TIMEOUT_S", 0.0)
    one, may_go = engines(), threading.Event()
    one.files.write = lambda *_: may_go.wait()
    one.compute(list(range(40)))
    one.tier.save_while_idle()
    one.tier.close()
    may_go.set()
