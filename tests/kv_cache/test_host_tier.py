"""The tier of host memory below the pools of a device: which copies a plan gets, and in which order they are safe."""

from __future__ import annotations

from typing import Any, cast

import pytest

from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.sequence import Sequence
from octavo.stats import EngineStats
from octavo.step_cost import StepWork
from octavo.step_plan import BlockMoves
from tests.kv_cache.test_manager import SIZE, compute, manager, sequence


class Cost:
    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds, self.asked = seconds, list[StepWork]()

    def seconds(self, work: StepWork) -> float:
        self.asked.append(work)
        return self._seconds


def tier(
    cache: KVCacheManager, copies: int = 100, loads: int = 100, block_bytes: int = 1, cost: float = 1.0
) -> HostTier:
    return HostTier(cache, [block_bytes] * len(cache.pools), Cost(cost), copies, loads)


def planned(cache: KVCacheManager, host_tier: HostTier) -> BlockMoves:
    """Return the moves of the plan that ends now; the next plan begins."""
    [moves] = host_tier.take_moves()
    host_tier.begin_plan()
    return moves


def prompt(first: int, num_blocks: int) -> list[int]:
    return [first + i for i in range(num_blocks * SIZE)]


def computed(cache: KVCacheManager, tokens: list[int]) -> list[int]:
    """Compute a sequence that ends at once. Returns its blocks."""
    compute(cache, seq := sequence(tokens))
    [table] = seq.block_tables
    cache.release(seq)
    return list(table)


def stats_of(host_tier: HostTier) -> EngineStats:
    host_tier.take_stats(stats := EngineStats())
    return stats


def loaded(cache: KVCacheManager, host_tier: HostTier, seq: Sequence, is_alone: bool = True) -> bool:
    return host_tier.load(seq, 64, is_alone)


def test_computed_blocks_are_copied_with_the_next_plans_a_few_with_each() -> None:
    cache = manager(num_blocks=8, num_host_blocks=8)
    host = tier(cache, copies=2)
    table = computed(cache, prompt(0, 3))
    assert planned(cache, host).swap_out == []  # they may be computed by this plan
    assert [source for source, _ in planned(cache, host).swap_out] == table[:2]
    assert [source for source, _ in planned(cache, host).swap_out] == table[2:]
    assert planned(cache, host) == BlockMoves()
    assert stats_of(host).num_host_copied == 3


def test_small_blocks_are_no_more_than_a_plan_has_time_for() -> None:
    cache = manager(num_blocks=400, num_host_blocks=400)
    host = tier(cache, copies=1 << 20)
    computed(cache, prompt(0, 300))
    planned(cache, host)
    assert len(planned(cache, host).swap_out) == 256


def test_a_block_that_leaves_before_its_copy_is_copied_then_and_no_more_than_a_plan_may() -> None:
    cache = manager(num_blocks=4, num_host_blocks=8)
    host = tier(cache, copies=0)
    first = computed(cache, prompt(0, 4))
    planned(cache, host)
    host._copy_left = 3
    computed(cache, prompt(100, 4))
    assert {source for source, _ in cache.take_moves()[0].swap_out} < set(first)
    found = stats_of(host)
    assert (found.num_host_copied, found.num_host_dropped) == (3, 1)


def test_a_block_that_is_indexed_and_lost_by_one_plan_is_not_copied() -> None:
    """Its contents come with this plan's moves or not at all; copies to the host are made before."""
    cache = manager(num_blocks=4, num_host_blocks=8)
    host = tier(cache)
    computed(cache, prompt(0, 4))
    computed(cache, prompt(100, 4))
    assert planned(cache, host) == BlockMoves()


def evicted(num_blocks: int = 8, num_host_blocks: int = 16, **limits: float) -> tuple[KVCacheManager, HostTier]:
    """A cache that has computed prompt(0, 4), which only the host still has."""
    cache = manager(num_blocks, num_host_blocks)
    host = tier(cache, **limits)  # type: ignore[arg-type]
    computed(cache, prompt(0, 4))
    planned(cache, host)
    planned(cache, host)
    for pool in cache.pools:
        pool.forget_all()
    assert planned(cache, host) == BlockMoves()
    return cache, host


def test_a_prefix_comes_back_in_one_plan_with_the_sequence_that_begins_with_it() -> None:
    cache, host = evicted()
    seq = sequence([*prompt(0, 4), 7])
    assert loaded(cache, host, seq)
    prefix = cache.find_prefix(seq)
    assert prefix.num_tokens == 4 * SIZE and cache.share_prefix(seq, prefix, 64)
    assert [block for _, block in planned(cache, host).swap_in] == prefix.tables[0]
    assert not stats_of(host).num_host_hits, "its prompt is not counted yet"
    host.count_hits(seq, prefix.num_tokens)
    assert stats_of(host).num_host_hits == 4 * SIZE
    cache.release(seq)
    cache.check([])


