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

        def take(part: str) -> Array:
            host = parameters.weights.take(f"{name}.{part}", (size,))
            if divisor is not None:
                host = np.asarray(host, np.float32) / np.float32(divisor)
            return self._ops.place(host)

        self._weight = take("weight")
        self._bias = take("bias") if description.bias else None

    def forward(self, x: Array, consumer: LinearWeight | None = None) -> Array:
        """x [..., size] -> the same shape; quantized if the `consumer` multiplies quantized activations."""
        if self._kind == "layer":
            return self._ops.layer_norm(x, self._weight, self._bias, self._eps, consumer)
        return self._ops.rms_norm(x, self._weight, self._eps, consumer)
