"""Block tables of groups that keep a window, a state or another network's output: what is given back, what is found
again, what is copied."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace

import pytest

from octavo.kv_cache.groups import CacheGroup, LayerCacheSpec
from octavo.kv_cache.manager import UNLIMITED, KVCacheManager
from octavo.request import EngineRequest, MediaItem, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence

SIZE = 4
FULL = LayerCacheSpec("full", num_kv_heads=1, key_size=8, value_size=8)
WINDOW = LayerCacheSpec("window", num_kv_heads=1, key_size=8, value_size=8, window=6)
STATE = LayerCacheSpec("state", num_bytes=64)
CROSS = LayerCacheSpec("cross", num_kv_heads=1, key_size=8, value_size=8, num_tokens=10)


def manager(*groups: tuple[LayerCacheSpec, int], num_blocks: list[int], num_host_blocks: int = 0) -> KVCacheManager:
    cache_groups = [CacheGroup(spec, (layer,), pool) for layer, (spec, pool) in enumerate(groups)]
    return KVCacheManager(cache_groups, num_blocks, SIZE, [num_host_blocks] * len(num_blocks), True)


def sequence(num_tokens: int, first: int = 0, num_rows: Several[int] = (), apart: int = 1) -> Sequence:
    """With media of `num_rows` of another network's output, so many tokens `apart`."""
    tokens = list(range(first, first + num_tokens))
    media = tuple(MediaItem(i * apart, 0, b"%d" % i, num_rows=count) for i, count in enumerate(num_rows))
    request = EngineRequest("r", Prompt(tokens, media=media), SamplingParams(), [0], 100, 0.0)
    return Sequence(request=request, key=(0, 0), seed=0, token_ids=tokens)


def compute(cache: KVCacheManager, seq: Sequence, num_tokens: int) -> None:
    """Take blocks for the tokens up to `num_tokens` and count them as computed."""
    assert cache.grow(seq, num_tokens) is not None
    seq.num_computed_tokens = num_tokens
    cache.register_computed(seq, num_tokens)


def begin(cache: KVCacheManager, seq: Sequence) -> int:
    """Share what the cache holds of a new sequence -> tokens found."""
    assert cache.share_prefix(seq, cache.find_prefix(seq), 64)
    return seq.num_computed_tokens


def test_blocks_that_have_left_the_window_are_given_back_and_their_entries_are_null() -> None:
    cache = manager((WINDOW, 0), num_blocks=[10])
    seq = sequence(40)
    compute(cache, seq, 12)
    assert seq.block_tables == [[1, 2, 3]], "block 0 is the null block"
    assert cache.grow(seq, 13) == [(0, 0, 0), (0, 3, 4)], "the token at 12 sees those from 7 on"
    assert seq.block_tables == [[0, 2, 3, 4]]
    seq.num_computed_tokens = 13
    assert cache.grow(seq, 16) == [], "what leaves within a block is given back with the next one"
    for num_tokens in range(14, 40):
        compute(cache, seq, num_tokens)
        assert cache.pools[0].num_used <= 4
        cache.check([seq])
    cache.release(seq)
    assert cache.pools[0].num_used == 0


@pytest.mark.parametrize("window", [5, 6, 8, 9])
def test_a_window_has_the_blocks_that_it_sees_and_no_more(window: int) -> None:
    cache = manager((replace(WINDOW, window=window), 0), num_blocks=[10])
    seq, used = sequence(40), set[int]()
    for num_tokens in range(1, 41):
        compute(cache, seq, num_tokens)
        used.add(cache.pools[0].num_used)
    assert max(used) == cache.most_blocks(1000, num_step_tokens=1)[0]


