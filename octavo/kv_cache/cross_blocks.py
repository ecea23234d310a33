"""The blocks of a group of cross-attention layers: keys and values of an encoder's output.

They are written when the first token that sees the output is computed. After that they are only read, until later
tokens see another image or sound. So a sequence takes all of its blocks at once, its forks share them, and they are
never copied. A sequence without media has none. They are not in the prefix index: tokens do not identify the encoder's
input.
"""

from collections.abc import Container

from octavo.kv_cache.block_pool import BlockPool, Copies, TableChanges


class CrossBlocks:
    """Block tables of a group of cross-attention layers."""

    null = -1  # no block has this number: tables of this group have no null entries

    def __init__(self, group: int, pool: BlockPool, block_size: int, num_tokens: int) -> None:
        """`num_tokens` is the most rows of encoder output that a sequence attends to; `num_rows`, in the methods, is
        the number of one sequence."""
        self.group = group
        self.pool = pool
        self._block_size, self._num_tokens = block_size, num_tokens

    def num_most_blocks(self, num_tokens: int, num_step_tokens: int) -> int:
        return self._num_blocks(self._num_tokens)

    def num_prefix_blocks(self, keys: list[bytes], limit: int, tier: Container[bytes] = ()) -> int:
        return 0

    def prefix_keys(self, keys: list[bytes], num_blocks: int) -> list[bytes]:
        return []

    def prefix_table(self, keys: list[bytes], num_blocks: int) -> list[int]:
        return []

    def num_free_needed(self, table: list[int], num_rows: int, num_step_tokens: int) -> int:
        return self._num_blocks(num_rows)

    def num_needed(self, table: list[int], num_computed: int, num_rows: int) -> int:
        return self._num_blocks(num_rows) - len(table)

    def free_out_of_window(self, table: list[int], num_computed: int, changed: TableChanges) -> None:
        """There is no window."""

    def allocate(
        self, table: list[int], num_computed: int, num_rows: int, copies: Copies, changed: TableChanges
    ) -> None:
        """Allocate all blocks of the sequence with its first tokens."""
        for i in range(len(table), self._num_blocks(num_rows)):
            table.append(self.pool.allocate())
            changed.append((self.group, i, table[i]))

    def register(self, table: list[int], keys: list[bytes], first: int, end: int) -> None:
        """There is no prefix index."""

    def check(self, table: list[int], num_computed: int, num_rows: int) -> None:
        is_whole = len(table) == self._num_blocks(num_rows)
        assert is_whole or not (table or num_computed), "only a part of the encoder's output has blocks"

    def _num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // self._block_size)
