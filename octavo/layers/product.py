"""The last product of a layer, which is computed together with the addition to the residual stream.

This saves one pass over the activations. Without it layers would return `ops.linear(x, weight, "float32")` and blocks
would call `ops.add`, with equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from octavo.layers.tensor_parallel import WHOLE, Shard
from octavo.ops import Array, LinearWeight, Ops, ParallelOps


class Summand(Protocol):
    """A layer's output, before it is added to the residual stream."""

    def value(self, dtype: str = "float32") -> Array:
        """-> [T, H]"""

    def add_to(self, residual: Array, scale: float = 1.0) -> None:
        """residual [T, H] += scale * value, in place, rounded once."""


class Adapters(Protocol):
    """What a layer's adapters add to a reused layer's product."""

    def add_to(self, product: Array, x: Array) -> None:
        """product [T, N] += that of the product's input x [T, K]"""


@dataclass(frozen=True, slots=True)
class Product:
    """x [T, K] times a matrix [H, K], plus its bias."""

    ops: Ops
    x: Array
    weight: LinearWeight

    def value(self, dtype: str = "float32") -> Array:
        return self.ops.linear(self.x, self.weight, dtype)

    def add_to(self, residual: Array, scale: float = 1.0) -> None:
        self.ops.linear_add(self.x, self.weight, residual, scale)


@dataclass(frozen=True, slots=True)
class SharedProduct:
    """The sum of what each worker's x [T, K] times its matrix [H, K] is, in float32, plus the bias [H]."""

    ops: ParallelOps
    x: Array
    weight: LinearWeight
    bias: Array | None

    def value(self, dtype: str = "float32") -> Array:
        assert dtype == "float32"
        summand = self.ops.linear(self.x, self.weight, dtype)
        self.ops.all_reduce(summand, self.bias)
        return summand

    def add_to(self, residual: Array, scale: float = 1.0) -> None:
        self.ops.add(residual, self.value(), scale)


@dataclass(frozen=True, slots=True)
class EndingMatrix:
    """The matrix [H, K] that ends a layer, of which this worker has a share. Where there are several, the `bias` is
    added to what all add up."""

    ops: Ops
    weight: LinearWeight
    bias: Array | None = None
    shard: Shard = WHOLE

    def product(self, x: Array) -> Summand:
        """x [T, K] times the matrix."""
        if self.shard.is_whole:
            return Product(self.ops, x, self.weight)
        return SharedProduct(cast(ParallelOps, self.ops), x, self.weight, self.bias)