def test_a_window_needs_blocks_for_itself_and_a_step_and_no_more() -> None:
    cache = manager((WINDOW, 0), num_blocks=[5])
    assert cache.most_blocks(1000, num_step_tokens=8) == [4]
    assert cache.most_blocks(5, num_step_tokens=8) == [2]
    assert cache.capacity(num_step_tokens=8) == UNLIMITED
    assert cache.capacity(num_step_tokens=12) == 16, "a step of 12 tokens may need 5 blocks, and the pool has 4"
    both = manager((FULL, 0), (WINDOW, 0), num_blocks=[11])
    assert both.capacity(num_step_tokens=8) == 24, "6 blocks for all tokens and 4 for the window"


def test_a_prefix_is_found_if_the_window_before_its_end_is() -> None:
    cache = manager((WINDOW, 0), num_blocks=[8])
    first = sequence(20)
    for num_tokens in range(1, 21):
        compute(cache, first, num_tokens)
    cache.release(first)
    again = sequence(30)
    assert begin(cache, again) == 20
    assert again.block_tables[0][:3] == [0, 0, 0], "the token at 20 sees those from 15 on"
    assert 0 not in again.block_tables[0][3:]


def test_a_prefix_is_as_long_as_every_group_has_it() -> None:
    cache = manager((FULL, 0), (WINDOW, 1), num_blocks=[20, 4])
    first = sequence(20)
    for num_tokens in range(1, 21):
        compute(cache, first, num_tokens)
    cache.release(first)
    compute(cache, sequence(4, first=100), 4)  # takes the block of the window that was released first, its last one
    found = cache.find_prefix(sequence(30))
    assert found.num_tokens == 16, "all 20 tokens have their full blocks, but the window's last one is gone"
    assert found.tables == [[0, 1, 2, 3], [0, 0, 3, 1]]


def test_groups_in_one_pool_do_not_find_each_others_blocks() -> None:
    cache = manager((FULL, 0), (WINDOW, 0), num_blocks=[20])
    first = sequence(12)
    compute(cache, first, 12)
    tables = [list(table) for table in first.block_tables]
    assert not set(tables[0]) & set(tables[1])
    cache.release(first)
    assert cache.find_prefix(sequence(13)).tables == [tables[0], [0, *tables[1][1:]]]


def test_a_state_is_one_block_and_a_snapshot_stays_where_a_step_ends_with_a_block() -> None:
    cache = manager((STATE, 0), num_blocks=[4])
    seq = sequence(30)
    compute(cache, seq, 3)
    assert (seq.block_tables, cache.take_moves()[0].copy) == ([[0]], [])
    compute(cache, seq, 8)
    assert cache.take_moves()[0].copy == [], "tokens 4 .. 8 went by in one step: there is no snapshot at 4"
    compute(cache, seq, 9)
    assert (seq.block_tables, cache.take_moves()[0].copy) == ([[1]], [(0, 1)]), "it goes on in a copy"
    again = sequence(30)
    assert begin(cache, again) == 8
    assert again.block_tables == [[0]]
    compute(cache, again, 10)
    assert cache.take_moves()[0].copy == [(0, 2)], "a snapshot is never written"
    cache.check([seq, again])


def guess(cache: KVCacheManager, seq: Sequence, num_draft_tokens: int, num_right: int) -> list[int]:
    """A step of the next token and guesses of what follows it -> the blocks that it left states in."""
    compute(cache, seq, seq.num_computed_tokens + 1)
    assert cache.grow_for_drafts(seq, num_draft_tokens) is not None
    blocks = list(seq.block_tables[-1])
    seq.token_ids = [*seq.token_ids, *[7] * (num_right + 1)]
    seq.num_computed_tokens += num_right
    cache.register_computed(seq, seq.num_computed_tokens)
    cache.roll_back(seq, num_right)
    return blocks


