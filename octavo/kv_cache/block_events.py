"""Events of the prefix cache: which blocks entered it with which tokens, and which have left it.

A router that knows what each engine has cached sends a prompt to the engine that has most of it. The events have the
names and fields of vLLM's. Only the blocks of one group of layers are reported: a group that sees all tokens, if the
model has one. Prompts with media or a cache salt are left out, because a router cannot tell their blocks from the
tokens.
"""

from __future__ import annotations

import msgspec

from octavo.kv_cache.block_pool import BlockName, BlockPool
from octavo.sequence import Sequence

_MEDIUM = "GPU"  # the device's memory, by vLLM's name on every device


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other in a sequence have entered the prefix cache."""

    block_hashes: list[int]
    parent_block_hash: int | None  # hash of the block before them; None: they begin the sequence
    token_ids: list[int]  # block_size for each block
    block_size: int
    lora_id: int | None  # vLLM's old name of `lora_name`: not used
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None  # "full_attention" or "sliding_window"
    kv_cache_spec_sliding_window: int | None = None  # tokens


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks have left the prefix cache."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEvents:
    """Collects the events of one group's blocks in `pool`. It watches the pool for blocks that leave the index."""

    def __init__(self, pool: BlockPool, key_suffix: bytes, block_size: int, window: int) -> None:
        self._pool, self._key_suffix, self._block_size = pool, key_suffix, block_size
        self._window = window or None
        self._kind = "sliding_window" if window else "full_attention"
        self._stored: set[bytes] = set()  # keys of the blocks that subscribers know
        self._events: list[Event] = [AllBlocksCleared()]  # voids what subscribers know of an earlier engine
        pool.watchers.append(self)

    def entered(self, name: BlockName, block: int) -> None:
        """Do nothing: `add_stored` knows the tokens too."""

    def leaves(self, name: BlockName, block: int) -> None:
        _, key = name
        if key not in self._stored:
            return
        self._stored.remove(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(_block_hash(key))
        else:
            self._events.append(BlockRemoved([_block_hash(key)], _MEDIUM, 0))

    def add_stored(self, seq: Sequence, first: int, end: int) -> None:
        """Report the blocks first .. end of `seq` that are in the index and that subscribers do not know."""
        request = seq.request
        if request.prompt.media or request.prompt.cache_salt:
            return
        run: BlockStored | None = None
        for i in range(first, end):
            key = seq.block_hashes[i] + self._key_suffix
            if key in self._stored or self._pool.lookup(key) is None:
                run = None
                continue
            self._stored.add(key)
            if run is None:
                parent = _block_hash(seq.block_hashes[i - 1]) if i else None
                adapter = request.adapter.name if request.adapter is not None else None
                run = BlockStored([], parent, [], self._block_size, None, _MEDIUM, adapter, 0, self._kind, self._window)
                self._events.append(run)
            run.block_hashes.append(_block_hash(key))
            run.token_ids += seq.token_ids[i * self._block_size : (i + 1) * self._block_size]

    def clear(self) -> None:
        """Report that the prefix cache is empty, instead of the events that `take` has not returned yet."""
        self._stored.clear()
        self._events = [AllBlocksCleared()]

    def take(self) -> list[Event]:
        """Return the events since the last call, the oldest first."""
        events, self._events = self._events, []
        return events


def _block_hash(key: bytes) -> int:
    """Return a block's hash as vLLM publishes it: 64 bits."""
    return int.from_bytes(key[:8], "big")
