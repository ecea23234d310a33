"""Moves whole KV blocks on a device, and between it and pinned host memory, in the order that `BlockMoves` asks for.

A block lies in as many pieces as there are layers, twice. To the host it goes through a stage on the device where it is
in one piece: gathering there takes a thousandth of the time of the way over the bus, so that the blocks can be
overwritten at once and the long way is gone beside the steps that follow. Blocks that come back are awaited by the
step that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from octavo.config import CacheConfig
from octavo.execution.device import Device, Event
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.ops import Array, LayerKVCache, Ops
from octavo.plan import BlockMoves

_STAGE_BYTES = 64 << 20  # of the device, twice: a millisecond or two of the bus's time

Pairs = Sequence[tuple[int, int]]


def block_bytes(cache: LayerKVCache) -> int:
    """Bytes of one block of a layer, keys and values."""
    return sum(int(part.nbytes) for part in cache.arrays) // cache.num_blocks


def layer_cache(config: CacheConfig, device: Device, ops: Ops, spec: LayerCacheSpec, num_blocks: int) -> LayerKVCache:
    """Memory for what a layer keeps."""
    if spec.kind == "state":
        states = device.zeros([num_blocks, spec.num_bytes // 4], "float32")
        return LayerKVCache(states, states[:, :0])
    return ops.allocate_kv_cache(
        num_blocks, config.block_size, spec.num_kv_heads, spec.key_size, config.dtype, spec.value_size
    )


class _StagingBuffer:
    """Room for some blocks in one piece each: [blocks, bytes of a block] uint8."""

    def __init__(self, blocks: Array) -> None:
        self.blocks = blocks
        self.is_free: Event | None = None


class _PoolMover:
    """The blocks of one pool, which lie in `caches`, and as many of pinned memory behind them as there are."""

    def __init__(self, ops: Ops, device: Device, caches: Sequence[LayerKVCache], num_host_blocks: int) -> None:
        self._ops, self._device, self._caches = ops, device, caches
        self._staging_buffers: list[_StagingBuffer] = []
        self.host_arrays: list[Any] = []  # that hold swapped blocks
        if num_host_blocks and caches:  # a stage may have no layer that uses a pool
            num_bytes = sum(block_bytes(cache) for cache in caches)
            self._host = device.pinned([num_host_blocks, num_bytes], "uint8")
            self.host_arrays = [self._host]
            num_staged = max(1, min(num_host_blocks, _STAGE_BYTES // num_bytes))
            self._staging_buffers = [_StagingBuffer(device.zeros([num_staged, num_bytes], "uint8")) for _ in range(2)]

    def move(self, moves: BlockMoves) -> None:
        for pairs in self._staged(moves.swap_out):
            self._swap_out(pairs)
        if moves.copy and self._caches:
            self._device.compute.run(lambda: self._ops.copy_blocks(moves.copy, self._caches))
        for pairs in self._staged(moves.swap_in):
            self._swap_in(pairs)

    def _staged(self, pairs: Pairs) -> Iterator[Pairs]:
        """As many at a time as a stage holds."""
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
            for i, (_, destination) in enumerate(pairs):
                device.copy(staged[i], self._host[destination])

        if staging.is_free is not None:
            compute.wait(staging.is_free)
        compute.run(gather)
        copies.wait(compute.record())
        copies.run(download)
        staging.is_free = copies.record()

    def _swap_in(self, pairs: Pairs) -> None:
        device, staging = self._device, self._next_staging_buffer()
        compute, copies = device.compute, device.copies
        destinations = np.array([destination for _, destination in pairs])
        staged = staging.blocks[: len(pairs)]

        def fill() -> None:
            for i, (source, _) in enumerate(pairs):
                device.copy(self._host[source], staged[i])

        def scatter() -> None:
            self._ops.scatter_blocks(staged, destinations, self._caches)

        if staging.is_free is not None:
            copies.wait(staging.is_free)
        copies.run(fill)
        compute.wait(copies.record())
        compute.run(scatter)
        staging.is_free = compute.record()

    def warm_up(self) -> None:
        """A copy of the first block onto itself."""
        self._device.compute.run(lambda: self._ops.copy_blocks([(0, 0)], self._caches))


class BlockMover:
    """The blocks of all pools: `caches` and the number of host blocks, by pool."""

    def __init__(
        self, ops: Ops, device: Device, caches: Sequence[Sequence[LayerKVCache]], num_host_blocks: Sequence[int]
    ) -> None:
        self._pools = [_PoolMover(ops, device, *of_pool) for of_pool in zip(caches, num_host_blocks, strict=True)]

    @property
    def host_arrays(self) -> list[Any]:
        """The host's memory for swapped blocks."""
        return [array for pool in self._pools for array in pool.host_arrays]

    def move(self, moves: Sequence[BlockMoves]) -> None:
        """Have the device move blocks, by pool, before anything that it is given later."""
        for pool, of_pool in zip(self._pools, moves, strict=False):
            pool.move(of_pool)

    def warm_up(self) -> None:
        """Have the device launch what it moves blocks with."""
        for pool in self._pools:
            pool.warm_up()
