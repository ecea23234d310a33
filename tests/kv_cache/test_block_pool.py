"""The block pool: who gets which block, what a freed block keeps, and the invariants that `check` asserts."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv_cache.block_pool import BlockPool


def cached(pool: BlockPool, count: int) -> list[int]:
    """Allocate blocks, index each under the key b"0", b"1", … and free them in that order."""
    blocks = [pool.allocate() for _ in range(count)]
    for i, block in enumerate(blocks):
        pool.register(block, b"%d" % i)
    for block in blocks:
        pool.release(block)
    return blocks


def test_blocks_are_handed_out_in_order_and_each_once() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)
    with pytest.raises(AssertionError, match="empty pool"):
        pool.allocate()


def test_indexed_blocks_are_evicted_least_recently_used_first() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 4)
    assert [pool.allocate() for _ in range(4)] == blocks
    assert all(pool.lookup(b"%d" % i) is None for i in range(4)), "evicted contents left the index"


def test_reserved_blocks_are_never_handed_out() -> None:
    pool = BlockPool(3, num_reserved=1)
    assert (pool.num_usable, pool.num_free, pool.free_blocks()) == (2, 2, [1, 2])
    assert [pool.allocate(), pool.allocate()] == [1, 2]
    pool.release(1)
    pool.check({2: 1})
    assert (pool.num_used, BlockPool(1, num_reserved=1).num_free, BlockPool(0, num_reserved=1).num_free) == (1, 0, 0)


def test_a_forgotten_block_is_not_found_and_keeps_its_references() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.register(block, b"0")
    pool.forget(block)
    pool.forget(block)
    assert pool.lookup(b"0") is None
    pool.check({block: 1})


def test_a_block_without_contents_is_reused_before_any_cached_one_is_evicted() -> None:
    pool = BlockPool(4)
    first, second = cached(pool, 2)
    plain = pool.allocate()
    pool.release(plain)
    assert pool.allocate() == plain, "the block that was used last is the warmest"
    assert pool.lookup(b"0") == first
    assert pool.lookup(b"1") == second


def test_a_hit_revives_a_free_block_from_the_middle_of_the_list() -> None:
    pool = BlockPool(5)
    blocks = cached(pool, 5)
    pool.share(blocks[2])
    assert pool.free_blocks() == [blocks[0], blocks[1], blocks[3], blocks[4]]
    assert pool.lookup(b"2") == blocks[2], "its contents are kept"
    pool.release(blocks[2])
    assert pool.free_blocks()[-1] == blocks[2], "it is now the one that was used last"
    pool.check({})


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_the_first_block_with_a_content_stays_the_indexed_one() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"same")
    pool.register(second, b"same")
    pool.register(first, b"other")
    assert pool.lookup(b"same") == first
    assert pool.lookup(b"other") is None
    assert pool.hashes[second] is None
    pool.check({first: 1, second: 1})
    # A free one is evicted sooner, and with it the content.
    pool.release(first)
    pool.register(second, b"same")
    assert pool.lookup(b"same") == second and pool.free_blocks()[0] == first
    pool.check({second: 1})


def test_an_operation_touches_a_handful_of_entries_however_large_the_pool() -> None:
    """O(1), counted and not timed: the elements read from and written to the linked list."""

    class Counted(list[int]):
        touched = 0

        def __getitem__(self, i: int) -> int:  # type: ignore[override]
            Counted.touched += 1
            return super().__getitem__(i)

        def __setitem__(self, i: int, value: int) -> None:  # type: ignore[override]
            Counted.touched += 1
            super().__setitem__(i, value)

    def cost(num_blocks: int) -> int:
        pool = BlockPool(num_blocks)
        blocks = cached(pool, num_blocks)
        pool._next, pool._previous = Counted(pool._next), Counted(pool._previous)
        Counted.touched = 0
        pool.share(blocks[num_blocks // 2])
        pool.release(blocks[num_blocks // 2])
        pool.release(pool.allocate())
        return Counted.touched

    assert cost(10_000) == cost(10) < 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool.ref_counts.__setitem__(0, 2), "wrong reference count"),
        (lambda pool: pool._next.__setitem__(4, 3), "free list and its count disagree"),
        (lambda pool: pool._index.__setitem__(b"x", 2), "the index and the blocks' keys disagree"),
    ],
)
def test_check_notices_damage(damage: object, message: str) -> None:
    pool = BlockPool(4)
    references = {pool.allocate(): 1}
    pool.check(references)
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        pool.check(references)


class PoolMachine(RuleBasedStateMachine):
    """Against the plainest model: a deque for the free list and dictionaries for the rest."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = deque(range(num_blocks))
        self.references: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}

    @precondition(lambda self: self.free)
    @rule()
    def allocate(self) -> None:
        block = self.free.popleft()
        self.keys.pop(block, None)
        self.references[block] = 1
        assert self.pool.allocate() == block

    @precondition(lambda self: self.references or self.keys)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.references, *self.keys})))
        if block in self.free:
            self.free.remove(block)
        self.references[block] = self.references.get(block, 0) + 1
        self.pool.share(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.references[block] -= 1
        if self.references[block] == 0:
            del self.references[block]
            if block in self.keys:
                self.free.append(block)
            else:
                self.free.appendleft(block)
        self.pool.release(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        other = next((b for b, k in self.keys.items() if k == key), None)
        if block not in self.keys and other not in self.references:
            if other is not None:
                del self.keys[other]
                self.free.remove(other)
                self.free.appendleft(other)
            self.keys[block] = key
        self.pool.register(block, key)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.references)
        assert self.pool.free_blocks() == list(self.free)
        for key in (b"a", b"b", b"c"):
            assert self.pool.lookup(key) == next((b for b, k in self.keys.items() if k == key), None)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, derandomize=True, deadline=None)
test_the_pool_behaves_as_the_plainest_model = PoolMachine.TestCase
