"""Copies whole KV blocks on a device, and between it and pinned host memory, in the order of `BlockMoves`.

A block has two pieces for each layer. On the way to the host they are gathered into a staging buffer on the device, in
a thousandth of the time that the bus takes. Then the block may be overwritten, and the copy to the host runs while
later steps compute. A step that reads swapped blocks waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.config import CacheConfig
from octavo.execution.device import Device, Event
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.ops import Array, LayerKVCache, Ops
from octavo.step_plan import BlockMoves

_STAGING_BYTES = 64 << 20  # of each of two staging buffers on the device: one or two milliseconds of the bus

Pairs = Sequence[tuple[int, int]]


def block_bytes(cache: LayerKVCache) -> int:
    """Return the bytes of a layer's block, keys and values."""
    return sum(int(part.nbytes) for part in cache.arrays) // cache.num_blocks


def staging_bytes(block_bytes: int, host_bytes: int) -> int:
    """Return the most device memory that a pool takes to move blocks to and from up to `host_bytes` of host memory: two
    staging buffers, and the blocks that are gathered for one of them."""
    return 3 * max(block_bytes, min(_STAGING_BYTES, host_bytes)) if block_bytes and host_bytes else 0


def layer_cache(config: CacheConfig, device: Device, ops: Ops, spec: LayerCacheSpec, num_blocks: int) -> LayerKVCache:
    """Allocate the memory of a layer's cache."""
    if spec.kind == "state":
        states = device.zeros([num_blocks, spec.num_bytes // 4], "float32")
        return LayerKVCache(states, states[:, :0])
    return ops.allocate_kv_cache(
        num_blocks, config.block_size, spec.num_kv_heads, spec.key_size, config.dtype, spec.value_size
    )


def _runs(host_blocks: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive host blocks together, as one copy takes the host as long for many as for one: their places in
    `host_blocks`, and their numbers."""
    begin = 0
    for end in range(1, len(host_blocks) + 1):
        if end == len(host_blocks) or host_blocks[end] != host_blocks[end - 1] + 1:
            yield slice(begin, end), slice(host_blocks[begin], host_blocks[begin] + end - begin)
            begin = end


class _StagingBuffer:
    """A staging buffer for blocks in one piece each: [num_blocks, block_bytes] uint8."""

    def __init__(self, blocks: Array) -> None:
        self.blocks = blocks
        self.free_event: Event | None = None


class _PoolMover:
    """The blocks of one pool, in `caches`, and its host blocks in pinned memory."""

    def __init__(self, ops: Ops, device: Device, caches: Sequence[LayerKVCache], num_host_blocks: int) -> None:
        self._ops, self._device, self._caches = ops, device, caches
        self._staging_buffers: list[_StagingBuffer] = []
        self._left: list[tuple[Callable[[Pairs], None], Pairs]] = []  # moves still to be made
        self.host_arrays: list[Any] = []  # memory of swapped blocks
        # Copies under way, in order: an event that is reached when they are done, and their host blocks.
        self._under_way = deque[tuple[Event, set[int]]]()
        if num_host_blocks and caches:  # a pipeline stage may have no layer in the pool
            num_bytes = sum(block_bytes(cache) for cache in caches)
            self._host = device.pinned([num_host_blocks, num_bytes], "uint8")
            self.host_arrays = [self._host]
            num_staged = max(1, min(num_host_blocks, _STAGING_BYTES // num_bytes))
            self._staging_buffers = [_StagingBuffer(device.zeros([num_staged, num_bytes], "uint8")) for _ in range(2)]

    def add(self, moves: BlockMoves) -> None:
        """Add moves to be made after those added before."""
        self._left += [(self._swap_out, pairs) for pairs in self._in_staging_parts(moves.swap_out)]
        if moves.copy and self._caches:
            self._left.append((self._copy, moves.copy))
        self._left += [(self._swap_in, pairs) for pairs in self._in_staging_parts(moves.swap_in)]

    def run(self) -> None:
        """Make the moves that are left, in smaller parts if the device lacks memory for a whole one. If it lacks memory
        for a single block, raise its error; the rest is then moved before the next step, because later steps rely on
        it."""
        while self._left:
            move, pairs = self._left[0]
            try:
                move(pairs)
            except self._device.memory_errors:
                self._device.release_memory()
                if len(pairs) == 1:
                    move(pairs)
                else:
                    half = len(pairs) // 2
                    self._left[:1] = [(move, pairs[:half]), (move, pairs[half:])]
                    continue
            del self._left[0]

    def is_settled(self, host_blocks: Sequence[int], waits: bool) -> bool:
        """Return whether no move of these host blocks is under way or left. With `waits`, wait for moves under way."""
        if self._left:
            return False
        self._drop_done()
        for done, copied in self._under_way:
            if not copied.isdisjoint(host_blocks):
                if not waits:
                    return False
                done.wait()
        return True

    def _note_copies(self, done: Event, host_blocks: set[int]) -> None:
        self._drop_done()
        self._under_way.append((done, host_blocks))

    def _drop_done(self) -> None:
        while self._under_way and self._under_way[0][0].is_reached:
            self._under_way.popleft()

    def settled_host_array(self, host_blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return the host memory, [num_host_blocks, block_bytes], once no move of these blocks is under way. Make the
        moves that are left before: raise the device's memory error if it still lacks memory for one."""
        self.run()
        self.is_settled(host_blocks, waits=True)
        found: list[NDArray[np.uint8]] = self.host_arrays or [np.empty((1 + max(host_blocks), 0), np.uint8)]
        return found[0]

    def _copy(self, pairs: Pairs) -> None:
        self._device.compute.run(lambda: self._ops.copy_blocks(pairs, self._caches))

    def _in_staging_parts(self, pairs: Pairs) -> Iterator[Pairs]:
        """Yield the pairs in parts that fit in a staging buffer."""
        if pairs and self._staging_buffers:
            size = len(self._staging_buffers[0].blocks)
            yield from (pairs[at : at + size] for at in range(0, len(pairs), size))

    def _next_staging_buffer(self) -> _StagingBuffer:
        staging = self._staging_buffers.pop(0)
        self._staging_buffers.append(staging)
        return staging

    def _swap_out(self, pairs: Pairs) -> None:
        device, staging = self._device, self._next_staging_buffer()
        compute, copies = device.compute, device.copies
        sources = np.array([source for source, _ in pairs])
        staged = staging.blocks[: len(pairs)]

        def gather() -> None:
            device.copy(self._ops.gather_blocks(sources, self._caches), staged)

        def download() -> None:
            for own, on_host in _runs([destination for _, destination in pairs]):
                device.copy(staged[own], self._host[on_host])

        if staging.free_event is not None:
            compute.wait(staging.free_event)
        compute.run(gather)
        copies.wait(compute.record())
        copies.run(download)
        staging.free_event = copies.record()
        self._note_copies(staging.free_event, {host_block for _, host_block in pairs})

    def _swap_in(self, pairs: Pairs) -> None:
        device, staging = self._device, self._next_staging_buffer()
        compute, copies = device.compute, device.copies
        destinations = np.array([destination for _, destination in pairs])
        staged = staging.blocks[: len(pairs)]

        def fill() -> None:
            for own, on_host in _runs([source for source, _ in pairs]):
                device.copy(self._host[on_host], staged[own])

        def scatter() -> None:
            self._ops.scatter_blocks(staged, destinations, self._caches)

        if staging.free_event is not None:
            copies.wait(staging.free_event)
        copies.run(fill)
        compute.wait(filled := copies.record())
        self._note_copies(filled, {host_block for host_block, _ in pairs})
        compute.run(scatter)
        staging.free_event = compute.record()

    def warm_up(self) -> None:
        """Copy the first block onto itself, so that the kernels are compiled."""
        self._device.compute.run(lambda: self._ops.copy_blocks([(0, 0)], self._caches))


class BlockMover:
    """The blocks of all pools. `caches` and the numbers of host blocks are by pool."""

    def __init__(
        self, ops: Ops, device: Device, caches: Sequence[Sequence[LayerKVCache]], num_host_blocks: Sequence[int]
    ) -> None:
        self._pools = [_PoolMover(ops, device, *of_pool) for of_pool in zip(caches, num_host_blocks, strict=True)]

    @property
    def host_arrays(self) -> list[Any]:
        """The pinned memory of swapped blocks."""
        return [array for pool in self._pools for array in pool.host_arrays]

    def move(self, moves: Sequence[BlockMoves]) -> None:
        """Append the moves, by pool, to the device's streams: before everything submitted later. If the device lacks
        memory, raise its error; the next call, before anything else is submitted, makes the moves that are left."""
        for pool, of_pool in zip(self._pools, moves, strict=False):
            pool.add(of_pool)
        for pool in self._pools:
            pool.run()

    def is_settled(self, pool: int, host_blocks: Sequence[int], waits: bool) -> bool:
        """Return whether no move of host blocks is under way, or left for lack of memory. With `waits`, wait for moves
        under way."""
        return self._pools[pool].is_settled(host_blocks, waits)

    def read_host_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of host blocks, [len(blocks), block bytes], after the moves under way."""
        return self._pools[pool].settled_host_array(blocks)[list(blocks)]

    def write_host_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> None:
        """Overwrite host blocks, after the moves under way."""
        self._pools[pool].settled_host_array(blocks)[list(blocks)] = contents

    def warm_up(self) -> None:
        """Launch the kernels that move blocks."""
        for pool in self._pools:
            pool.warm_up()
