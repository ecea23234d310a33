"""The blocks of a group whose layers keep a state of fixed size a sequence (state-space, convolution).

A sequence has one block, with its state after the tokens computed so far; its table has one entry. A snapshot is a
block that is indexed: the state at the end of a full block of tokens. It is made by indexing the block of a sequence
that stands there and going on in a copy of it. What is indexed or shared is never written, so that prefix hits and
forks are copies too.

A state cannot go back. So each guess of a step leaves the state after it in a block of its own, which the table has
behind the first entry until it is known which guesses were right. That of the last right one is the sequence's then.
"""

from __future__ import annotations

from octavo.kv_cache.block_pool import BlockPool

MAX_DRAFT_TOKENS = 32  # of a sequence in a step: what there is room for in a table, however short sequences are


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

    def free_out_of_window(self, table: list[int], num_computed: int, changed: list[tuple[int, int, int]]) -> None:
        """Nothing is ever out of sight."""

    def snapshot(self, block: int, num_computed: int, keys: list[bytes]) -> None:
        """Index the state of a sequence that stands at the end of a full block, before it goes on."""
        if num_computed and num_computed % self.block_size == 0:
            self.pool.register(block, keys[num_computed // self.block_size - 1])

    def allocate(
        self,
        table: list[int],
        num_computed: int,
        num_tokens: int,
        copies: list[tuple[int, int]],
        changed: list[tuple[int, int, int]],
    ) -> None:
        """See that the sequence has a block that it may write. Where it goes on from a guess nobody was told before."""
        pool = self.pool
        if not table:
            table.append(pool.allocate())
        elif pool.ref_counts[table[0]] > 1 or (pool.hashes[table[0]] is not None and pool.num_free):
            fresh = pool.allocate()
            copies.append((table[0], fresh))
            pool.release(table[0])
            table[0] = fresh
        else:
            pool.forget(table[0])  # no block is left to keep the snapshot in
        changed.append((self.group, 0, table[0]))

    def allocate_for_drafts(self, table: list[int], num_draft_tokens: int, changed: list[tuple[int, int, int]]) -> None:
        """A block for the state after each guess, behind the one that the sequence may write."""
        for position in range(1, num_draft_tokens + 1):
            table.append(self.pool.allocate())
            changed.append((self.group, position, table[position]))

    def commit_drafts(self, table: list[int], num_right: int) -> None:
        """Go on from the state after the last of the guesses that were right, and give back the other blocks."""
        table[0], table[num_right] = table[num_right], table[0]
        while len(table) > 1:
            self.pool.release(table.pop())

    def register(self, table: list[int], keys: list[bytes], first: int, end: int) -> None:
        """Nothing: a step under way may already be changing the state. `snapshot` comes before a step is planned."""

    def check(self, table: list[int], num_computed: int) -> None:
        assert table or not num_computed, "a sequence has a state"
