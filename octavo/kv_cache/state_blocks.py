"""The blocks of a group whose layers keep a state of fixed size a sequence (state-space, convolution).

A sequence has one block, with its state after the tokens computed so far; its table has one entry. A snapshot is a
block that is indexed: the state at the end of a full block of tokens. It is made by indexing the block of a sequence
that stands there and going on in a copy of it. What is indexed or shared is never written, so that prefix hits and
forks are copies too.

A state cannot go back: a step that may have to be undone must not touch it, and guesses are not computed with it.
"""

from __future__ import annotations

from octavo.kv_cache.block_pool import BlockPool


class StateBlocks:
    """What a group's layers being recurrent means for its block tables. Its pool has no other group."""

    null = -1  # no block has this number: every entry of a table is a block

    def __init__(self, group: int, pool: BlockPool, block_size: int) -> None:
        self.group = group
        self.pool = pool
        self.block_size = block_size

    def num_most_blocks(self, num_tokens: int, num_step_tokens: int) -> int:
        return 1

    def num_prefix_blocks(self, keys: list[bytes], limit: int) -> int:
        """The longest prefix, in blocks up to `limit`, that ends at a snapshot."""
        while limit and self.pool.lookup(keys[limit - 1]) is None:
            limit -= 1
        return limit

    def prefix_table(self, keys: list[bytes], num_blocks: int) -> list[int]:
        block = self.pool.lookup(keys[num_blocks - 1]) if num_blocks else None
        return [] if block is None else [block]

    def num_free_needed(self, table: list[int], num_tokens: int, num_step_tokens: int) -> int:
        """One: a free snapshot becomes the sequence's own where there is no other block, and one in use is copied."""
        return 1

    def num_needed(self, table: list[int], num_computed: int, num_tokens: int) -> int:
        return 1 if not table or self.pool.ref_counts[table[0]] > 1 else 0

    def leave(self, table: list[int], num_computed: int, changed: list[tuple[int, int, int]]) -> None:
        """Nothing is ever out of sight."""

    def snapshot(self, table: list[int], num_computed: int, keys: list[bytes]) -> None:
        """Index the state of a sequence that stands at the end of a full block, before it goes on."""
        if table and num_computed and num_computed % self.block_size == 0:
            self.pool.register(table[0], keys[num_computed // self.block_size - 1])

    def take(
        self,
        table: list[int],
        num_computed: int,
        num_tokens: int,
        copies: list[tuple[int, int]],
        changed: list[tuple[int, int, int]],
    ) -> None:
        """See that the sequence has a block that it may write."""
        pool = self.pool
        if not table:
            table.append(pool.allocate())
            changed.append((self.group, 0, table[0]))
        elif pool.ref_counts[table[0]] > 1 or (pool.hashes[table[0]] is not None and pool.num_free):
            fresh = pool.allocate()
            copies.append((table[0], fresh))
            pool.release(table[0])
            table[0] = fresh
            changed.append((self.group, 0, fresh))
        else:
            pool.forget(table[0])  # no block is left to keep the snapshot in

    def register(self, table: list[int], keys: list[bytes], first: int, end: int) -> None:
        """Nothing: a step under way may already be changing the state. `snapshot` comes before a step is planned."""

    def check(self, table: list[int], num_computed: int) -> None:
        assert len(table) == (num_computed > 0) or len(table) == 1, "a sequence has one state"
