"""Per-layer embeddings (Gemma Team 2025): a second, narrow embedding with a part for each layer. After the layer's
feed-forward, this part times a gate, which reads the residual stream, is added to the residual stream."""

from dataclasses import dataclass

import numpy as np

from octavo.layers.embedding import Embedding
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.tensor_parallel import Shard
from octavo.ops import Array, LinearWeight


@dataclass(frozen=True, slots=True)
class PerLayerEmbeddingsDescription:
    """The description of per-layer embeddings. Sizes are in elements."""

    vocab_size: int
    size: int  # size of a layer's part
    activation: str
    norm: NormDescription
    num_streams: int = 1  # residual streams, side by side: the gate reads the first; the others are added to
    input_scale: str | None = None  # tensor [H], after a layer's prefix: a factor of the gate's input


class PerLayerEmbeddings:
    """The per-layer embedding of `layers`, this stage's part of the model's `num_layers`, and each layer's gate and
    output matrix."""

    def __init__(
        self,
        description: PerLayerEmbeddingsDescription,
        layers: range,
        num_layers: int,
        hidden_size: int,
        parameters: Parameters,
        layer_prefix: str,
        shard: Shard,
    ) -> None:
        self._description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        size, norm = description.size, description.norm
        width, own = num_layers * size, range(layers.start * size, layers.stop * size)
        self._first = layers.start
        self._embedding = Embedding(
            "model.embed_tokens_per_layer", description.vocab_size, width, parameters, shard, columns=own
        )
        self._projection = parameters.linear(
            ["model.per_layer_model_projection"], [width], hidden_size, own=None if len(layers) == num_layers else own
        )
        # A layer's part is (looked-up row + projection of the first embedding) / sqrt(2). The model divides the
        # projection by sqrt(H) before a norm; the norm cancels that, except for its epsilon, which is scaled instead.
        scaled = NormDescription(norm.eps * hidden_size, norm.kind, offset=norm.offset)
        self._projection_norm = Norm(scaled, parameters, "model.per_layer_projection_norm", size, divisor=2**0.5)
        self._scale = (size / 2) ** 0.5
        prefixes = [f"{layer_prefix}{i}." for i in layers]
        self._gates = [self._gate(parameters, hidden_size, prefix) for prefix in prefixes]
        self._outputs = [parameters.linear([f"{p}per_layer_projection"], [hidden_size], size) for p in prefixes]
        self._norms = [Norm(norm, parameters, f"{p}post_per_layer_input_norm", hidden_size) for p in prefixes]

    def _gate(self, parameters: Parameters, hidden_size: int, prefix: str) -> LinearWeight:
        name, size = f"{prefix}per_layer_input_gate", self._description.size
        if self._description.input_scale is None:
            return parameters.linear([name], [size], hidden_size)
        scale = parameters.weights.take(f"{prefix}{self._description.input_scale}", (hidden_size,))
        matrix = parameters.weights.take(f"{name}.weight", (size, hidden_size))
        return parameters.packed((matrix.astype(np.float32) * scale).astype(matrix.dtype))

    def embed(self, token_ids: Array, embedded: Array) -> Array:
        """Return all layers' parts [T, layers * size] of token_ids [T] int32; embedded [T, H] is the input of the
        model's first layer."""
        ops = self._ops
        found = self._embedding.forward(token_ids, self._dtype, self._scale)
        projected = ops.linear(embedded, self._projection, self._dtype)
        parts = projected.reshape(projected.shape[0], -1, self._description.size)
        ops.add(found, self._projection_norm.forward(parts).reshape(found.shape[0], -1))
        return found

    def add_to(self, residual: Array, layer: int, inputs: Array) -> None:
        """Add the layer's gated part of `inputs` to the residual stream [T, streams * H] in place."""
        ops, size, num_streams = self._ops, self._description.size, self._description.num_streams
        layer -= self._first
        width = residual.shape[1] // num_streams
        first = residual[:, :width]
        gate = ops.activation(ops.linear(first, self._gates[layer], self._dtype), self._description.activation)
        let_in = ops.multiply(gate, inputs[:, layer * size : (layer + 1) * size], consumer=self._outputs[layer])
        summand = self._norms[layer].forward(ops.linear(let_in, self._outputs[layer], "float32"))
        for i in range(min(1, num_streams - 1), num_streams):
            ops.add(residual[:, i * width : (i + 1) * width], summand)
