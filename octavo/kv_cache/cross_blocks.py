"""The blocks of a group whose layers attend to another network's output (cross attention).

A sequence has keys and values there of as much of that output as any of its tokens sees, written in the steps in which
the first of these is computed; they are only read from then on, until tokens see another part of it in their place. So
a sequence takes all of its blocks at once, its forks share them, and they are never copied; one without such an output
has none. They are not indexed: a prefix of tokens says nothing of what the other network has seen.
"""

from __future__ import annotations

from octavo.kv_cache.block_pool import BlockPool


class CrossBlocks:
    """What a group's layers being cross attention means for its block tables."""

    null = -1  # no block has this number: every entry of a table is a block

    def __init__(self, group: int, pool: BlockPool, block_size: int, num_tokens: int) -> None:
        """Of sequences that attend to `num_tokens` of that output at most. `num_rows` below are those of one."""
        self.group = group
        self.pool = pool
        self._block_size, self._num_tokens = block_size, num_tokens

    def num_most_blocks(self, num_tokens: int, num_step_tokens: int) -> int:
        return self._num_blocks(self._num_tokens)

    def num_prefix_blocks(self, keys: list[bytes], limit: int) -> int:
        return 0

    def prefix_table(self, keys: list[bytes], num_blocks: int) -> list[int]:
        return []

    def num_free_needed(self, table: list[int], num_rows: int, num_step_tokens: int) -> int:
        return self._num_blocks(num_rows)

    def num_needed(self, table: list[int], num_computed: int, num_rows: int) -> int:
        return self._num_blocks(num_rows) - len(table)

    def free_out_of_window(self, table: list[int], num_computed: int, changed: list[tuple[int, int, int]]) -> None:
        """Nothing is ever out of sight."""

    def allocate(
        self,
        table: list[int],
        num_computed: int,
        num_rows: int,
        copies: list[tuple[int, int]],
        changed: list[tuple[int, int, int]],
    ) -> None:
        """All of them, with the first tokens."""
        for i in range(len(table), self._num_blocks(num_rows)):
            table.append(self.pool.allocate())
            changed.append((self.group, i, table[i]))

    def register(self, table: list[int], keys: list[bytes], first: int, end: int) -> None:
        """Nothing is found again."""

    def check(self, table: list[int], num_computed: int, num_rows: int) -> None:
        is_whole = len(table) == self._num_blocks(num_rows)
        assert is_whole or not (table or num_computed), "a part of another network's output"

    def _num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // self._block_size)
