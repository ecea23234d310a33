"""The network of a `ModelDescription`: embedding, blocks, final norm, and output matrix or pooler. A description with
bidirectional attention gives an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, cast

import numpy as np

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import group_layers
from octavo.layers.altup import AltUp
from octavo.layers.attention import AttentionDescription
from octavo.layers.cross_attention import CrossAttention
from octavo.layers.embedding import Embedding
from octavo.layers.mixer import FeedForwardLike, Mixer
from octavo.layers.norm import Norm
from octavo.layers.parameters import NamedMatrix, Parameters
from octavo.layers.pooler import Pooler
from octavo.layers.positions import position_table
from octavo.layers.product import Summand
from octavo.layers.projection_head import ProjectionHead
from octavo.layers.reused_layer import ReusedLayer
from octavo.layers.token_inputs import TokenInputs
from octavo.loading.weights import Weights
from octavo.models.altup_block import AltUpBlock
from octavo.models.description import LayerDescription, ModelDescription
from octavo.ops import Array, LayerKVCache, LinearWeight, Ops, ParallelOps

_NEVER_SAMPLED = -3e4  # a logit within float16's range
TablesAndCache = tuple[GroupTables, LayerKVCache]  # a mixer's cache, and where the step's tokens are in it
_NO_CACHE: TablesAndCache = cast(Any, (None, None))  # for layers without a cache


class Block:
    """Attention and feed-forward with their norms, added to the residual stream one after the other or together."""

    def __init__(self, layer: LayerDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        def norm(name: str | None) -> Norm | None:
            if name is None:
                return None
            names = [f"{prefix}{n}" for n in name.split("|")]
            found = next((n for n in names if f"{n}.weight" in parameters.weights), names[0])
            return Norm(layer.norm, parameters, found, hidden_size)

        self._layer, self._ops, self._multipliers = layer, parameters.ops, layer.multipliers
        self.reads_float32 = not (
            layer.parallel_mixer or layer.reused or layer.is_parallel or layer.keeps_normed or layer.gates
        )
        if layer.gates is not None:
            of_attention, of_feed_forward = (
                float(np.tanh(np.float32(parameters.weights.take(f"{prefix}{name}", (1,))[0]))) for name in layer.gates
            )
            self._multipliers = of_attention, 1.0, of_feed_forward
            nothing = np.zeros((1, hidden_size), np.float32)
            self._nothing = parameters.once(("nothing", hidden_size), lambda: parameters.ops.place(nothing))
        self._attention: Mixer | None = None
        if layer.attention is not None:
            self._attention_norm = norm(layer.attention_norm)
            self._attention = layer.attention.build(hidden_size, parameters, prefix)
            self._attention_post_norm = norm(layer.attention_post_norm)
            self.reads_float32 &= _quantizes(self._attention_norm, self._attention.consumer)
        self._reused: ReusedLayer | None = None
        if layer.reused is not None:
            self._reused = layer.reused.build(hidden_size, parameters, prefix)
        self._parallel_mixer: Mixer | None = None
        if layer.parallel_mixer is not None:
            self._parallel_mixer = layer.parallel_mixer.build(hidden_size, parameters, prefix)
        self._feed_forward: FeedForwardLike | None = None
        self._deferred: Array | None = None
        if layer.feed_forward is not None:
            self._feed_forward_norm = norm(layer.feed_forward_norm)
            self._feed_forward = layer.feed_forward.build(hidden_size, parameters, prefix)
            self._feed_forward_post_norm = norm(layer.feed_forward_post_norm)
            self.reads_float32 &= _quantizes(self._feed_forward_norm, self._feed_forward.consumer)

    @property
    def cross_attention(self) -> CrossAttention | None:
        """Return the block's cross attention, if it has one."""
        return self._attention if isinstance(self._attention, CrossAttention) else None

    def forward(
        self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache,
        second: TablesAndCache | None = None, *, padded_embedding: Array | None = None,
    ) -> Array:  # fmt: skip
        """Return the residual stream after this layer; residual [T, H] is overwritten."""
        if self._layer.is_parallel:
            return self._forward_parallel(residual, batch, tables, cache)
        if self._attention is not None:
            if self._reused is not None and padded_embedding is not None and second is not None:
                stream = self._reused.forward(residual, padded_embedding, batch, *second)
                hidden = _normed(self._attention_norm, stream, self._attention.consumer)
            else:
                residual, hidden = self._before(self._attention_norm, residual, self._attention)
            attended = self._attention.forward(hidden, batch, tables, cache)
            if self._parallel_mixer is not None and second is not None:
                other = self._parallel_mixer.forward(hidden, batch, *second)
                residual = self._add(residual, other, self._attention_post_norm, self._multipliers[1])
            self._multiply_stream(residual, 0)
            residual = self._add(residual, attended, self._attention_post_norm, self._multipliers[0])
        if self._feed_forward is not None:
            residual, hidden = self._before(self._feed_forward_norm, residual, self._feed_forward)
            if self._layer.gates is not None:
                self._ops.replace_rows(
                    hidden, self._nothing, batch.cross_mask
                )  # rows of zeros: without biases the output is zero too
            fed = self._feed_forward.forward(hidden)
            self._multiply_stream(residual, 1)
            if self._layer.deferred_by:
                self._deferred = fed.value()
                return residual
            residual = self._add(residual, fed, self._feed_forward_post_norm, self._multipliers[2])
        return residual

    def take_deferred(self) -> Array | None:
        """Return the output [T, H] of the last `forward` that a later layer adds to the residual stream, if there is
        one."""
        deferred, self._deferred = self._deferred, None
        return deferred

    def _before(self, norm: Norm | None, residual: Array, layer: Mixer | FeedForwardLike) -> tuple[Array, Array]:
        """Return the residual stream and the layer's input, which is quantized if only this layer reads it."""
        if self._layer.keeps_normed:
            normed = _normed(norm, residual, None)
            return normed, normed
        is_shared = layer is self._attention and self._parallel_mixer is not None
        is_changed = self._layer.gates is not None
        return residual, _normed(norm, residual, None if is_shared or is_changed else layer.consumer)

    def _multiply_stream(self, residual: Array, part: int) -> None:
        if (multiplier := self._layer.stream_multipliers[part]) != 1.0:
            self._ops.add(residual, residual, multiplier - 1.0)

    def _forward_parallel(self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Array:
        assert self._attention is not None and self._feed_forward is not None
        # A norm read by two matrices cannot quantize for one of them.
        is_shared = self._feed_forward_norm is None
        hidden = _normed(self._attention_norm, residual, None if is_shared else self._attention.consumer)
        attended = self._attention.forward(hidden, batch, tables, cache)
        if not is_shared:
            hidden = _normed(self._feed_forward_norm, residual, self._feed_forward.consumer)
        fed = self._feed_forward.forward(hidden)
        residual = self._add(residual, attended, self._attention_post_norm)
        return self._add(residual, fed, self._feed_forward_post_norm)

    def _add(self, residual: Array, summand: Summand, post_norm: Norm | None, multiplier: float = 1.0) -> Array:
        scale = self._layer.residual_multiplier * multiplier
        if post_norm is None or self._layer.norms_stream:
            summand.add_to(residual, scale)
            return _normed(post_norm, residual, None)
        self._ops.add(residual, post_norm.forward(summand.value()), scale)
        return residual


def _normed(norm: Norm | None, residual: Array, consumer: LinearWeight | None) -> Array:
    return residual if norm is None else norm.forward(residual, consumer)


def _quantizes(norm: Norm | None, consumer: LinearWeight | None) -> bool:
    """Return whether a norm quantizes its result, so that its input may be float32."""
    return norm is not None and consumer is not None and consumer.takes_float32


class BlockLike(Protocol):
    @property
    def reads_float32(self) -> bool:
        """Return whether the residual stream may be float32 if the model's type is smaller."""

    def forward(
        self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache,
        second: TablesAndCache | None = None, *, padded_embedding: Array | None = None,
    ) -> Array:  # fmt: skip
        """Return the residual stream after this layer; residual [T, H] is overwritten.

        `second` is the cache of a parallel mixer or of a reused layer; `padded_embedding` [T, 2 * H] is for a reused
        layer."""


def _caches_of_layer(description: ModelDescription) -> list[range]:
    """Return the caches of each layer, as indices of `layer_caches`. A layer may read an earlier layer's caches."""
    ends = list(accumulate(len(layer.keepers) for layer in description.layers))
    found = [range(end - len(layer.keepers), end) for layer, end in zip(description.layers, ends, strict=True)]
    for i, layer in enumerate(description.layers):
        if isinstance(layer.attention, AttentionDescription) and layer.attention.reads_layer is not None:
            found[i] = found[layer.attention.reads_layer]
    return found


# Makes a `Block`, or an architecture's own class, of: layer, hidden size, parameters, prefix of names
BlockBuilder = Callable[[LayerDescription, int, Parameters, str], BlockLike]


class Decoder:
    """The network: from token ids to hidden states, and from hidden states to logits or vectors."""

    is_recordable = True

    def __init__(
        self,
        description: ModelDescription,
        weights: Weights,
        ops: Ops,
        max_positions: int,
        dtype: str,
        block: BlockBuilder = Block,
    ) -> None:
        self.description, self._ops, self._dtype = description, ops, dtype
        self.vocab_size, self.hidden_size = description.vocab_size, description.hidden_size
        self.layer_caches = description.layer_caches
        self._own_vocab = description.shard.cut(self.vocab_size)
        parameters = Parameters(weights, ops, max_positions, dtype)
        self._build_embedding(parameters)
        self._altup: AltUp | None = None
        if description.altup is not None:
            is_first, is_last = description.is_first_stage, description.is_last_stage
            self._altup = AltUp(description.altup, self.hidden_size, parameters, is_first, is_last)
            block = partial(AltUpBlock, description.altup)
        self._build_embedding_carriers(parameters)
        self._blocks = self._build_blocks(block, parameters)
        self._pass_over_the_rest(weights)
        self._token_inputs: TokenInputs | None = None
        if description.token_inputs is not None:
            self._token_inputs = TokenInputs(
                description.token_inputs, description.stage, len(description.layers), self.hidden_size, parameters,
                description.layer_prefix, description.shard,
            )  # fmt: skip
        self._stream_scales = self._read_stream_scales(weights)
        self._group_of_cache = {
            cache: group for group, layers in enumerate(group_layers(self.layer_caches)) for cache in layers.layers
        }
        self._caches_of_layer = _caches_of_layer(description)
        self._build_output(parameters)
        self.stream_dtype = self._choose_stream_dtype()
        self._num_weight_bytes = parameters.num_matrix_bytes
        self._matrices, self._expert_matrices = parameters.matrices, parameters.expert_matrices
        # Called with each layer's index and its input [T, H], in order, for draft heads that read hidden states.
        self.on_layer_input: Callable[[int, Array], None] | None = None

    def _build_embedding(self, parameters: Parameters) -> None:
        """Build everything before the first layer: the embedding, its projection and norm, positions, token types.

        The last stage has the embedding too if it is the output matrix."""
        description = self.description
        is_first, is_last, shard = description.is_first_stage, description.is_last_stage, description.shard
        embedding_size = description.embedding_size or self.hidden_size
        is_output = self._is_tied and self._has_output and shard.is_whole
        self._embedding: Embedding | None = None
        if is_first or is_output:
            self._embedding = Embedding(
                description.embedding_name, self.vocab_size, embedding_size, parameters, shard,
                self._output_bias if self._is_tied and is_last and shard.is_whole else False, is_output=is_output,
            )  # fmt: skip
        self._projection: LinearWeight | None = None
        if description.embedding_size is not None and is_first:
            name, has_bias = description.embedding_projection_name, description.projects_last
            self._projection = parameters.linear([name], [self.hidden_size], embedding_size, has_bias)
        width = embedding_size if description.projects_last else self.hidden_size
        self._embedding_norm: Norm | None = None
        if description.embedding_norm is not None and is_first:
            self._embedding_norm = Norm(description.embedding_norm, parameters, description.embedding_norm_name, width)
        self._positions: Array | None = None
        if description.positions is not None and is_first:
            self._positions = position_table(description.positions, parameters, width)
        self._token_types: Array | None = None
        if description.token_types and is_first:
            self._token_types = parameters.array(description.token_types_name, (description.token_types, width))

    def _build_embedding_carriers(self, parameters: Parameters) -> None:
        """Build identity matrices that write the embedding next to hidden states. A product with an identity matrix can
        be recorded; a copy cannot."""
        description, size, dtype = self.description, self.hidden_size, parameters.dtype
        # For reused layers, which read rows [hidden, embedding].
        self._pad_embedding: LinearWeight | None = None
        if any(description.layers[i].reused is not None for i in description.stage):
            self._pad_embedding = parameters.packed(np.eye(2 * size, size, -size, dtype))
        # For the next stage, which reads rows [residual streams, embedding].
        self._append_embedding: LinearWeight | None = None
        if description.carries_embedding and not description.is_last_stage:
            width = description.stage_width
            self._append_embedding = parameters.packed(np.eye(width, size, size - width, dtype))

    def _build_blocks(self, block: BlockBuilder, parameters: Parameters) -> dict[int, BlockLike]:
        """Build the blocks of this stage, by layer."""
        description, blocks = self.description, dict[int, BlockLike]()
        for i in description.stage:
            with parameters.precise(i < description.num_precise_layers):
                prefix = f"{description.layer_prefix}{description.checkpoint_layers[i]}."
                blocks[i] = block(description.layers[i], self.hidden_size, parameters, prefix)
        return blocks

    def _pass_over_the_rest(self, weights: Weights) -> None:
        """Tell `weights` which tensors of the checkpoint are for other stages, or unused."""
        description = self.description
        layers, own = description.checkpoint_layers, description.stage
        others = [layer for i, layer in enumerate(layers) if i not in own]
        for layer in (*others, *range(len(layers), len(layers) + description.num_unused_layers)):
            weights.pass_over(f"{description.layer_prefix}{layer}.")
        # Adapters of reused layers are outside of the layers in checkpoints.
        reused = [layer.reused for i, layer in enumerate(description.layers) if i not in own]
        adapters = [f"{one.name}." for one in reused if one is not None]
        for prefix in (*description.other_stages, *adapters, *description.unused):
            weights.pass_over(prefix)

    def _read_stream_scales(self, weights: Weights) -> dict[int, float]:
        """Return the factors of the residual stream after each layer."""
        description, scales = self.description, dict[int, float]()
        for i in description.stage:
            name, prefix = description.layers[i].stream_scale, description.layer_prefix
            tensor = f"{prefix}{description.checkpoint_layers[i]}.{name}"
            scales[i] = 1.0 if name is None else float(weights.take(tensor, (1,))[0])
        return scales

    def _build_output(self, parameters: Parameters) -> None:
        """Build everything after the last layer: the final norm, and the output matrix or a pooler."""
        description = self.description
        is_last, has_output = description.is_last_stage, self._has_output
        self._norm: Norm | None = None
        if description.norm is not None and is_last:
            divisor = description.logits_divisor  # dividing in the norm gives the same as dividing logits (Granite)
            self._norm = Norm(description.norm, parameters, description.norm_name, self.hidden_size, divisor=divisor)
        self._pooler: Pooler | None = None
        if description.pooling is not None and is_last:
            self._pooler = Pooler(description.pooling, self.hidden_size, self.vocab_size, parameters)
        self._projection_head: ProjectionHead | None = None
        if description.projection_head is not None and has_output:
            self._projection_head = ProjectionHead(description.projection_head, self.hidden_size, parameters)
        self._lm_head = self._embedding.weight if is_last and self._embedding is not None else None
        if description.num_input_only_tokens and has_output:
            self._lm_head = self._padded_output(parameters)
        elif has_output and not (self._is_tied and description.shard.is_whole):
            # With several workers a tied matrix is read again: the embedding is cut by columns, the output by rows.
            name = description.embedding_name if self._is_tied else description.output_name
            size = self.hidden_size if description.projection_head is None else description.projection_head.size
            self._lm_head = parameters.linear([name], [self.vocab_size], size, self._output_bias, own=self._own_vocab)

    def _choose_stream_dtype(self) -> str:
        """Return the type of the residual stream: float32 if all its readers quantize it, otherwise the model's type.

        float32 is worth its cost then, because sums of many layers in bfloat16 are less exact than quantized products
        (docs/performance.md)."""
        # A pooler reads either type from the last norm.
        ends_float32 = self._norm is not None if self._pooler is not None else _quantizes(self._norm, self._lm_head)
        has_other_readers = self._projection_head is not None or self._token_inputs is not None
        blocks_read_float32 = all(block.reads_float32 for block in self._blocks.values())
        if not has_other_readers and (ends_float32 or not self.description.is_last_stage) and blocks_read_float32:
            return "float32"
        return self._dtype

    @property
    def _is_tied(self) -> bool:
        return self.description.tie_word_embeddings

    @property
    def _has_output(self) -> bool:
        """Return whether this stage makes logits."""
        return self.description.pooling is None and self.description.is_last_stage

    @property
    def _output_bias(self) -> str | bool:
        """Return the name of the output matrix's bias, or False if it has none."""
        has_bias = self.description.output_bias and self.description.pooling is None
        return f"{self.description.output_name}.bias" if has_bias else False

    def _padded_output(self, parameters: Parameters) -> LinearWeight:
        """Return the output matrix with added rows of zeros for tokens that have no rows in the checkpoint. A bias
        keeps these tokens from being sampled."""
        description = self.description
        assert not description.tie_word_embeddings and not description.output_bias
        num_output_tokens = description.vocab_size - description.num_input_only_tokens
        rows = parameters.weights.take(f"{description.output_name}.weight", (num_output_tokens, self.hidden_size))
        bias = np.zeros(description.vocab_size, rows.dtype)
        bias[num_output_tokens:] = _NEVER_SAMPLED
        own = slice(self._own_vocab.start, self._own_vocab.stop)
        return parameters.packed(np.pad(rows, ((0, description.num_input_only_tokens), (0, 0)))[own], bias[own])

    @property
    def matrices(self) -> tuple[NamedMatrix, ...]:
        """Return the matrices that adapters may change. A tied matrix counts as two: embedding and output."""
        return (*self._adaptable(), *(matrix for named in self._expert_matrices for matrix in named()))

    def _adaptable(self) -> Iterator[NamedMatrix]:
        output_name, is_tied = self.description.output_name, self.description.tie_word_embeddings
        embedding = None if self._embedding is None else self._embedding.weight
        for matrix in self._matrices:
            if matrix.weight is embedding and self.description.is_first_stage:
                yield replace(matrix, replaceable=True, looked_up=True)
            if matrix.weight is self._lm_head:
                [module] = matrix.modules
                modules = (replace(module, name=output_name),) if is_tied else matrix.modules
                yield replace(matrix, modules=modules, replaceable=True)
            elif matrix.weight is not embedding:
                yield matrix

    def num_weight_bytes(self) -> int:
        """Return the bytes of the packed matrices."""
        return self._num_weight_bytes

    @property
    def stage_width(self) -> int:
        return self.description.stage_width

    @property
    def embeds_alone(self) -> bool:
        """Return whether this worker can `embed` without other workers."""
        has_projection = self._projection is not None or self.description.embedding_size is None
        return self._embedding is not None and has_projection and self.description.shard.is_whole

    @property
    def makes_logits_alone(self) -> bool:
        """Return whether this worker can compute `output` without other workers."""
        return self._lm_head is not None and self.description.shard.is_whole

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """Return hidden states [T, H] before the final norm; after the final norm in a model that pools.

        A stage that is not the last returns rows [T, `stage_width`]. `caches` belong to the entries of `layer_caches`
        of this stage's layers."""
        description = self.description
        residual = embedded = self._start(batch) if batch.hidden_in is None else batch.hidden_in
        if batch.hidden_in is not None and description.carries_embedding:
            width = description.stage_width - description.hidden_size
            residual, embedded = batch.hidden_in[:, :width], batch.hidden_in[:, width:]
        inputs = None if self._token_inputs is None else self._token_inputs.embed(batch.token_ids, embedded)
        hidden_out = None
        if self._append_embedding is not None:
            hidden_out = self._ops.linear(embedded, self._append_embedding, self._dtype)
        # Only models with a reused layer pass more to their blocks.
        further: dict[str, Any] = {}
        if self._pad_embedding is not None:
            further = {"padded_embedding": self._ops.linear(embedded, self._pad_embedding, self._dtype)}
        if self._altup is not None and description.is_first_stage:
            residual = self._altup.expand(residual)
        own_caches = description.caches_of(description.stage)
        with_tables = {i: (batch.groups[self._group_of_cache[i]], c) for i, c in zip(own_caches, caches, strict=True)}
        deferred: dict[int, Array] = {}  # layer -> the output that is added to the residual stream after this layer
        for layer, block in self._blocks.items():
            if self.on_layer_input is not None:
                self.on_layer_input(layer, residual)
            (tables, cache), *second = [with_tables[i] for i in self._caches_of_layer[layer]] or [_NO_CACHE]
            residual = block.forward(residual, batch, tables, cache, *second, **further)
            if isinstance(block, Block) and (made := block.take_deferred()) is not None:
                deferred[layer + description.layers[layer].deferred_by] = made
            if layer in deferred:
                self._ops.add(residual, deferred.pop(layer))
            if layer < description.num_media_layers and batch.media_rows is not None:
                self._ops.add_rows(residual, batch.media_rows[layer + 1], batch.media_indices)
            if self._token_inputs is not None and inputs is not None:
                self._token_inputs.add_to(residual, layer, inputs)
            if (scale := self._stream_scales[layer]) != 1.0:
                self._ops.add(residual, residual, scale - 1.0)
        if hidden_out is not None:
            self._ops.add(hidden_out[:, : residual.shape[1]], residual)
            return hidden_out
        if self._altup is not None and description.is_last_stage:
            residual = self._altup.merge(residual)
        return residual if self._pooler is None else _normed(self._norm, residual, None)

    def _start(self, batch: StepBatch) -> Array:
        """Return the input of the first layer, [T, H]."""
        ops, description = self._ops, self.description
        residual = self.embed(batch.token_ids, self.stream_dtype)
        if batch.media_rows is not None:
            ops.replace_rows(residual, batch.media_rows[0], batch.media_indices)
        if self._positions is not None:
            ops.add(residual, ops.take_rows(self._positions, batch.positions))
        if self._token_types is not None:
            ops.add(residual, ops.take_rows(self._token_types, batch.token_types))
        residual = _normed(self._embedding_norm, residual, None)
        if self._projection is not None and description.projects_last:
            residual = ops.linear(residual, self._projection, self.stream_dtype)
        return residual

    def write_encoder_kv(self, rows: Array, positions: Array, slots: Array, caches: Sequence[LayerKVCache]) -> None:
        """Write the cross-attention keys and values of rows [N, H] of an encoder's output to `slots` [N] int64 of their
        group. `positions` [N] int64 have no effect; `caches` are as in `forward`."""
        for layer, number in self.cross_layers:
            layer.write(rows, positions, slots, caches[number])

    @property
    def cross_layers(self) -> list[tuple[CrossAttention, int]]:
        """Return the cross-attention layers of this stage, in order, each with the index of its cache in the stage."""
        first = self.description.caches_of(self.description.stage).start
        found = [(block.cross_attention, i) for i, block in self._blocks.items() if isinstance(block, Block)]
        return [(layer, self._caches_of_layer[i][0] - first) for layer, i in found if layer is not None]

    def pool(self, hidden: Array, starts: Array, ends: Array) -> Array:
        """Return vectors [N, size] float32; vector n pools rows starts[n] .. ends[n] ([N] int64) of hidden [T, H]."""
        assert self._pooler is not None, f"{self.description.architecture} was not described as a model that pools"
        return self._pooler.forward(hidden, starts, ends)

    def logits(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden states [N, H] before the final norm."""
        head = self._projection_head
        return self.output(_normed(self._norm, hidden, self._lm_head if head is None else head.consumer))

    def embed(self, token_ids: Array, dtype: str | None = None) -> Array:
        """Return the embeddings [T, H] of token_ids [T] int32, without positions. The default `dtype` is the model's.

        With `projects_last`, rows are not projected yet and have the embedding's size."""
        ops, multiplier = self._ops, self.description.embedding_multiplier
        assert self._embedding is not None, "the first stage embeds"
        if self._projection is None:
            return self._embedding.forward(token_ids, dtype or self._dtype, multiplier)
        embedded = self._embedding.forward(token_ids, self._dtype, multiplier)
        if self.description.projects_last:  # after positions, token types and a norm
            return embedded
        return ops.linear(embedded, self._projection, dtype or self._dtype)

    def normed(self, hidden: Array) -> Array:
        """Return the final norm of hidden [N, H], not quantized."""
        return _normed(self._norm, hidden, None)

    def output(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden [N, H] after the final norm."""
        ops = self._ops
        assert self._lm_head is not None, "the last stage makes logits"
        if self._projection_head is not None:
            hidden = self._projection_head.forward(hidden, self._lm_head)
        logits = ops.linear(hidden, self._lm_head, "float32")
        if not self.description.shard.is_whole:
            logits = cast(ParallelOps, ops).all_gather(logits, self._own_vocab.start, self.vocab_size)
        cap = self.description.logits_softcap
        return ops.activation(logits, "softcap", parameters=(cap,)) if cap else logits
