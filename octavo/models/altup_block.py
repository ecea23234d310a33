"""A layer of a model with several residual streams: `octavo.layers.altup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.layers.altup import AltUpDescription
from octavo.layers.in_place import scale_in_place
from octavo.layers.norm import Norm
from octavo.layers.parameters import Parameters
from octavo.loading.weights import floats
from octavo.models.block import BlockLike, TablesAndCache
from octavo.models.description import LayerDescription
from octavo.ops import Array, LinearWeight
from octavo.step_batch import StepBatch


class AltUpBlock(BlockLike):
    """A layer with norms around attention and feed-forward."""

    accepts_float32_residual = False

    def __init__(
        self, streams: AltUpDescription, layer: LayerDescription, hidden_size: int, parameters: Parameters,
        prefix: str,
    ) -> None:  # fmt: skip
        assert layer.attention is not None and layer.feed_forward is not None
        self._ops, self._dtype = parameters.ops, parameters.dtype
        self._count, self._size = streams.count, hidden_size

        def norm(name: str | None, divisor: float = 1.0) -> Norm:
            return Norm(layer.norm, parameters, f"{prefix}{name}", hidden_size, divisor=divisor)

        def linear(name: str, num_out: int, num_in: int) -> LinearWeight:
            return parameters.linear([f"{prefix}{name}"], [num_out], num_in)

        self._attention = layer.attention.build(hidden_size, parameters, prefix)
        self._feed_forward = layer.feed_forward.build(hidden_size, parameters, prefix)
        self._attention_norm, self._attention_post_norm = norm(layer.attention_norm), norm(layer.attention_post_norm)
        self._feed_forward_norm = norm(layer.feed_forward_norm)
        self._feed_forward_post_norm = norm(layer.feed_forward_post_norm)
        rank, count = streams.branch_rank, streams.count
        self._branch_in = linear("laurel.linear_left", rank, hidden_size)
        self._branch_out = linear("laurel.linear_right", hidden_size, rank)
        self._branch_norm = norm("laurel.post_laurel_norm")
        self._router_norm = norm("altup.router_norm", divisor=hidden_size)
        self._router = linear("altup.modality_router", count, hidden_size)
        # Coefficients are sorted by shift: row shift * count + i multiplies stream (i + shift) % count in the sum of
        # stream i. A stream's coefficient for itself (shift 0) is stored as its difference from 1.
        order = np.array([count * i + (i + shift) % count for shift in range(count) for i in range(count)])
        self._prediction = self._coefficients(parameters, f"{prefix}altup.prediction_coefs", order)
        self._correction = self._coefficients(parameters, f"{prefix}altup.correction_coefs", np.arange(count))

    def _coefficients(self, parameters: Parameters, name: str, order: Any) -> LinearWeight:
        """Return a matrix from [T, streams] to [T, len(order)] coefficients. The first `streams` coefficients are
        stored as differences from 1, so the matrix gets a bias of 1 for them."""
        matrix = parameters.weights.take(f"{name}.weight", (len(order), self._count))
        bias = (np.arange(len(order)) < self._count).astype(parameters.dtype)
        return self._ops.pack_linear([floats(np.ascontiguousarray(matrix[order]))], bias)

    def forward(
        self, residual: Array, batch: StepBatch, caches: Sequence[TablesAndCache], padded_embedding: Array | None = None
    ) -> tuple[Array, None]:
        """Return the residual streams [T, streams * H] after this layer."""
        ops, size = self._ops, self._size
        streams = self._predicted(residual)
        first = streams[:, :size]
        hidden = self._attention_norm.forward(first)
        branch = ops.linear(ops.linear(hidden, self._branch_in, self._dtype), self._branch_out, self._dtype)
        x = self._branch_norm.forward(branch)
        attended = self._attention.forward(hidden, batch, *caches[0])
        for summand in (hidden, first, self._attention_post_norm.forward(attended.value())):
            ops.add(x, summand)
        scale_in_place(ops, x, 0.5**0.5)
        fed = self._feed_forward.forward(self._feed_forward_norm.forward(x, self._feed_forward.consumer))
        ops.add(x, self._feed_forward_post_norm.forward(fed.value()))
        coefficients = ops.linear(self._modalities(x), self._correction, self._dtype)
        ops.add(x, first, -1.0)
        for i in range(self._count):
            ops.add(streams[:, i * size : (i + 1) * size], ops.multiply(x, coefficients[:, i : i + 1]))
        return streams, None

    def _modalities(self, x: Array) -> Array:
        """Return the router's output for x [T, H]: [T, streams], between -1 and 1."""
        routed = self._ops.linear(self._router_norm.forward(x), self._router, self._dtype)
        return self._ops.activation(routed, "softcap", parameters=(1.0,))

    def _predicted(self, streams: Array) -> Array:
        """Return streams [T, streams * H], each of them a weighted sum of all given streams."""
        ops, size, count = self._ops, self._size, self._count
        coefficients = ops.linear(self._modalities(streams[:, :size]), self._prediction, self._dtype)
        predicted = ops.multiply(streams, coefficients[:, :count])
        for shift in range(1, count):
            cut, of_shift = count - shift, coefficients[:, shift * count : (shift + 1) * count]
            ops.add(predicted[:, : cut * size], ops.multiply(streams[:, shift * size :], of_shift[:, :cut]))
            ops.add(predicted[:, cut * size :], ops.multiply(streams[:, : shift * size], of_shift[:, cut:]))
        return predicted
