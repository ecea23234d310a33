"""The last product of a layer, which is computed together with the addition to the residual stream.

This saves one pass over the activations. A layer that returned `ops.linear(x, weight, "float32")`, and a block that
called `ops.add`, would give the same bits.
"""

from dataclasses import dataclass
from typing import Protocol, cast

from octavo.layers.tensor_parallel import WHOLE, Shard
from octavo.ops import Array, LinearWeight, Ops, ParallelOps


class Summand(Protocol):
    """A layer's output, before it is added to the residual stream."""

    def value(self, dtype: str = "float32") -> Array:
        """Return the output [T, H]."""

    def add_to(self, residual: Array, scale: float = 1.0) -> None:
        """Add scale * value to residual [T, H] in place, rounded once."""


class Adapters(Protocol):
    """The adapters of a layer for a product of the layer that it reuses."""

    def add_to(self, product: Array, x: Array) -> None:
        """Add the adapters' output for x [T, K], the product's input, to product [T, N] in place."""


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
    """The sum over all workers of x [T, K] times the worker's matrix [H, K], in float32, plus the bias [H]."""

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
    """This worker's share [H, K] of the matrix that ends a layer. With several workers the `bias` is added to their
    sum."""

    ops: Ops
    weight: LinearWeight
    bias: Array | None = None
    shard: Shard = WHOLE

    def product(self, x: Array) -> Summand:
        """Return x [T, K] times the matrix, as a summand."""
        if self.shard.is_whole:
            return Product(self.ops, x, self.weight)
        return SharedProduct(cast(ParallelOps, self.ops), x, self.weight, self.bias)
