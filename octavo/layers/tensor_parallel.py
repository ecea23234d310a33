"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): the shard of a layer that one of several workers holds.

Matrices that read a layer's input are sharded by outputs, in whole heads. Matrices that end a layer are sharded by
inputs, so that each worker has a summand of every output. Every worker has the norms and the residual stream.

A layer's output is a sum of parts. The parts are cut at the same places for any number of workers and added in the
order of one tree; each worker has a branch of the tree. So the bits are the same for any number of workers (arXiv
2511.17826 does this within the kernels of GPUs)."""

from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of worker `rank` of `size`.

    A layer's output is the sum of `summands` equal parts over all workers. If each worker has just one part because
    `summands` is 1, bits depend on the number of workers. With `must_agree` such models are refused."""

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
        """Return this worker's range of `count` things. Raises `ConfigError` if workers cannot have equally many."""
        if count % self.size:
            sizes = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(
                f"--tensor-parallel-size {self.size} cannot share out {count} {what}; these sizes could: {sizes}."
            )
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def of_few(self, count: int, what: str) -> range:
        """Return this worker's range of `count` things; with fewer things than workers, several workers share a thing.
        Raises `ConfigError` if they cannot have equally many."""
        if count >= self.size or self.size % count:
            return self.of(count, what)
        own = self.rank * count // self.size
        return range(own, own + 1)

    def cut(self, count: int) -> range:
        """Return this worker's range of `count` things. Ranges are as equal as possible: the last workers may have
        fewer."""
        each = -(-count // self.size)
        return range(min(self.rank * each, count), min((self.rank + 1) * each, count))


WHOLE = Shard()


class ShardedHeads:
    """A description of a layer that is sharded by heads."""

    __slots__ = ()
    num_heads: int
    shard: Shard

    @property
    def units(self) -> int:
        """Return the number of units that are divided among workers."""
        return self.num_heads

    @property
    def own_heads(self) -> range:
        return self.shard.of(self.num_heads, "attention heads")


def elements(own: range, size: int) -> range:
    """Return the range of elements of the things `own`, of `size` elements each."""
    return range(own.start * size, own.stop * size)
