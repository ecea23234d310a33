"""Which slots of the cache's blocks a draft model has filled.

A block holds the keys of the model and, behind them, those of its draft model. The draft model may lag: it computes
nothing while no draft tokens are wanted. Blocks are shared, copied, found in the prefix cache and swapped without it,
so its gaps are known by block, not by sequence."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.groups import NULL_BLOCK
from octavo.step_plan import BlockMoves

Blocks = NDArray[np.int32]  # the beginning of a block table


class FilledSlots:
    """Counts, for each block of a pool on the device and on the host, how many of its first slots the draft has
    filled."""

    def __init__(
        self, num_blocks: int, num_host_blocks: int, block_size: int, has_null_block: bool, saves_host_blocks: bool
    ) -> None:
        """`saves_host_blocks`: the blocks that are saved, of `counts` and `restore`, are on the host."""
        self._counts = np.zeros(num_blocks, np.int32)
        self._host_counts = np.zeros(num_host_blocks, np.int32)
        self._saved_counts = self._host_counts if saves_host_blocks else self._counts
        self._block_size = block_size
        self._has_null_block = has_null_block

    def counts(self, blocks: Sequence[int]) -> NDArray[np.int32]:
        """Return how many slots of each of the blocks are filled."""
        return self._saved_counts[list(blocks)]

    def restore(self, blocks: Sequence[int], counts: NDArray[np.int32]) -> None:
        """Note that blocks were overwritten, and that each now has its number of `counts` of filled slots."""
        self._saved_counts[list(blocks)] = counts

    def move(self, moves: BlockMoves) -> None:
        """Note that blocks are moved, in the order of `BlockMoves`."""
        for source, target in moves.swap_out:
            self._host_counts[target] = self._counts[source]
        for source, target in moves.copy:
            self._counts[target] = self._counts[source]
        for source, target in moves.swap_in:
            self._counts[target] = self._host_counts[source]

    def overwrite(self, blocks: Blocks, begin: int, end: int) -> None:
        """Note that a sequence's tokens begin .. end are new: the draft has not computed them."""
        first, offset = divmod(begin, self._block_size)
        self._counts[blocks[first]] = min(int(self._counts[blocks[first]]), offset)
        if end > (first + 1) * self._block_size:
            self._counts[blocks[first + 1 : -(-end // self._block_size)]] = 0

    def fill(self, blocks: Blocks, begin: int, end: int) -> None:
        """Note that the draft has computed a sequence's tokens begin .. end; tokens before `begin` were computed
        earlier."""
        first, last = begin // self._block_size, end // self._block_size
        self._counts[blocks[first:last]] = self._block_size
        if offset := end % self._block_size:
            self._counts[blocks[last]] = max(int(self._counts[blocks[last]]), offset)

    def num_filled(self, blocks: Blocks, num_tokens: int) -> int:
        """Return how many of a sequence's first `num_tokens` tokens the draft has computed without a gap."""
        used = blocks[: -(-num_tokens // self._block_size)]
        counts = self._counts[used]
        if self._has_null_block:  # released blocks of a window are not read again
            counts = np.where(used == NULL_BLOCK, self._block_size, counts)
        lacking = np.flatnonzero(counts < self._block_size)
        if not len(lacking):
            return num_tokens
        first = int(lacking[0])
        return min(num_tokens, first * self._block_size + int(counts[first]))
