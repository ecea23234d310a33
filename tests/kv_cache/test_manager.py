"""Block tables of a model whose layers all keep all keys: prefix hits, growth, copy-on-write and the host tier."""

from __future__ import annotations

from typing import Any

from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence

SIZE = 4


def sequence(tokens: list[int], salt: str | None = None, **params: int) -> Sequence:
    request = EngineRequest("r", Prompt(tokens, cache_salt=salt), SamplingParams(**params), [0], 16, 0.0)
    return Sequence(request=request, key=(0, 0), seed=0, token_ids=list(tokens))


def manager(num_blocks: int = 8, num_host_blocks: int = 0, caching: bool = True) -> KVCacheManager:
    """The cache of a model whose layers all keep all keys and values."""
    full = LayerCacheSpec("full", num_kv_heads=2, key_size=8, value_size=8)
    return KVCacheManager(group_layers([full] * 3), [num_blocks], SIZE, [num_host_blocks], caching)


def changed(cache: KVCacheManager, seq: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
    """Grow `seq` -> the changed entries of its only block table: (position, block)."""
    found = cache.grow(seq, num_tokens)
    return found if found is None else [(position, block) for _, position, block in found]


def prefix_of(cache: KVCacheManager, tokens: list[int], **more: Any) -> list[int]:
    """The blocks that hold the first tokens of a new sequence."""
    return cache.find_prefix(sequence(tokens, **more)).tables[0]


def compute(cache: KVCacheManager, seq: Sequence) -> None:
    """Take blocks for all tokens of `seq` and count them as computed."""
    assert cache.grow(seq, seq.num_tokens) is not None
    seq.num_computed_tokens = seq.num_tokens
    cache.register_computed(seq, seq.num_computed_tokens)


def test_a_prefix_is_found_block_by_block_while_its_owner_runs_and_after() -> None:
    cache = manager()
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(cache, first)
    same_start = sequence([1, 2, 3, 4, 5, 6, 7, 99, 9])
    assert cache.find_prefix(same_start).tables[0] == first.block_tables[0][:1], (
        "the second block differs in its last token"
    )
    table = list(first.block_tables[0])
    cache.release(first)
    again = sequence([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert cache.find_prefix(again).tables[0] == table[:2]
    assert cache.share_prefix(again, cache.find_prefix(again), 64)
    assert cache.pools[0].num_free == 8 - 2
    assert (again.block_tables, again.num_computed_tokens) == ([table[:2]], 8)
    cache.check([again])


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = manager()
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    compute(cache, first)
    assert prefix_of(cache, [1, 2, 3, 4, 5, 6, 7, 8]) == first.block_tables[0][:1]
    assert prefix_of(cache, [1, 2, 3, 4]) == []


def test_a_block_is_found_only_behind_the_same_tokens_and_the_same_salt() -> None:
    cache = manager()
    compute(cache, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert prefix_of(cache, [0, 0, 0, 0, 5, 6, 7, 8, 9]) == [], "equal tokens elsewhere are other content"
    assert prefix_of(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], salt="tenant") == []
    compute(cache, sequence([1, 2, 3, 4, 5], salt="tenant"))
    assert len(prefix_of(cache, [1, 2, 3, 4, 5], salt="tenant")) == 1


def test_prompt_logprobs_and_a_disabled_cache_find_nothing() -> None:
    cache = manager()
    compute(cache, sequence([1, 2, 3, 4, 5]))
    assert prefix_of(cache, [1, 2, 3, 4, 5], prompt_logprobs=0) == []
    off = manager(caching=False)
    compute(off, sequence([1, 2, 3, 4, 5]))
    assert prefix_of(off, [1, 2, 3, 4, 5]) == []


def test_the_prefix_of_a_sequence_that_waits_is_found_once_until_it_changes() -> None:
    cache = manager(num_blocks=8)
    tokens = list(range(7 * SIZE))
    owner = sequence(tokens[: 2 * SIZE + 1])
    compute(cache, owner)
    waiting = sequence([*tokens, *range(100, 120)])
    found = cache.find_prefix(waiting)
    assert found.num_tokens == 2 * SIZE and not cache.share_prefix(waiting, found, 100)
    assert cache.find_prefix(waiting) is found, "nothing was looked up"
    other = sequence([*tokens, *range(200, 220)])
    its = cache.find_prefix(other)
    assert not cache.share_prefix(other, its, 100) and cache.find_prefix(other) is its, "now it is the one that waits"
    longer = sequence(tokens[: 3 * SIZE + 1])
    assert cache.share_prefix(longer, cache.find_prefix(longer), 100)
    cache.grow(longer, longer.num_tokens)
    longer.num_computed_tokens = longer.num_tokens
    cache.register_computed(longer, longer.num_tokens)
    again = cache.find_prefix(waiting)
    assert again.num_tokens == 3 * SIZE and not cache.share_prefix(waiting, again, 100)
    cache.release(longer)
    cache.release(owner)
    compute(cache, sequence(list(range(200, 200 + 7 * SIZE))))  # which takes blocks of the prefix
    assert cache.find_prefix(waiting).num_tokens < 3 * SIZE


def test_only_full_computed_blocks_are_indexed() -> None:
    cache = manager()
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.grow(seq, 8) is not None
    seq.num_computed_tokens = 7
    cache.register_computed(seq, seq.num_computed_tokens)
    assert [key is not None for key in cache.pools[0].hashes[:2]] == [True, False]


def test_growth_takes_the_blocks_it_needs_or_none() -> None:
    cache = manager(num_blocks=3)
    seq = sequence(list(range(1, 13)))
    assert changed(cache, seq, 5) == [(0, 0), (1, 1)]
    assert changed(cache, seq, 8) == [], "the second block has room"
    other = sequence([1])
    assert changed(cache, other, 1) == [(0, 2)]
    before = [list(table) for table in seq.block_tables]
    assert cache.grow(seq, 9) is None
    assert (seq.block_tables, cache.pools[0].num_free) == (before, 0)


def test_a_fork_copies_the_shared_block_it_writes_to_and_no_other() -> None:
    cache = manager()
    seq = sequence([1, 2, 3, 4, 5, 6])
    compute(cache, seq)
    fork = seq.fork(1)
    cache.share_all(seq, fork)
    assert cache.pools[0].num_used == 2
    for one in (seq, fork):
        one.token_ids.append(7)
    [(position, fresh)] = changed(cache, seq, 7) or []
    assert (position, fork.block_tables[0][1]) == (1, 1)
    assert cache._moves[0].copy == [(1, fresh)]
    assert changed(cache, fork, 7) == [], "the last one to write owns the old block"
    assert seq.block_tables[0][0] == fork.block_tables[0][0]
    cache.check([seq, fork])


def test_a_fork_that_starts_a_new_block_copies_nothing() -> None:
    cache = manager()
    seq = sequence([1, 2, 3, 4])
    compute(cache, seq)
    fork = seq.fork(1)
    cache.share_all(seq, fork)
    assert len(changed(cache, seq, 5) or []) == len(changed(cache, fork, 5) or []) == 1
    assert cache._moves[0].copy == []


def test_copy_on_write_needs_a_free_block() -> None:
    cache = manager(num_blocks=1)
    seq = sequence([1, 2])
    compute(cache, seq)
    fork = seq.fork(1)
    cache.share_all(seq, fork)
    assert cache.grow(seq, 3) is None
    assert cache._moves[0].copy == []


def test_swapping_moves_every_block_there_and_back_in_order() -> None:
    cache = manager(num_blocks=4, num_host_blocks=3)
    seq = sequence(list(range(1, 11)))
    compute(cache, seq)
    table = list(seq.block_tables[0])
    assert cache.swap_out(seq)
    assert (seq.block_tables, seq.num_computed_tokens, cache.pools[0].num_used) == ([], 10, 0)
    out = dict(cache.take_moves()[0].swap_out)
    assert [out[block] for block in table] == seq.host_blocks[0]
    host_blocks = list(seq.host_blocks[0])
    assert cache.swap_in(seq, 64)
    cache.check([seq])
    assert cache.host_pools[0].num_used == 3, "the host blocks are still to be read"
    assert cache.take_moves()[0].swap_in == list(zip(host_blocks, seq.block_tables[0], strict=True))
    assert cache.host_pools[0].num_used == 0
    cache.check([seq])


def test_swapping_needs_room_on_the_other_side() -> None:
    cache = manager(num_blocks=3, num_host_blocks=2)
    seq = sequence(list(range(1, 13)))
    compute(cache, seq)
    assert not cache.swap_out(seq)
    assert (len(seq.block_tables[0]), cache.host_pools[0].num_used) == (3, 0)
    cache.release(seq)
    small = sequence([1, 2, 3, 4, 5])
    compute(cache, small)
    assert cache.swap_out(small)
    large = sequence(list(range(20, 28)))
    compute(cache, large)
    assert not cache.swap_in(small, 64)
    assert len(small.host_blocks[0]) == 2


def test_blocks_that_come_back_from_the_host_are_offered_to_the_index_again() -> None:
    cache = manager(num_blocks=2, num_host_blocks=2)
    seq = sequence([1, 2, 3, 4, 5])
    compute(cache, seq)
    assert cache.swap_out(seq)
    evicting = sequence([9] * 8)
    compute(cache, evicting)
    cache.release(evicting)
    assert prefix_of(cache, [1, 2, 3, 4, 5]) == []
    assert cache.swap_in(seq, 64)
    cache.register_computed(seq, seq.num_computed_tokens)
    assert prefix_of(cache, [1, 2, 3, 4, 5]) == seq.block_tables[0][:1]


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head() -> None:
    cache = manager(num_blocks=3)
    seq = sequence(list(range(1, 13)))
    compute(cache, seq)
    head, middle, tail = seq.block_tables[0]
    cache.release(seq)
    assert cache.pools[0].free_blocks() == [tail, middle, head]
    assert (seq.num_computed_tokens, seq.block_tables) == (0, [])
