"""The blocks of a group whose layers keep keys and values, of all tokens or of a window of them.

Entry i of a block table holds the tokens i * block_size .. (i + 1) * block_size. In a window group, entries that are
out of the window of every token still to compute are `NULL_BLOCK`.
"""

from collections.abc import Container

from octavo.kv_cache.block_pool import BlockPool, Copies, TableChanges
from octavo.kv_cache.groups import NULL_BLOCK

NO_BLOCK = -1  # no block has this number


class AttentionBlocks:
    """Block tables of a group of attention layers. `key_suffix` tells the prefix keys of groups in one pool apart."""

    def __init__(self, group: int, pool: BlockPool, block_size: int, window: int, key_suffix: bytes) -> None:
        self.group = group
        self.pool = pool
        self.block_size = block_size
        self.window = window  # 0: all tokens
        self.key_suffix = key_suffix
        self.null = NULL_BLOCK if window else NO_BLOCK

    def first_visible(self, position: int) -> int:
        """Return the first entry that tokens at `position` and later see."""
        return max(position - self.window + 1, 0) // self.block_size if self.window else 0

    def num_most_blocks(self, num_tokens: int, num_step_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds if steps compute up to `num_step_tokens`."""
        num_all = -(-num_tokens // self.block_size)
        if not self.window:
            return num_all
        num_seen = self.window - 1 + num_step_tokens  # tokens that all tokens of a step see
        return min(num_all, (num_seen - 2) // self.block_size + 2)  # for any position within a block

    def num_prefix_blocks(self, keys: list[bytes], limit: int, tier: Container[bytes] = ()) -> int:
        """Return the longest prefix, in blocks up to `limit`, for which the index or the `tier` below it has every
        block that later tokens see."""
        lookup, suffix = self.pool.lookup, self.key_suffix
        if not self.window:
            for i in range(limit):
                if lookup(keys[i] + suffix) is None and keys[i] + suffix not in tier:
                    return i
            return limit
        while limit:
            visible = reversed(range(self.first_visible(limit * self.block_size), limit))
            missing = next(
                (i for i in visible if lookup(keys[i] + suffix) is None and keys[i] + suffix not in tier), None
            )
            if missing is None:
                break
            limit = missing
        return limit

    def prefix_keys(self, keys: list[bytes], num_blocks: int) -> list[bytes]:
        """Return the index's keys of the blocks that tokens after a prefix of `num_blocks` see."""
        first = self.first_visible(num_blocks * self.block_size)
        return [key + self.key_suffix for key in keys[first:num_blocks]]

    def has(self, keys: list[bytes], place: int) -> bool:
        return self.pool.lookup(keys[place] + self.key_suffix) is not None

    def prefix_table(self, keys: list[bytes], num_blocks: int) -> list[int]:
        first = self.first_visible(num_blocks * self.block_size)
        table = [self.null] * first
        for key in self.prefix_keys(keys, num_blocks):
            block = self.pool.lookup(key)
            assert block is not None, "the prefix was found before"
            table.append(block)
        return table

    def num_free_needed(self, table: list[int], num_tokens: int, num_step_tokens: int) -> int:
        """Return the free blocks needed to compute `num_tokens` after a prefix that will be shared or swapped in,
        including those blocks of the prefix that are free now."""
        num_missing = -(-num_tokens // self.block_size) - table.count(self.null)
        needed = min(num_missing, self.num_most_blocks(num_tokens, num_step_tokens))
        return needed - sum([block != self.null and self.pool.ref_counts[block] > 0 for block in table])

    def num_needed(self, table: list[int], num_computed: int, num_tokens: int) -> int:
        """Free blocks that `free_out_of_window` and `allocate` need together; negative if they free more."""
        ref_counts = self.pool.ref_counts
        num_new = -(-num_tokens // self.block_size) - len(table)
        num_copied = sum([ref_counts[block] > 1 for block in table[num_computed // self.block_size :]])
        num_left = (
            sum([ref_counts[table[i]] == 1 for i in self._out_of_window(table, num_computed)]) if self.window else 0
        )
        return max(num_new, 0) + num_copied - num_left

    def free_out_of_window(self, table: list[int], num_computed: int, changed: TableChanges) -> None:
        """Release the blocks that tokens from `num_computed` on do not see."""
        for i in self._out_of_window(table, num_computed):
            self.pool.release(table[i])
            table[i] = self.null
            changed.append((self.group, i, self.null))

    def allocate(
        self, table: list[int], num_computed: int, num_tokens: int, copies: Copies, changed: TableChanges
    ) -> None:
        """Allocate blocks for tokens num_computed .. num_tokens, and copy shared blocks that will be written."""
        pool = self.pool
        for i in range(num_computed // self.block_size, len(table)):
            if pool.ref_counts[table[i]] > 1:
                fresh = pool.allocate()
                copies.append((table[i], fresh))
                pool.release(table[i])
                table[i] = fresh
                changed.append((self.group, i, fresh))
        for i in range(len(table), -(-num_tokens // self.block_size)):
            table.append(pool.allocate())
            changed.append((self.group, i, table[i]))

    def register(self, table: list[int], keys: list[bytes], first: int, end: int) -> None:
        """Add the full, computed entries first .. end to the prefix index."""
        for i in range(first, end):
            if table[i] != self.null:
                self.pool.register(table[i], keys[i] + self.key_suffix)

    def check(self, table: list[int], num_computed: int) -> None:
        num_filled = -(-num_computed // self.block_size)
        assert len(table) >= num_filled, "computed tokens have no blocks"
        first = self.first_visible(num_computed)
        assert self.null not in table[first:], "a block within the window was released"

    def _out_of_window(self, table: list[int], num_computed: int) -> range:
        """Return the entries that still have a block and that tokens from `num_computed` on do not see."""
        end = first = min(self.first_visible(num_computed), len(table))
        while first and table[first - 1] != self.null:
            first -= 1
        return range(first, end)
