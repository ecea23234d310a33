"""Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): which share of a layer one of several workers holds.

Matrices that read a layer's input are shared out by their outputs, whole heads together; those that end it by their
inputs, so that each worker has a summand of every output. Norms and the residual stream are everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """Worker `rank` of `size`; by default there is only one."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Of what must be added once, the share that adds it."""
        return self.rank == 0

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


WHOLE = Share()
