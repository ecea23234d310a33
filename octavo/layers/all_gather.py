"""All-gather: brings each worker's part of a row to all workers, for layers that read whole rows though they are
sharded, such as norms over all heads. Nothing is added, so the bits are those of one worker."""

from __future__ import annotations

from typing import cast

from octavo.layers.tensor_parallel import Shard
from octavo.ops import Array, Ops, ParallelOps


class AllGather:
    """Gathers rows of `size` elements, of which this worker has the range `own`. Ranges of workers may overlap."""

    def __init__(self, ops: Ops, shard: Shard, own: range, size: int, what: str) -> None:
        self._ops, self._is_whole, self._size = cast(ParallelOps, ops), shard.is_whole, size
        given = shard.of(size, what)  # by this worker
        self._begin, self._given = given.start, slice(given.start - own.start, given.stop - own.start)

    def forward(self, x: Array) -> Array:
        """x [T, own] -> [T, size]"""
        return x if self._is_whole else self._ops.all_gather(x[:, self._given], self._begin, self._size)