def test_a_long_prefix_comes_back_over_several_plans_while_others_are_computed() -> None:
    cache, host = evicted(loads=3)
    seq = sequence([*prompt(0, 4), 7])
    assert not loaded(cache, host, seq, is_alone=False)
    assert len(planned(cache, host).swap_in) == 3
    assert loaded(cache, host, seq, is_alone=False)
    assert len(planned(cache, host).swap_in) == 1
    host.count_hits(seq, 4 * SIZE)
    assert stats_of(host).num_host_hits == 4 * SIZE


def test_what_is_faster_computed_or_does_not_fit_is_not_loaded() -> None:
    cache, host = evicted(block_bytes=10**9, copies=10**12, cost=0.1)
    assert loaded(cache, host, sequence([*prompt(0, 4), 7]))
    cache, host = evicted()
    compute(cache, sequence(prompt(200, 4)))
    planned(cache, host)
    planned(cache, host)
    assert loaded(cache, host, sequence([*prompt(0, 4), 7]))  # it is the fifth block that does not fit
    assert not cache.take_moves()[0].swap_in and not stats_of(host).num_host_hits


def test_a_load_is_compared_with_the_computation_of_what_the_device_lacks() -> None:
    cache, host = evicted()
    computed(cache, prompt(0, 1))
    assert loaded(cache, host, sequence([*prompt(0, 4), 7]))
    assert cast(Cost, host._cost).asked == [StepWork().plus(SIZE, 3 * SIZE, 1)]


def test_a_prefix_is_looked_up_once_while_its_sequence_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    num_lookups = 0
    search = KVCacheManager.num_prefix_blocks

    def counted(*args: Any) -> int:
        nonlocal num_lookups
        num_lookups += 1
        return search(*args)

    cache, host = evicted(loads=1)
    slow_cache, slow = evicted(block_bytes=10**9, copies=10**12, cost=0.1)
    monkeypatch.setattr(KVCacheManager, "num_prefix_blocks", counted)
    seq = sequence([*prompt(0, 4), 7])
    for _ in range(5):
        loaded(cache, host, seq, is_alone=False)
        planned(cache, host)
    assert cache.find_prefix(seq).num_tokens == 4 * SIZE
    assert num_lookups == 2 + 1, "on the device and in both, and once more here"
    other = sequence([*prompt(0, 4), 7])
    for _ in range(5):
        assert loaded(slow_cache, slow, other)
    assert num_lookups == 3 + 2, "computing is faster"
    other.token_ids.append(9)
    assert loaded(slow_cache, slow, other)
    assert num_lookups == 5 + 2


def test_blocks_that_the_device_lost_while_their_sequence_waited_are_loaded_again() -> None:
    cache, host = evicted()
    seq = sequence([*prompt(0, 4), 7])
    for _ in range(2):
        assert loaded(cache, host, seq)
        assert len(planned(cache, host).swap_in) == 4
        cache.pools[0].forget_all()


def test_a_block_that_another_sequence_has_computed_meanwhile_is_not_loaded() -> None:
    cache, host = evicted(loads=2)
    seq = sequence([*prompt(0, 4), 7])
    assert not loaded(cache, host, seq, is_alone=False)
    assert len(planned(cache, host).swap_in) == 2
    compute(cache, sequence(prompt(0, 4)))
    assert loaded(cache, host, seq, is_alone=False)
    assert not planned(cache, host).swap_in


def test_a_load_evicts_no_block_of_its_own_prefix() -> None:
    cache, host = evicted(num_blocks=5)
    computed(cache, prompt(0, 1))
    computed(cache, prompt(500, 3))
    assert loaded(cache, host, seq := sequence([*prompt(0, 4), 7]))
    assert cache.find_prefix(seq).num_tokens == 4 * SIZE


def test_nothing_is_loaded_to_a_block_that_has_got_other_contents_since() -> None:
    """Copies between blocks are made before loads, which would overwrite them."""
    cache, host = evicted(num_blocks=4)
    loaded(cache, host, sequence([*prompt(0, 3), 7]))
    compute(cache, sequence(prompt(300, 4)))
    assert not cache.take_moves()[0].swap_in


