"""The tier on disk: which blocks sessions keep, how long, and what dropping them frees."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.kv_cache import block_writer, cache_sessions, disk_tier
from octavo.kv_cache.block_files import block_file_name
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.request import Prompt
from octavo.sequence import Sequence as TokenSequence
from tests.kv_cache.disk_engine import BLOCK_BYTES, FULL, NUM_BLOCKS, STATE, WINDOW, held, request, takes_3_ms, turn_of
from tests.waiting import wait_until


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
    again.tier.writer.wait_until_saved()
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
    assert len(one.tier.writer._queue) <= 3 and len(one.tier.writer.unsaved) == 5
    may_go.set()
    one.save()
    assert engines().fetched(list(range(22))) is not None, "what was computed since is there"


def test_a_block_of_a_session_that_is_not_kept_leaves_nothing(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines()
    turn_of(one, list(range(22)), "mine")
    assert len(one.tier.writer._keep_until) == 5
    monkeypatch.setattr(disk_tier, "_QUEUE_BYTES", 0)
    for name, block in list(one.tier.writer.unsaved.items()):
        one.tier.leaves(name, block)
    assert one.tier.writer._keep_until == {} and one.stats().num_disk_dropped == 5


def test_the_blocks_of_a_session_are_saved_also_where_reads_have_earned_no_time(engines: Any) -> None:
    one = engines()
    takes_3_ms(one)
    one.tier._eviction_save_s = -1.0
    turn_of(one, list(range(22)), "mine")
    own = one.contents()
    one.compute(list(range(100, 148)))  # takes every block
    one.compute(list(range(200, 248)))
    one.tier.writer.wait_until_saved(timeout_s=0)
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
    one.tier.writer.pin_pending(one.contents(), time.time() + 1000.0)
    if is_forgotten:
        one.tier.save_while_idle()
    may_go.set()
    one.save()
    assert one.tier.writer._keep_until == {} and one.stats().disk_kept_bytes > 0 and one.tier.writer.queued_bytes == 0


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
    one.tier.writer.wait_until_saved()
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
        one.tier.writer.unsaved.clear()  # as when the disk does not keep up: what has left the pool is nowhere
    one.tier.writer.wait_until_saved()
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
    one.tier.writer.wait_until_saved()
    assert one.tier.sessions._num_blocks == 6 and len(one.files.sessions()) == 1
    assert one.tier.sessions.drop("second", None) is None and one.tier.sessions.drop("third", None) == 6


def test_a_dropped_session_frees_its_blocks_though_its_file_is_gone(engines: Any) -> None:
    one = engines()
    turn_of(one, list(range(22)), "mine")
    one.save()
    [session] = one.files.sessions()
    one.files.forget_session(session)  # as when room was made
    assert one.tier.sessions.drop("mine", None) == 5
    one.tier.writer.wait_until_saved()
    assert one.files._files == {}
