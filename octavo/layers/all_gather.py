"""What each worker has a part of, brought to all of them: where a layer has to see all of a row though workers share it
out, as norms over all heads do. Nothing is added up, so that bits are those of one worker."""

from __future__ import annotations

from typing import cast

from octavo.layers.tensor_parallel import Shard
from octavo.ops import Array, Ops, ParallelOps


class AllGather:
    """Rows of `size` elements, of which this worker has its `own`. Others may have some of those too."""

    def __init__(self, ops: Ops, shard: Shard, own: range, size: int, what: str) -> None:
        self._ops, self._is_whole, self._size = cast(ParallelOps, ops), shard.is_whole, size
        given = shard.of(size, what)  # by this worker
        self._begin, self._given = given.start, slice(given.start - own.start, given.stop - own.start)

    def forward(self, x: Array) -> Array:
        """x [T, own] -> [T, size]"""
        return x if self._is_whole else self._ops.all_gather(x[:, self._given], self._begin, self._size)