def test_each_guess_has_a_state_and_that_of_the_last_right_one_is_gone_on_from() -> None:
    cache = manager((FULL, 0), (STATE, 1), num_blocks=[20, 6])
    seq = sequence(6)
    compute(cache, seq, 5)
    assert cache.num_draft_slots == 5
    blocks = guess(cache, seq, 3, 2)
    assert len(set(blocks)) == 4 and seq.block_tables[1] == [blocks[2]]
    assert cache.pools[1].num_used == 1, "the others are free again"
    assert cache.grow(seq, 9) == [(0, 2, 2), (1, 0, blocks[2])], "the step is told where the state is"
    seq.num_computed_tokens = 9
    [before], blocks = seq.block_tables[1], guess(cache, seq, 5, 0)
    assert seq.block_tables[1] == [before] == blocks[:1]
    assert cache.take_moves()[1].copy == [], "nothing is copied"
    cache.check([seq])


def test_guesses_get_no_more_states_than_are_free() -> None:
    cache = manager((STATE, 0), num_blocks=[3])
    first, second = sequence(5), sequence(5, first=100)
    for seq in (first, second):
        compute(cache, seq, 4)
    assert cache.num_draft_slots == 1
    guess(cache, first, 1, 1)
    compute(cache, second, 5)
    assert cache.num_draft_slots == 1, "guesses keep nothing once it is known which were right"
    assert manager((FULL, 0), num_blocks=[3]).num_draft_slots == UNLIMITED


def test_a_snapshot_stays_where_right_guesses_have_passed_the_end_of_a_block() -> None:
    cache = manager((STATE, 0), num_blocks=[6])
    seq = sequence(6)
    compute(cache, seq, 6)
    while seq.num_computed_tokens < 8 * SIZE + 1:
        at = seq.num_computed_tokens
        blocks = guess(cache, seq, 3, 2)
    assert at < 8 * SIZE - 1 < seq.num_computed_tokens - 1, "the eighth block ends among the guesses of that step"
    again = sequence(0)
    again.token_ids = [*seq.token_ids]
    found = cache.find_prefix(again)
    assert (found.num_tokens, found.tables) == (8 * SIZE, [[blocks[8 * SIZE - at - 1]]])
    assert cache.take_moves()[0].copy == []


def test_steps_end_with_a_block_where_states_are_kept() -> None:
    cache = manager((FULL, 0), (STATE, 1), num_blocks=[8, 4])
    assert [cache.chunk_end(computed, end) for computed, end in ((0, 11), (8, 11), (0, 3), (0, 8))] == [8, 11, 3, 8]
    assert manager((FULL, 0), num_blocks=[8]).chunk_end(0, 11) == 11


def test_a_snapshot_is_given_up_where_there_is_no_other_block() -> None:
    cache = manager((STATE, 0), num_blocks=[1])
    seq = sequence(30)
    for num_tokens in range(1, 10):
        compute(cache, seq, num_tokens)
    assert (seq.block_tables, cache.take_moves()[0].copy) == ([[0]], [])
    assert cache.find_prefix(sequence(30)).num_tokens == 0


def test_an_answer_keeps_a_snapshot_every_eight_blocks() -> None:
    cache = manager((STATE, 0), num_blocks=[4])
    seq = sequence(SIZE)
    copied = []
    for num_tokens in range(1, 16 * SIZE + 2):
        seq.token_ids = [*seq.token_ids, *[7] * (num_tokens - seq.num_tokens)]
        compute(cache, seq, num_tokens)
        copied += [num_tokens - 1] * len(cache.take_moves()[0].copy)
    assert copied == [SIZE, 8 * SIZE, 16 * SIZE], "the prompt's, and then the eighth and the sixteenth"


def test_forks_copy_the_state_that_they_share() -> None:
    cache = manager((STATE, 0), num_blocks=[3])
    seq = sequence(6)
    compute(cache, seq, 6)
    fork = seq.fork(1)
    cache.share_all(seq, fork)
    for one in (seq, fork):
        one.token_ids.append(7)
        assert cache.grow(one, 7) is not None
    assert (seq.block_tables, fork.block_tables, cache.take_moves()[0].copy) == ([[1]], [[0]], [(0, 1)])
    cache.check([seq, fork])


