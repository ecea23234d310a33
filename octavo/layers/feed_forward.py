"""Feed-forward layers: an activation between two matrices, or one that gates a third (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import LoadError
from octavo.layers.parameters import Parameters
from octavo.layers.product import Product
from octavo.ops import ACTIVATIONS, Array


@dataclass(frozen=True, slots=True)
class FeedForwardDescription:
    """Names are those of the checkpoint's modules, after the layer's prefix. Raises `LoadError` for an activation that
    is not built."""

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    up_names: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # gate and up, one if they are stacked; ungated: up
    down_name: str = "mlp.down_proj"

    def __post_init__(self) -> None:
        built = ("silu",) if self.gated else ACTIVATIONS
        if self.activation not in built:
            kind = "gated" if self.gated else "ungated"
            raise LoadError(
                f"activation {self.activation!r} in a {kind} feed-forward is not built yet; Octavo has "
                f"{', '.join(built)}."
            )


class FeedForward:
    def __init__(
        self, description: FeedForwardDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        size = description.intermediate_size
        names = [f"{prefix}{name}" for name in description.up_names]
        sizes = (size, size) if description.gated else (size,)
        self.up = parameters.linear(names, sizes, hidden_size, description.bias, description.gated)
        self._down = parameters.linear([f"{prefix}{description.down_name}"], [hidden_size], size, description.bias)

    def forward(self, hidden: Array) -> Product:
        """hidden [T, H] -> [T, H]"""
        ops = self._ops
        if self.description.gated:
            inner = ops.linear_silu_and_mul(hidden, self.up, self._down)
        else:
            inner = ops.activation(ops.linear(hidden, self.up, self._dtype), self.description.activation, self._down)
        return Product(ops, inner, self._down)
