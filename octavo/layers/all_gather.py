"""All-gather: every worker gets all workers' parts of a row. Sharded layers that read whole rows, such as norms over
all heads, need it. Nothing is added up, so the bits are the same as with one worker."""

from typing import cast

from octavo.layers.tensor_parallel import Shard
from octavo.ops import Array, Ops, ParallelOps


class AllGather:
    """Gathers rows of `size` elements. This worker has the range `own` of them; ranges of workers may overlap."""

    def __init__(self, ops: Ops, shard: Shard, own: range, size: int, what: str) -> None:
        self._ops, self._is_whole, self._size = cast(ParallelOps, ops), shard.is_whole, size
        given = shard.of(size, what)  # the part that this worker contributes
        self._begin, self._given = given.start, slice(given.start - own.start, given.stop - own.start)

    def forward(self, x: Array) -> Array:
        """Return all workers' elements [T, size]; x [T, own]."""
        return x if self._is_whole else self._ops.all_gather(x[:, self._given], self._begin, self._size)