def test_swapping_leaves_behind_what_no_token_sees() -> None:
    cache = manager((FULL, 0), (WINDOW, 1), (STATE, 2), num_blocks=[8, 8, 2], num_host_blocks=8)
    seq = sequence(24)
    compute(cache, seq, 20)
    assert cache.swap_out(seq)
    assert [len(moves.swap_out) for moves in cache.take_moves()] == [5, 2, 1]
    assert [len(table) for table in seq.host_blocks] == [5, 5, 1]
    assert all(pool.num_used == 0 for pool in cache.pools)
    assert cache.swap_in(seq, 64)
    assert seq.block_tables[1][:3] == [0, 0, 0]
    assert [len(moves.swap_in) for moves in cache.take_moves()] == [5, 2, 1]
    compute(cache, seq, 24)
    cache.check([seq])


def test_rolling_back_frees_the_blocks_behind_the_last_computed_token() -> None:
    cache = manager((FULL, 0), (WINDOW, 0), num_blocks=[20])
    seq = sequence(7)
    compute(cache, seq, 6)
    assert cache.grow(seq, 15) is not None, "seven tokens and eight guesses"
    seq.num_computed_tokens = 7
    cache.roll_back(seq)
    assert [len(table) for table in seq.block_tables] == [2, 2]
    seq.token_ids += [7, 8]
    assert [(group, position) for group, position, _ in cache.grow(seq, 9) or []] == [(0, 2), (1, 2)]
    cache.check([seq])


def test_another_networks_output_has_its_blocks_at_once_and_is_shared_but_never_copied_or_found() -> None:
    cache = manager((FULL, 0), (CROSS, 0), num_blocks=[9], num_host_blocks=9)
    assert cache.most_blocks(6, num_step_tokens=64) == [2 + 3]
    assert cache.capacity(num_step_tokens=64) == (9 - 3) * SIZE
    seq = sequence(6, num_rows=[10])
    assert begin(cache, seq) == 0
    compute(cache, seq, 1)
    assert [len(table) for table in seq.block_tables] == [1, 3]
    heard = list(seq.block_tables[1])
    compute(cache, seq, 6)
    fork = seq.fork(1)
    cache.share_all(seq, fork)
    seq.token_ids.append(9)
    compute(cache, seq, 7)  # the block that both would write is copied
    assert seq.block_tables[1] == fork.block_tables[1] == heard and seq.block_tables[0] != fork.block_tables[0]
    cache.check([seq, fork])
    other = sequence(9, num_rows=[10])
    assert not cache.share_prefix(other, cache.find_prefix(other), 64), "3 blocks are left, and it needs 6"
    cache.release(fork)
    assert cache.swap_out(seq) and cache.pools[0].num_used == 0
    [moves] = cache.take_moves()
    assert len(moves.swap_out) == 2 + 3
    assert cache.swap_in(seq, 64)
    cache.take_moves()
    assert [len(table) for table in seq.block_tables] == [2, 3]
    cache.check([seq])
    cache.release(seq)
    again = sequence(9, num_rows=[10])
    assert begin(cache, again) == 0, "tokens do not say what is heard"
    assert cache.pools[0].num_used == 0


@pytest.mark.parametrize(
    ("num_rows", "apart", "num_blocks"), [((), 1, 0), ((5,), 1, 2), ((3, 3, 4), 1, 3), ((3, 6, 4), 2, 2)]
)
def test_a_sequence_has_blocks_for_what_any_of_its_tokens_sees(
    num_rows: tuple[int, ...], apart: int, num_blocks: int
) -> None:
    """Media that follow each other are seen together, others one after the other."""
    cache = manager((FULL, 0), (CROSS, 0), num_blocks=[9])
    seq = sequence(6, num_rows=num_rows, apart=apart)
    assert begin(cache, seq) == 0
    compute(cache, seq, 6)
    assert [len(table) for table in seq.block_tables] == [2, num_blocks]
    cache.check([seq])
