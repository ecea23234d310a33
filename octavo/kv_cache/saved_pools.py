"""The pools whose blocks are saved on disk, and the prefixes that they and the folder have."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import BlockFiles
from octavo.kv_cache.block_pool import BlockName, BlockPool
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.step_plan import BlockMoves


class BlockMemory(Protocol):
    """The memory of the blocks: the host's."""

    block_bytes: Sequence[int]  # of a block, by pool

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of the contents of blocks, [len(blocks), block_bytes[pool]]."""
        ...

    def wait_for_workers(self) -> bool:
        """Wait for the workers, so that `read_blocks` then only copies. Returns whether this delays the next step."""
        ...

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> bool:
        """Overwrite blocks with `contents`, [len(blocks), block_bytes[pool]]. Returns False, and changes nothing, while
        a step in flight uses them."""
        ...

    def move_blocks(self, moves: Sequence[BlockMoves]) -> None:
        """Move blocks, by pool, between a device and its host."""
        ...

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether no move of blocks is under way, or left for lack of memory. With `waits`, wait for moves under
        way."""
        ...


class _Keys(Container[bytes]):
    """The keys of the blocks that are in one pool, or for which `has` returns True."""

    def __init__(self, pool: BlockPool, has: Callable[[BlockName], bool]) -> None:
        self._pool, self._has = pool, has

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        return key in self._pool or self._has((self._pool.number, key))


class SavedPools:
    """The pools of the host's memory: those of `cache`, or with a `host_tier` its host pools. This object changes
    nothing. Any thread may call the methods up to `is_in_memory`."""

    def __init__(
        self, files: BlockFiles, memory: BlockMemory, cache: KVCacheManager, host_tier: HostTier | None
    ) -> None:
        self.files, self.memory, self.cache, self.host_tier = files, memory, cache, host_tier
        self.pools = cache.pools if host_tier is None else cache.host_pools

    def num_prefix_blocks(self, keys: list[bytes], limit: int, has: Callable[[BlockName], bool]) -> int:
        """Return the longest prefix, in blocks up to `limit`, of which each block is in the pools, or `has` returns
        True for it."""
        return self.cache.num_prefix_blocks(keys, limit, [_Keys(pool, has) for pool in self.pools])

    def num_known_blocks(self, keys: list[bytes], limit: int) -> int:
        """Return the longest prefix, in blocks up to `limit`, that pools and folder have together."""
        return self.num_prefix_blocks(keys, limit, self.files.knows)

    def known_names(self, keys: list[bytes], limit: int) -> list[BlockName]:
        """Return the names of the blocks of the prefix of `num_known_blocks`."""
        return self.cache.prefix_names(keys, self.num_known_blocks(keys, limit))

    def num_bytes(self, names: Sequence[BlockName]) -> int:
        return sum(self.memory.block_bytes[pool] for pool, _ in names)

    def lookup(self, name: BlockName) -> int | None:
        """Return the block of a pool; None if the pool lacks it."""
        pool, key = name
        return self.pools[pool].lookup(key)

    def is_in_memory(self, name: BlockName) -> bool:
        """Return whether a block is in its pool, on the device or on the host."""
        pool, key = name
        return key in self.cache.pools[pool] or key in self.pools[pool]

    def may_read(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether blocks can be read now: on GPUs, whether no copy to them is planned or under way. With
        `waits`, wait for copies under way."""
        if self.host_tier is None:
            return True
        is_planned = not self.cache.host_blocks_written_later[pool].isdisjoint(blocks)
        return not is_planned and self.memory.is_settled(pool, blocks, waits)

    def may_overwrite(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether blocks can be overwritten now. Not if a copy of the plan that is being made still reads them:
        they may have been a sequence's until now. `waits`: as in `may_read`."""
        if self.host_tier is None and self.cache.is_read_later(pool, blocks):
            return False
        return self.may_read(pool, blocks, waits)
