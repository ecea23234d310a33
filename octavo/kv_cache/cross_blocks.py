"""The blocks of a group whose layers attend to another network's output (cross attention).

A sequence has as many keys and values there as any other, all of them from its first step on, which writes them; they
are only read from then on. So a sequence takes all of its blocks at once, its forks share them, and they are never
copied. They are not indexed: a prefix of tokens says nothing of what the other network has seen.
"""

from __future__ import annotations

from octavo.kv_cache.block_pool import BlockPool


class CrossBlocks:
    """What a group's layers being cross attention means for its block tables."""

    null = -1  # no block has this number: every entry of a table is a block

    def __init__(self, group: int, pool: BlockPool, block_size: int, num_tokens: int) -> None:
        self.group = group
        self.pool = pool
        self.num_blocks = -(-num_tokens // block_size)  # of a sequence

    def num_most_blocks(self, num_tokens: int, num_step_tokens: int) -> int:
        return self.num_blocks

    def num_prefix_blocks(self, keys: list[bytes], limit: int) -> int:
        return 0

    def prefix_table(self, keys: list[bytes], num_blocks: int) -> list[int]:
        return []

    def num_free_needed(self, table: list[int], num_tokens: int, num_step_tokens: int) -> int:
        return self.num_blocks

    def num_needed(self, table: list[int], num_computed: int, num_tokens: int) -> int:
        return self.num_blocks - len(table)

    def leave(self, table: list[int], num_computed: int, changed: list[tuple[int, int, int]]) -> None:
        """Nothing is ever out of sight."""

    def take(
        self,
        table: list[int],
        num_computed: int,
        num_tokens: int,
        copies: list[tuple[int, int]],
        changed: list[tuple[int, int, int]],
    ) -> None:
        """All of them, with the first tokens."""
        for i in range(len(table), self.num_blocks):
            table.append(self.pool.allocate())
            changed.append((self.group, i, table[i]))

    def register(self, table: list[int], keys: list[bytes], first: int, end: int) -> None:
        """Nothing is found again."""

    def check(self, table: list[int], num_computed: int) -> None:
        assert len(table) == self.num_blocks or not (table or num_computed), "a part of another network's output"
