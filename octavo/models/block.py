"""One layer of a `Decoder`: attention (or another mixer) and feed-forward, with their norms.

The order of work in a layer; a `LayerDescription` has some of these steps:

1. Attention's norm reads the residual stream; with a reused layer, the stream plus that layer's output.
2. Attention computes its output. A second mixer computes its own from the same input.
3. The second mixer's output is added to the stream, after attention's post norm and times `output_scales.second_mixer`.
4. The stream, with the second mixer's output, is multiplied by `residual_scales[0]`.
5. Attention's output is added to the stream, after a post norm and times `output_scales.attention`.
6. The feed-forward's norm reads the stream. With `tanh_gates`, inputs of tokens without encoder output become zero.
7. The feed-forward computes its output.
8. The stream is multiplied by `residual_scales[1]`.
9. The feed-forward's output is added to the stream, after a post norm and times `output_scales.feed_forward`. With
   `deferred_by` it is kept for a later layer instead; it has neither post norm nor scales (`LayerDescription` asserts
   this).

Steps 3, 5 and 9 also multiply by `residual_multiplier`. With `parallel_residual` attention and feed-forward read the
same stream (1, 2, 6, 7), and then both outputs are added (5, 9) without `output_scales`; steps 3, 4 and 8 are left out.
`Decoder` continues the layer:

10. The deferred output of an earlier layer is added.
11. Media rows are added, after the first layers of some models.
12. The gated per-layer embedding is added.
13. The stream is multiplied by the checkpoint's `residual_scale_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, cast

import numpy as np

from octavo.layers.attention import AttentionDescription
from octavo.layers.cross_attention import CrossAttention
from octavo.layers.in_place import scale_in_place
from octavo.layers.mixer import FeedForwardLike, Mixer
from octavo.layers.norm import Norm, apply_norm, norm_quantizes
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.reused_layer import ReusedLayer
from octavo.models.description import LayerDescription, ModelDescription, OutputScales
from octavo.ops import Array, LayerKVCache, LinearWeight
from octavo.step_batch import GroupTables, StepBatch

TablesAndCache = tuple[GroupTables, LayerKVCache]  # a mixer's cache, and the places of the step's tokens in it
_NO_CACHE: TablesAndCache = cast(Any, (None, None))  # for mixers without a cache


class BlockLike(Protocol):
    """A layer as `Decoder` uses it. An architecture's own class inherits this one, for the methods with defaults."""

    accepts_float32_residual: bool  # the residual stream may be float32 if the model's type is smaller

    @property
    def cross_attention(self) -> CrossAttention | None:
        """Return the layer's cross attention, if it has one."""
        return None

    def forward(
        self, residual: Array, batch: StepBatch, caches: Sequence[TablesAndCache], padded_embedding: Array | None = None
    ) -> tuple[Array, Array | None]:
        """Return the residual stream after this layer, and an output [T, H] that a later layer adds to the stream, if
        there is one. residual [T, H] is overwritten.

        `caches`: none, the mixer's, or the mixer's and that of a second mixer or a reused layer. `padded_embedding`
        [T, 2 * H] is for a reused layer."""


# Makes a `Block`, or an architecture's own class, of: layer, hidden size, parameters, prefix of names
BlockBuilder = Callable[[LayerDescription, int, Parameters, str], BlockLike]


