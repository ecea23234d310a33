"""Norms over the last dimension: root mean square (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

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
    bias: bool = False  # whether a LayerNorm has a bias
    has_weight: bool = True
    offset: float = 0.0  # added to the weights: 1 if the checkpoint stores weights minus 1


class Norm:
    """A norm with weights [size], or, if `heads` have weights of their own, [heads, size] or those of `own_heads`. With
    `groups`, each of so many equal parts of x [T, size] is normed by itself.

    The checkpoint's module is `name`; a `name` with "{head}" stands for a module for each head. `order` is the order of
    elements, if it is not the checkpoint's. The `divisor` divides the norm's output at no cost, because the weights are
    divided. Weights that an offset or a divisor changes become float32.
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
            if description.offset or divisor != 1.0:  # for the bias too: weight and bias must have the same type
                host = (host.astype(np.float32) + np.float32(offset)) / np.float32(divisor)
            if heads is not None and own_heads is not None:
                host = host[own_heads.start : own_heads.stop]
            host = host if order is None else np.take(host, order, -1)
            return self._ops.place(host if groups == 1 else host.reshape(groups, -1))

        self._weight = take("weight", description.offset)
        self._bias = take("bias", 0.0) if description.bias else None

    def forward(self, x: Array, consumer: LinearWeight | None = None) -> Array:
        """Return the norm of x [..., size], in the same shape; quantized if the `consumer` multiplies quantized
        activations."""
        if self._groups > 1:
            assert self._kind == "rms"
            parts = x.reshape(x.shape[0], self._groups, -1)
            return self._ops.rms_norm(parts, self._weight, self._eps).reshape(x.shape[0], -1)
        if self._kind == "layer":
            return self._ops.layer_norm(x, self._weight, self._bias, self._eps, consumer)
        return self._ops.rms_norm(x, self._weight, self._eps, consumer)


class SharedNorm:
    """A norm over all `size` elements of a row, or over `groups` equal parts of it, when each worker has its `own`
    elements.

    If workers do not have whole groups, each gathers the whole row and computes the norm of all elements, so the bits
    are the same as with one worker. The norm does not quantize if there are several workers, or if the bits must be
    those of several workers: with one worker the whole row would be quantized."""

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
        """Return the norm of x [T, own], in the same shape; only a whole model quantizes it as `Norm` does."""
        if self._all_gather is not None:
            return self._norm.forward(self._all_gather.forward(x))[:, self._own]
        return self._norm.forward(x, consumer if self._may_quantize else None)


def apply_norm(norm: Norm | None, x: Array, consumer: LinearWeight | None = None) -> Array:
    """Return the norm of x, or x itself if there is no norm."""
    return x if norm is None else norm.forward(x, consumer)


def norm_quantizes(norm: Norm | None, consumer: LinearWeight | None) -> bool:
    """Return whether a norm quantizes its result for `consumer`, so that its input may be float32."""
    return norm is not None and consumer is not None and consumer.takes_float32
