"""The blocks of a group whose layers keep a state of fixed size a sequence (state-space, convolution).

A sequence has one block: its state after the tokens computed so far. A snapshot is an indexed block: the state at the
end of a full block of tokens. To take one, the sequence's block is indexed and the sequence goes on in a copy. Indexed
and shared blocks are never written, so prefix hits and forks are copies too.

A state cannot be undone. So each draft token of a step leaves the state after it in a block of its own, in the table's
entries after the first. When the accepted draft tokens are known, the state after the last accepted one becomes the
sequence's.
"""

from collections.abc import Container

from octavo.kv_cache.block_pool import BlockPool, Copies, TableChanges

MAX_DRAFT_TOKENS = 32  # of a sequence in a step; the block tables of the shortest sequences have room for so many


class StateBlocks:
    """Block tables of a group of recurrent layers, which has a pool of its own."""

    null = -1  # no block has this number: tables of this group have no null entries

    def __init__(self, group: int, pool: BlockPool, block_size: int) -> None:
        self.group = group
        self.pool = pool
        self.block_size = block_size

    def num_most_blocks(self, num_tokens: int, num_step_tokens: int) -> int:
        return 1

    def num_prefix_blocks(self, keys: list[bytes], limit: int, tier: Container[bytes] = ()) -> int:
        """Return the longest prefix, in blocks up to `limit`, that ends at a snapshot in the index or in the `tier`
        below it."""
        while limit and self.pool.lookup(keys[limit - 1]) is None and keys[limit - 1] not in tier:
            limit -= 1
        return limit

    def prefix_keys(self, keys: list[bytes], num_blocks: int) -> list[bytes]:
        return keys[num_blocks - 1 : num_blocks] if num_blocks else []

    def prefix_table(self, keys: list[bytes], num_blocks: int) -> list[int]:
        block = self.pool.lookup(keys[num_blocks - 1]) if num_blocks else None
        return [] if block is None else [block]

    def num_free_needed(self, table: list[int], num_tokens: int, num_step_tokens: int) -> int:
        """Return 1: a snapshot in use is copied, and a free snapshot is copied too unless no other block is left."""
        return 1

    def num_needed(self, table: list[int], num_computed: int, num_tokens: int) -> int:
        return 1 if not table or self.pool.ref_counts[table[0]] > 1 else 0

    def free_out_of_window(self, table: list[int], num_computed: int, changed: TableChanges) -> None:
        """There is no window."""

    def snapshot(self, block: int, num_computed: int, keys: list[bytes]) -> None:
        """Index the state of a sequence at the end of a full block, before the sequence goes on."""
        if num_computed and num_computed % self.block_size == 0:
            self.pool.register(block, keys[num_computed // self.block_size - 1])

    def allocate(
        self, table: list[int], num_computed: int, num_tokens: int, copies: Copies, changed: TableChanges
    ) -> None:
        """Give the sequence a block that it may write. The entry is always reported as changed: `commit_drafts` may
        have moved it."""
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

    def allocate_for_drafts(self, table: list[int], num_draft_tokens: int, changed: TableChanges) -> None:
        """Allocate a block for the state after each draft token, after the sequence's own."""
        for position in range(1, num_draft_tokens + 1):
            table.append(self.pool.allocate())
            changed.append((self.group, position, table[position]))

    def commit_drafts(self, table: list[int], num_right: int) -> None:
        """Make the state after the last accepted draft token the sequence's, and release the other blocks.
        `num_right` draft tokens were accepted."""
        table[0], table[num_right] = table[num_right], table[0]
        while len(table) > 1:
            self.pool.release(table.pop())

    def register(self, table: list[int], keys: list[bytes], first: int, end: int) -> None:
        """Do nothing: a step in flight may already change the state. `snapshot` is called before a step is planned."""

    def check(self, table: list[int], num_computed: int) -> None:
        assert table or not num_computed, "a sequence has a state"
