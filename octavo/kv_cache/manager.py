"""Which blocks each sequence has: prefix hits, growth, copy-on-write, release, and moves between device and host.

The scheduler calls in here while it plans a step; what must be copied is collected in a `BlockMoves`, which the plan
carries to the device.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv_cache.block_pool import BlockPool
from octavo.plan import BlockMoves
from octavo.sequence import Sequence


class KVCacheManager:
    """Block tables over a device pool and a host pool. Methods that need blocks return False and change nothing when
    there are too few."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.moves = BlockMoves()
        self._returning_host_blocks: list[int] = []  # free only once the step that reads them is under way

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take_moves(self) -> BlockMoves:
        """The moves collected since the last call; they happen before anything that is planned later."""
        moves, self.moves = self.moves, BlockMoves()
        for block in self._returning_host_blocks:
            self.host_pool.release(block)
        self._returning_host_blocks.clear()
        return moves

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that already hold the first tokens of `seq`, longest run. At least one token is left to compute, since
        its logits are needed; prompt log-probabilities need the whole prompt computed."""
        if not self.enable_prefix_caching or seq.params.prompt_logprobs is not None:
            return []
        seq.extend_block_hashes(self.block_size)
        found: list[int] = []
        for key in seq.block_hashes[: (seq.num_tokens - 1) // self.block_size]:
            block = self.pool.lookup(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_after(self, blocks: Iterable[int]) -> int:
        """Free blocks left once these, some of which may be free now, are shared."""
        return self.pool.num_free - sum(self.pool.ref_counts[block] == 0 for block in blocks)

    def share_prefix(self, seq: Sequence, blocks: list[int]) -> None:
        """Give `seq`, which has no blocks, the result of `find_prefix`."""
        assert not seq.block_table
        for block in blocks:
            self.pool.share(block)
        seq.block_table.extend(blocks)
        seq.num_computed_tokens = len(blocks) * self.block_size
        seq.num_registered_blocks = len(blocks)

    def grow(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Make room for the tokens up to `num_tokens`, the first of which to be written is `num_computed_tokens`.

        A shared block that would be written is copied first. Returns the changed entries (position in the table,
        block), or None when there are too few free blocks.
        """
        table = seq.block_table
        write_at = seq.num_computed_tokens // self.block_size
        copies = write_at < len(table) and self.pool.ref_counts[table[write_at]] > 1
        num_new = self.blocks_for(num_tokens) - len(table)
        changed: list[tuple[int, int]] = []
        if num_new <= 0 and not copies:
            return changed
        if max(num_new, 0) + copies > self.pool.num_free:
            return None
        if copies:
            fresh = self.pool.allocate()
            self.moves.copy.append((table[write_at], fresh))
            self.pool.release(table[write_at])
            table[write_at] = fresh
            changed.append((write_at, fresh))
        for _ in range(num_new):
            table.append(self.pool.allocate())
            changed.append((len(table) - 1, table[-1]))
        return changed

    def register_computed(self, seq: Sequence, num_computed: int) -> None:
        """Index the blocks of `seq` that have become full of computed tokens."""
        num_full = num_computed // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_registered_blocks:
            return
        seq.extend_block_hashes(self.block_size)
        for i in range(seq.num_registered_blocks, num_full):
            self.pool.register(seq.block_table[i], seq.block_hashes[i])
        seq.num_registered_blocks = num_full

    def share_all(self, fork: Sequence) -> None:
        """Count the references of a fork, whose table is a copy of its parent's."""
        for block in fork.block_table:
            self.pool.share(block)

    def release(self, seq: Sequence) -> None:
        """Give back all blocks of `seq`, on the device and on the host, its last ones to be evicted first."""
        for block in reversed(seq.block_table):
            self.pool.release(block)
        for block in seq.host_blocks:
            self.host_pool.release(block)
        seq.block_table.clear()
        seq.host_blocks.clear()
        seq.num_computed_tokens = seq.num_registered_blocks = 0

    def swap_out(self, seq: Sequence) -> bool:
        """Move the blocks of `seq` to the host. False if the host tier is too full."""
        if len(seq.block_table) > self.host_pool.num_free:
            return False
        for block in reversed(seq.block_table):
            host_block = self.host_pool.allocate()
            self.moves.swap_out.append((block, host_block))
            seq.host_blocks.append(host_block)
            self.pool.release(block)
        seq.host_blocks.reverse()
        seq.block_table.clear()
        seq.num_registered_blocks = 0
        return True

    def swap_in(self, seq: Sequence) -> bool:
        """Bring the blocks of `seq` back. False if the device has too few free blocks."""
        if len(seq.host_blocks) > self.pool.num_free:
            return False
        for host_block in seq.host_blocks:
            block = self.pool.allocate()
            self.moves.swap_in.append((host_block, block))
            seq.block_table.append(block)
        self._returning_host_blocks.extend(seq.host_blocks)
        seq.host_blocks.clear()
        return True

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that references and block tables agree, on the device and on the host."""
        references: dict[int, int] = {}
        host_references = dict.fromkeys(self._returning_host_blocks, 1)
        for seq in sequences:
            for block in seq.block_table:
                references[block] = references.get(block, 0) + 1
            for block in seq.host_blocks:
                host_references[block] = host_references.get(block, 0) + 1
            assert not (seq.block_table and seq.host_blocks), "a sequence is both on the device and on the host"
            assert len(seq.block_table) * self.block_size >= seq.num_computed_tokens or seq.host_blocks
        self.pool.check(references)
        self.host_pool.check(host_references)
