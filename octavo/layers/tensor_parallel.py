"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): which share of a layer one of several workers holds.

Matrices that read a layer's input are shared out by their outputs, whole heads together; those that end it by their
inputs, so that each worker has a summand of every output. Norms and the residual stream are everybody's.

Those outputs are sums of parts of the inputs that are cut at the same places for any number of workers, and are added
up in the order of one tree, of which each worker has a branch: so they have the same bits for any number
(arXiv 2511.17826 does so within the kernels of GPUs).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Worker `rank` of `size`; by default there is only one. What ends a layer is the sum of `summands` equal parts,
    those of all workers; with one a worker they are not those of another number of workers. With `must_agree` what
    would differ from those is refused."""

    rank: int = 0
    size: int = 1
    summands: int = 1
    must_agree: bool = False

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def own_summands(self) -> int:
        return max(1, self.summands // self.size)

    def of(self, count: int, what: str) -> range:
        """This worker's of `count` things of which all workers have equally many. Raises `ConfigError` if there are
        not."""
        if count % self.size:
            sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(
                f"--tensor-parallel-size {self.size} cannot share out {count} {what}; these sizes could: {sizes}."
            )
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def of_few(self, count: int, what: str) -> range:
        """The same, but where there are fewer things than workers, several have each. Raises `ConfigError`."""
        if count >= self.size or self.size % count:
            return self.of(count, what)
        own = self.rank * count // self.size
        return range(own, own + 1)

    def cut(self, count: int) -> range:
        """This worker's of `count` things, as equally as can be: the last may have fewer."""
        each = -(-count // self.size)
        return range(min(self.rank * each, count), min((self.rank + 1) * each, count))


WHOLE = Shard()


class ShardedHeads:
    """A description of a layer whose heads workers share out."""

    __slots__ = ()
    num_heads: int
    shard: Shard

    @property
    def units(self) -> int:
        """What workers share out."""
        return self.num_heads

    @property
    def own_heads(self) -> range:
        return self.shard.of(self.num_heads, "attention heads")


def elements(own: range, size: int) -> range:
    """Those of things of `size` elements each."""
    return range(own.start * size, own.stop * size)