class Block(BlockLike):
    """The layer that a `LayerDescription` describes; see the module for the order of its work."""

    def __init__(self, layer: LayerDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        self._layer, self._ops, self._output_scales = layer, parameters.ops, layer.output_scales
        # The stream may be float32 if every reader quantizes it; readers in layers with any of these do not.
        self.accepts_float32_residual = not (
            layer.second_mixer or layer.reused or layer.parallel_residual or layer.residual_from_norm
            or layer.tanh_gates
        )  # fmt: skip
        norm = partial(_build_norm, layer, hidden_size, parameters, prefix)
        if layer.tanh_gates is not None:
            self._build_tanh_gates(layer.tanh_gates, hidden_size, parameters, prefix)
        self._attention: Mixer | None = None
        if layer.attention is not None:
            self._attention_norm = norm(layer.attention_norm)
            self._attention = layer.attention.build(hidden_size, parameters, prefix)
            self._attention_post_norm = norm(layer.attention_post_norm)
            self.accepts_float32_residual &= norm_quantizes(self._attention_norm, self._attention.consumer)
        self._reused: ReusedLayer | None = None
        if layer.reused is not None:
            self._reused = layer.reused.build(hidden_size, parameters, prefix)
        self._second_mixer: Mixer | None = None
        if layer.second_mixer is not None:
            self._second_mixer = layer.second_mixer.build(hidden_size, parameters, prefix)
        self._feed_forward: FeedForwardLike | None = None
        if layer.feed_forward is not None:
            self._feed_forward_norm = norm(layer.feed_forward_norm)
            self._feed_forward = layer.feed_forward.build(hidden_size, parameters, prefix)
            self._feed_forward_post_norm = norm(layer.feed_forward_post_norm)
            self.accepts_float32_residual &= norm_quantizes(self._feed_forward_norm, self._feed_forward.consumer)

    def _build_tanh_gates(self, names: tuple[str, str], hidden_size: int, parameters: Parameters, prefix: str) -> None:
        """Read the gates, which are the scales of the outputs."""
        of_attention, of_feed_forward = (
            float(np.tanh(np.float32(parameters.weights.take(f"{prefix}{name}", (1,))[0]))) for name in names
        )
        self._output_scales = OutputScales(attention=of_attention, feed_forward=of_feed_forward)
        zeros = np.zeros((1, hidden_size), np.float32)
        self._zero_row = parameters.once(("zero row", hidden_size), lambda: parameters.ops.place(zeros))

    @property
    def cross_attention(self) -> CrossAttention | None:
        return self._attention if isinstance(self._attention, CrossAttention) else None

    def forward(
        self, residual: Array, batch: StepBatch, caches: Sequence[TablesAndCache], padded_embedding: Array | None = None
    ) -> tuple[Array, Array | None]:
        caches = caches or (_NO_CACHE,)
        if self._layer.parallel_residual:
            return self._forward_parallel(residual, batch, caches[0]), None
        if self._attention is not None:
            residual = self._forward_attention(self._attention, residual, batch, caches, padded_embedding)
        if self._feed_forward is None:
            return residual, None
        return self._forward_feed_forward(self._feed_forward, residual, batch)

    def _forward_attention(
        self, attention: Mixer, residual: Array, batch: StepBatch, caches: Sequence[TablesAndCache],
        padded_embedding: Array | None,
    ) -> Array:  # fmt: skip
        """Steps 1 to 5."""
        # 1. Read the stream.
        if self._reused is not None:
            assert padded_embedding is not None, "a reused layer reads the embedding"
            stream = self._reused.forward(residual, padded_embedding, batch, *caches[1])
            hidden = apply_norm(self._attention_norm, stream, attention.consumer)
        else:
            # A norm that two mixers read cannot quantize for one of them.
            consumer = attention.consumer if self._second_mixer is None else None
            residual, hidden = self._norm_input(self._attention_norm, residual, consumer)
        # 2. Compute attention's output, and the second mixer's.
        attended = attention.forward(hidden, batch, *caches[0])
        if self._second_mixer is not None:
            mixed = self._second_mixer.forward(hidden, batch, *caches[1])
            # 3. Add the second mixer's output.
            residual = self._add_to_residual(
                residual, mixed, self._attention_post_norm, self._output_scales.second_mixer
            )
        # 4. Scale the stream.
        scale_in_place(self._ops, residual, self._layer.residual_scales[0])
        # 5. Add attention's output.
        return self._add_to_residual(residual, attended, self._attention_post_norm, self._output_scales.attention)

    def _forward_feed_forward(
        self, feed_forward: FeedForwardLike, residual: Array, batch: StepBatch
    ) -> tuple[Array, Array | None]:
        """Steps 6 to 9."""
        # 6. Read the stream.
        residual, hidden = self._norm_input(self._feed_forward_norm, residual, feed_forward.consumer)
        if self._layer.tanh_gates is not None:
            # The output of rows of zeros is zero, as there are no biases.
            self._ops.replace_rows(hidden, self._zero_row, batch.cross_mask)
        # 7. Compute the feed-forward's output.
        fed = feed_forward.forward(hidden)
        # 8. Scale the stream.
        scale_in_place(self._ops, residual, self._layer.residual_scales[1])
        # 9. Add the feed-forward's output, or return it for a later layer.
        if self._layer.deferred_by:
            return residual, fed.value()
        scale = self._output_scales.feed_forward
        return self._add_to_residual(residual, fed, self._feed_forward_post_norm, scale), None

    def _forward_parallel(self, residual: Array, batch: StepBatch, tables_and_cache: TablesAndCache) -> Array:
        """Steps 1, 2, 6, 7, then 5 and 9."""
        assert self._attention is not None and self._feed_forward is not None
        # A norm that attention and feed-forward read cannot quantize for one of them.
        is_shared = self._feed_forward_norm is None
        # 1, 2. Compute attention's output.
        hidden = apply_norm(self._attention_norm, residual, None if is_shared else self._attention.consumer)
        attended = self._attention.forward(hidden, batch, *tables_and_cache)
        # 6, 7. Compute the feed-forward's output.
        if not is_shared:
            hidden = apply_norm(self._feed_forward_norm, residual, self._feed_forward.consumer)
        fed = self._feed_forward.forward(hidden)
        # 5, 9. Add both outputs.
        residual = self._add_to_residual(residual, attended, self._attention_post_norm)
        return self._add_to_residual(residual, fed, self._feed_forward_post_norm)

    def _norm_input(self, norm: Norm | None, residual: Array, consumer: LinearWeight | None) -> tuple[Array, Array]:
        """Return the residual stream, and the input of attention or feed-forward, quantized for its only
        `consumer`."""
        if self._layer.residual_from_norm:
            normed = apply_norm(norm, residual)
            return normed, normed
        # With `tanh_gates` rows of the result are replaced, which quantized rows do not allow.
        return residual, apply_norm(norm, residual, consumer if self._layer.tanh_gates is None else None)

    def _add_to_residual(self, residual: Array, output: Summand, post_norm: Norm | None, scale: float = 1.0) -> Array:
        """Return the residual stream plus a scaled output. The post norm, if there is one, reads the output; with
        `post_norm_residual` it reads the sum, and its result becomes the stream."""
        scale *= self._layer.residual_multiplier
        if post_norm is None or self._layer.post_norm_residual:
            output.add_to(residual, scale)
            return apply_norm(post_norm, residual)
        self._ops.add(residual, post_norm.forward(output.value()), scale)
        return residual


def _build_norm(
    layer: LayerDescription, hidden_size: int, parameters: Parameters, prefix: str, names: str | None
) -> Norm | None:
    """Build the norm of the first of `names` that the checkpoint has; they are separated by "|"."""
    if names is None:
        return None
    modules = [f"{prefix}{name}" for name in names.split("|")]
    module = next((module for module in modules if f"{module}.weight" in parameters.weights), modules[0])
    return Norm(layer.norm, parameters, module, hidden_size)


def cache_indices_by_layer(description: ModelDescription) -> list[range]:
    """Return the indices in `layer_caches` of each layer's caches. A layer without caches of its own may read the
    caches of an earlier layer."""
    ends = list(accumulate(len(layer.cached_mixers) for layer in description.layers))
    found = [range(end - len(layer.cached_mixers), end) for layer, end in zip(description.layers, ends, strict=True)]
    for i, layer in enumerate(description.layers):
        if isinstance(layer.attention, AttentionDescription) and layer.attention.reads_layer is not None:
            assert not layer.cached_mixers, "a layer reads its own caches or an earlier layer's, not both"
            found[i] = found[layer.attention.reads_layer]
    return found
