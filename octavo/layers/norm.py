"""Norms over the last dimension: root mean square (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.layers.parameters import Parameters
from octavo.ops import Array, LinearWeight


@dataclass(frozen=True, slots=True)
class NormDescription:
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False  # of LayerNorm


class Norm:
    """One norm. What it returns may be divided by a number, at no cost: its weights are. They are float32 then."""

    def __init__(
        self, description: NormDescription, parameters: Parameters, name: str, size: int, divisor: float | None = None
    ) -> None:
        assert description.kind == "layer" or not description.bias
        self._ops, self._kind, self._eps = parameters.ops, description.kind, description.eps
        weights = [
            parameters.weights.take(f"{name}.{part}", (size,))
            for part in (("weight", "bias") if description.bias else ("weight",))
        ]
        if divisor is not None:
            weights = [np.asarray(weight, np.float32) / np.float32(divisor) for weight in weights]
        self._weight, self._bias, *_ = [*map(self._ops.place, weights), None]

    def forward(self, x: Array, consumer: LinearWeight | None = None) -> Array:
        """x [..., size] -> the same shape; quantized if the `consumer` multiplies quantized activations."""
        assert self._weight is not None
        if self._kind == "layer":
            return self._ops.layer_norm(x, self._weight, self._bias, self._eps, consumer)
        return self._ops.rms_norm(x, self._weight, self._eps, consumer)
