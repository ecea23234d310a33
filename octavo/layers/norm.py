"""Norms over the last dimension: root mean square (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.layers.all_gather import AllGather
from octavo.layers.parameters import Parameters
from octavo.layers.tensor_parallel import WHOLE, Shard
from octavo.ops import Array, LinearWeight


@dataclass(frozen=True, slots=True)
class NormDescription:
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False  # of LayerNorm
    has_weight: bool = True
    offset: float = 0.0  # added to the weights: 1 where they are stored as their distance from 1


class Norm:
    """One norm, whose weights are [size] or, where `heads` have their own, [heads, size], of which `own_heads` may be
    the only ones that are wanted. With `groups` it is of as many equal parts of x [T, size].

    The checkpoint's module is `name`, or with "{head}" in it one for each head. `order` is that of the elements where
    it is not the checkpoint's. What the norm returns may be divided by a number, at no cost: its weights are. Weights
    that are computed with become float32.
    """

    def __init__(
        self,
        description: NormDescription,
        parameters: Parameters,
        name: str,
        size: int,
        *,
        heads: int | None = None,
        own_heads: range | None = None,
        groups: int = 1,
        divisor: float = 1.0,
        order: NDArray[np.intp] | None = None,
    ) -> None:
        assert description.kind == "layer" or not description.bias
        self._ops, self._kind, self._eps = parameters.ops, description.kind, description.eps
        self._groups = groups
        shape = (size,) if heads is None else (heads, size)

        def take(part: str, offset: float) -> Array:
            weights = parameters.weights
            if not description.has_weight:
                host = np.ones(shape, np.float32)
            elif heads is not None and "{head}" in name:
                host = np.stack([weights.take(f"{name.format(head=i)}.{part}", (size,)) for i in range(heads)])
            else:
                host = weights.take(f"{name}.{part}", shape)
            if description.offset or divisor != 1.0:  # weight and bias are of one type
                host = (host.astype(np.float32) + np.float32(offset)) / np.float32(divisor)
            if heads is not None and own_heads is not None:
                host = host[own_heads.start : own_heads.stop]
            host = host if order is None else np.take(host, order, -1)
            return self._ops.place(host if groups == 1 else host.reshape(groups, -1))

        self._weight = take("weight", description.offset)
        self._bias = take("bias", 0.0) if description.bias else None

    def forward(self, x: Array, consumer: LinearWeight | None = None) -> Array:
        """x [..., size] -> the same shape; quantized if the `consumer` multiplies quantized activations."""
        if self._groups > 1:
            assert self._kind == "rms"
            parts = x.reshape(x.shape[0], self._groups, -1)
            return self._ops.rms_norm(parts, self._weight, self._eps).reshape(x.shape[0], -1)
        if self._kind == "layer":
            return self._ops.layer_norm(x, self._weight, self._bias, self._eps, consumer)
        return self._ops.rms_norm(x, self._weight, self._eps, consumer)


class SharedNorm:
    """A norm over all `size` elements of a row, or over `groups` equal parts of them, of which each worker has its
    `own`: whole groups, or else all is brought to each of them, which computes all, so that its bits are those of one
    worker.

    It does not quantize where there are several, or bits have to be those of several: the whole row would be."""

    def __init__(
        self, description: NormDescription, parameters: Parameters, name: str, size: int, shard: Shard, own: range,
        *, groups: int = 1, order: NDArray[np.intp] | None = None,
    ) -> None:  # fmt: skip
        self._may_quantize, self._own = shard == WHOLE, slice(own.start, own.stop)
        self._all_gather: AllGather | None = None
        if groups % shard.size:
            self._all_gather = AllGather(parameters.ops, shard, own, size, f"elements of {name}")
        else:
            order = (np.arange(size) if order is None else order)[self._own]
            groups //= shard.size
        self._norm = Norm(description, parameters, name, size, groups=groups, order=order)

    def forward(self, x: Array, consumer: LinearWeight | None = None) -> Array:
        """x [T, own] -> the same shape; quantized as by `Norm`, or not."""
        if self._all_gather is not None:
            return self._norm.forward(self._all_gather.forward(x))[:, self._own]
        return self._norm.forward(x, consumer if self._may_quantize else None)