def test_a_host_block_is_not_overwritten_before_it_is_loaded() -> None:
    """Copies to the host are made before loads."""
    cache, host = evicted(num_blocks=8, num_host_blocks=4)
    host._copy_bytes = 0
    computed(cache, prompt(100, 4))
    planned(cache, host)
    planned(cache, host)
    assert loaded(cache, host, sequence([*prompt(0, 4), 7]))
    host._copy_left = 100
    computed(cache, prompt(300, 4))  # four blocks leave that the host lacks
    moves = cache.take_moves()[0]
    assert len(moves.swap_in) == 4
    assert not {target for _, target in moves.swap_out} & {source for source, _ in moves.swap_in}


def test_a_state_that_is_copied_on_write_is_loaded_to_the_copy_too() -> None:
    """Copies between blocks are made before loads."""
    cache = KVCacheManager(group_layers([LayerCacheSpec("state", num_bytes=8)]), [4], SIZE, [4], True)
    host = tier(cache)
    seq = sequence(prompt(0, 1))
    assert cache.grow(seq, SIZE) is not None
    seq.num_computed_tokens = SIZE
    seq.token_ids.append(7)
    cache.grow(seq, SIZE + 1)  # indexes the state
    cache.release(seq)
    planned(cache, host)
    planned(cache, host)
    cache.pools[0].forget_all()
    again = sequence([*prompt(0, 1), 9])
    assert loaded(cache, host, again) and cache.share_prefix(again, cache.find_prefix(again), 64)
    assert cache.grow(again, SIZE + 1) is not None
    moves = cache.take_moves()[0]
    assert not moves.copy and len({source for source, _ in moves.swap_in}) == 1
    assert again.block_tables[0][0] in {target for _, target in moves.swap_in}


def test_forgotten_prefixes_are_found_nowhere() -> None:
    cache, host = evicted()
    cache.forget_prefixes()
    assert loaded(cache, host, sequence([*prompt(0, 4), 7]))
    assert not cache.take_moves()[0].swap_in


def test_prefixes_that_are_forgotten_are_not_copied() -> None:
    cache = manager(num_blocks=8, num_host_blocks=8)
    host = tier(cache, copies=1)
    computed(cache, prompt(0, 4))
    planned(cache, host)
    planned(cache, host)
    cache.take_moves()
    computed(cache, prompt(100, 2))
    stats_of(host)
    host.forget_prefixes()
    for _ in range(4):
        assert planned(cache, host) == BlockMoves()
    found = stats_of(host)
    assert (found.num_host_copied, found.num_host_dropped) == (0, 0)
    computed(cache, prompt(200, 1))
    planned(cache, host)
    assert len(planned(cache, host).swap_out) == 1, "it goes on afterwards"


def test_the_block_used_longest_ago_leaves_the_host_first() -> None:
    cache = manager(num_blocks=16, num_host_blocks=4)
    host = tier(cache)
    for first in (0, 100, 200):
        computed(cache, prompt(first, 2))
        planned(cache, host)
        planned(cache, host)
    cache.pools[0].forget_all()
    for first, num_blocks in ((0, 0), (100, 2), (200, 2)):
        seq = sequence([*prompt(first, 2), 7])
        loaded(cache, host, seq)
        assert cache.find_prefix(seq).num_tokens == num_blocks * SIZE


@pytest.mark.parametrize("copies", [2, 100])
def test_the_end_of_a_prompt_leaves_the_host_before_its_beginning(copies: int) -> None:
    """Whether its sequence ends before or after all its copies are made."""
    cache = manager(num_blocks=16, num_host_blocks=8)
    host = tier(cache, copies=copies)
    for first, num_blocks in ((0, 4), (100, 4), (200, 1)):
        compute(cache, seq := sequence(prompt(first, num_blocks)))
        for _ in range(2):
            planned(cache, host)
        cache.release(seq)
        for _ in range(2):
            planned(cache, host)
    host._copy_left = 0
    cache.pools[0].forget_all()
    loaded(cache, host, seq := sequence([*prompt(0, 4), 7]))
    assert cache.find_prefix(seq).num_tokens == 3 * SIZE


def test_the_end_of_a_prompt_that_was_loaded_leaves_the_host_first() -> None:
    cache, host = evicted(num_host_blocks=4)
    loaded(cache, host, sequence([*prompt(0, 4), 7]))
    cache.take_moves()
    cache.pools[0].forget_all()
    computed(cache, prompt(100, 1))
    for _ in range(2):
        planned(cache, host)
    loaded(cache, host, seq := sequence([*prompt(0, 4), 7]))
    assert cache.find_prefix(seq).num_tokens == 3 * SIZE
