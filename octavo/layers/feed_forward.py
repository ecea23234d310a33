"""Feed-forward layers: an activation between two matrices, or one that gates a third (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.errors import LoadError
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand, product
from octavo.layers.share import WHOLE, Share
from octavo.ops import ACTIVATIONS, Array


@dataclass(frozen=True, slots=True)
class FeedForwardDescription:
    """Names are those of the checkpoint's modules, after the layer's prefix. Raises `LoadError` for an activation that
    is not built."""

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None  # None: as `bias`
    gate_multiplier: float = 1.0
    inner_norm: NormDescription | None = None  # of what the second matrix gets
    up_names: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # gate and up, one if they are stacked; ungated: up
    down_name: str = "mlp.down_proj"
    inner_norm_name: str = ""
    up_first: bool = False  # stacked, up comes before gate
    is_transposed: bool = False  # matrices are stored [inputs, outputs]
    share: Share = WHOLE  # of the intermediate size

    def __post_init__(self) -> None:
        built = ACTIVATIONS if self.gated else (*ACTIVATIONS, "xielu")
        if self.activation not in built:
            kind = "gated" if self.gated else "ungated"
            raise LoadError(
                f"activation {self.activation!r} in a {kind} feed-forward is not built yet; Octavo has "
                f"{', '.join(built)}."
            )

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> FeedForward:
        return FeedForward(self, hidden_size, parameters, prefix)


class FeedForward:
    def __init__(
        self, description: FeedForwardDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        size, transposed, share = description.intermediate_size, description.is_transposed, description.share
        own = share.of(size, "inner elements of a feed-forward")
        names = [f"{prefix}{name}" for name in description.up_names]
        sizes = (size, size) if description.gated else (size,)
        self._up = parameters.linear(
            names, sizes, hidden_size, description.bias, description.gated, is_transposed=transposed,
            is_reversed=description.up_first,
            scales=(description.gate_multiplier, 1.0) if description.gated else (),
            own=None if share.is_whole else own,
        )  # fmt: skip
        self._down = parameters.ending(
            f"{prefix}{description.down_name}", hidden_size, len(own),
            description.bias if description.down_bias is None else description.down_bias, share,
            is_transposed=transposed,
        )  # fmt: skip
        self.consumer = self._up  # the only matrix that reads the layer's input
        self._inner_norm: Norm | None = None
        if description.inner_norm is not None:
            name = f"{prefix}{description.inner_norm_name}"
            self._inner_norm = Norm(description.inner_norm, parameters, name, size)
        self._parameters: tuple[float, ...] = ()
        if description.activation == "xielu":
            self._parameters = _xielu_parameters(parameters, f"{prefix}mlp.act_fn")

    def forward(self, hidden: Array) -> Summand:
        """hidden [T, H] -> [T, H]"""
        ops, activation = self._ops, self.description.activation
        consumer = self._down if self._inner_norm is None else None
        if self.description.gated:
            inner = ops.linear_silu_and_mul(hidden, self._up, consumer, self._dtype, activation)
        else:
            inner = ops.linear(hidden, self._up, self._dtype)
            inner = ops.activation(inner, activation, consumer, self._parameters)
        if self._inner_norm is not None:
            inner = self._inner_norm.forward(inner, self._down)
        return product(ops, inner, self._down, self.description.share)


def _xielu_parameters(parameters: Parameters, name: str) -> tuple[float, ...]:
    """Of x > 0: a x² + b x; of others: (e^min(x, eps) - 1 - x) c + b x (Huang & Schlag 2024)."""
    a, c, b, eps = (
        float(parameters.weights.take(f"{name}.{part}", shape).reshape(()))
        for part, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
    )
    return float(np.logaddexp(0.0, a)), b + float(np.logaddexp(0.0, c)), b, eps
