"""Block tables: prefix hits, growth, copy-on-write, the host tier, and the chain of hashes."""

from __future__ import annotations

from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence

SIZE = 4


def sequence(tokens: list[int], salt: str | None = None, **params: int) -> Sequence:
    request = EngineRequest("r", Prompt(tokens, cache_salt=salt), SamplingParams(**params), [0], 16, 0.0)
    return Sequence(request=request, key=(0, 0), seed=0, token_ids=list(tokens))


def manager(num_blocks: int = 8, num_host_blocks: int = 0, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, num_host_blocks, caching)


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
    assert cache.find_prefix(same_start) == first.block_table[:1], "the second block differs in its last token"
    table = list(first.block_table)
    cache.release(first)
    again = sequence([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert cache.find_prefix(again) == table[:2]
    assert cache.num_free_after(table[:2]) == 8 - 2
    cache.share_prefix(again, table[:2])
    assert (again.block_table, again.num_computed_tokens) == (table[:2], 8)
    cache.check([again])


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = manager()
    first = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    compute(cache, first)
    assert cache.find_prefix(sequence([1, 2, 3, 4, 5, 6, 7, 8])) == first.block_table[:1]
    assert cache.find_prefix(sequence([1, 2, 3, 4])) == []


def test_a_block_is_found_only_behind_the_same_tokens_and_the_same_salt() -> None:
    cache = manager()
    compute(cache, sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert cache.find_prefix(sequence([0, 0, 0, 0, 5, 6, 7, 8, 9])) == [], "equal tokens elsewhere are other content"
    assert cache.find_prefix(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], salt="tenant")) == []
    compute(cache, sequence([1, 2, 3, 4, 5], salt="tenant"))
    assert len(cache.find_prefix(sequence([1, 2, 3, 4, 5], salt="tenant"))) == 1


def test_prompt_logprobs_and_a_disabled_cache_find_nothing() -> None:
    cache = manager()
    compute(cache, sequence([1, 2, 3, 4, 5]))
    assert cache.find_prefix(sequence([1, 2, 3, 4, 5], prompt_logprobs=0)) == []
    off = manager(caching=False)
    compute(off, sequence([1, 2, 3, 4, 5]))
    assert off.find_prefix(sequence([1, 2, 3, 4, 5])) == []


def test_only_full_computed_blocks_are_indexed() -> None:
    cache = manager()
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.grow(seq, 8) is not None
    seq.num_computed_tokens = 7
    cache.register_computed(seq, seq.num_computed_tokens)
    assert [key is not None for key in cache.pool.hashes[:2]] == [True, False]


def test_growth_takes_the_blocks_it_needs_or_none() -> None:
    cache = manager(num_blocks=3)
    seq = sequence(list(range(1, 13)))
    assert cache.grow(seq, 5) == [(0, 0), (1, 1)]
    assert cache.grow(seq, 8) == [], "the second block has room"
    other = sequence([1])
    assert cache.grow(other, 1) == [(0, 2)]
    before = list(seq.block_table)
    assert cache.grow(seq, 9) is None
    assert (seq.block_table, cache.pool.num_free) == (before, 0)


def test_a_fork_copies_the_shared_block_it_writes_to_and_no_other() -> None:
    cache = manager()
    seq = sequence([1, 2, 3, 4, 5, 6])
    compute(cache, seq)
    fork = seq.fork(1)
    cache.share_all(fork)
    assert cache.pool.num_used == 2
    for one in (seq, fork):
        one.token_ids.append(7)
    [(position, fresh)] = cache.grow(seq, 7) or []
    assert (position, fork.block_table[1]) == (1, 1)
    assert cache.moves.copy == [(1, fresh)]
    assert cache.grow(fork, 7) == [], "the last one to write owns the old block"
    assert seq.block_table[0] == fork.block_table[0]
    cache.check([seq, fork])


def test_a_fork_that_starts_a_new_block_copies_nothing() -> None:
    cache = manager()
    seq = sequence([1, 2, 3, 4])
    compute(cache, seq)
    fork = seq.fork(1)
    cache.share_all(fork)
    assert len(cache.grow(seq, 5) or []) == len(cache.grow(fork, 5) or []) == 1
    assert cache.moves.copy == []


def test_copy_on_write_needs_a_free_block() -> None:
    cache = manager(num_blocks=1)
    seq = sequence([1, 2])
    compute(cache, seq)
    fork = seq.fork(1)
    cache.share_all(fork)
    assert cache.grow(seq, 3) is None
    assert cache.moves.copy == []


def test_swapping_moves_every_block_there_and_back_in_order() -> None:
    cache = manager(num_blocks=4, num_host_blocks=3)
    seq = sequence(list(range(1, 11)))
    compute(cache, seq)
    table = list(seq.block_table)
    assert cache.swap_out(seq)
    assert (seq.block_table, seq.num_computed_tokens, cache.pool.num_used) == ([], 10, 0)
    out = dict(cache.take_moves().swap_out)
    assert [out[block] for block in table] == seq.host_blocks
    host_blocks = list(seq.host_blocks)
    assert cache.swap_in(seq)
    cache.check([seq])
    assert cache.host_pool.num_used == 3, "the host blocks are still to be read"
    assert cache.take_moves().swap_in == list(zip(host_blocks, seq.block_table, strict=True))
    assert cache.host_pool.num_used == 0
    cache.check([seq])


def test_swapping_needs_room_on_the_other_side() -> None:
    cache = manager(num_blocks=3, num_host_blocks=2)
    seq = sequence(list(range(1, 13)))
    compute(cache, seq)
    assert not cache.swap_out(seq)
    assert (len(seq.block_table), cache.host_pool.num_used) == (3, 0)
    cache.release(seq)
    small = sequence([1, 2, 3, 4, 5])
    compute(cache, small)
    assert cache.swap_out(small)
    large = sequence(list(range(20, 28)))
    compute(cache, large)
    assert not cache.swap_in(small)
    assert len(small.host_blocks) == 2


def test_blocks_that_come_back_from_the_host_are_offered_to_the_index_again() -> None:
    cache = manager(num_blocks=2, num_host_blocks=2)
    seq = sequence([1, 2, 3, 4, 5])
    compute(cache, seq)
    assert cache.swap_out(seq)
    evicting = sequence([9] * 8)
    compute(cache, evicting)
    cache.release(evicting)
    assert cache.find_prefix(sequence([1, 2, 3, 4, 5])) == []
    assert cache.swap_in(seq)
    cache.register_computed(seq, seq.num_computed_tokens)
    assert cache.find_prefix(sequence([1, 2, 3, 4, 5])) == seq.block_table[:1]


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head() -> None:
    cache = manager(num_blocks=3)
    seq = sequence(list(range(1, 13)))
    compute(cache, seq)
    head, middle, tail = seq.block_table
    cache.release(seq)
    assert cache.pool.free_blocks() == [tail, middle, head]
    assert (seq.num_computed_tokens, seq.block_table) == (0, [])


def test_hashes_depend_on_tokens_parents_and_salt_and_grow_with_the_tokens() -> None:
    def hashes(tokens: list[int], salt: str | None = None) -> list[bytes]:
        seq = sequence(tokens, salt)
        seq.extend_block_hashes(SIZE)
        return seq.block_hashes

    long = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(long) == 2
    assert long[:1] == hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3, 4], "") == hashes([1, 2, 3, 4]) != hashes([1, 2, 3, 4], "salt")
    assert hashes([5, 6, 7, 8, 5, 6, 7, 8])[0] != hashes([5, 6, 7, 8, 5, 6, 7, 8])[1]
    seq = sequence([1, 2, 3, 4, 5, 6, 7])
    seq.extend_block_hashes(SIZE)
    seq.token_ids += [8, 9]
    seq.extend_block_hashes(SIZE)
    assert seq.block_hashes == long
