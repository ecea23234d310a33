"""The network of a `ModelDescription`: embedding, blocks, final norm, and output matrix or pooler. A description with
bidirectional attention gives an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from octavo.batch import StepBatch
from octavo.kv_cache.groups import group_layers
from octavo.layers.altup import AltUp
from octavo.layers.cross_attention import CrossAttention
from octavo.layers.embedding import Embedding
from octavo.layers.norm import Norm, apply_norm, norm_quantizes
from octavo.layers.parameters import NamedMatrix, Parameters
from octavo.layers.per_layer_embeddings import PerLayerEmbeddings
from octavo.layers.pooler import Pooler
from octavo.layers.positions import position_table
from octavo.layers.projection_head import ProjectionHead
from octavo.layers.zero_rows import ZeroRows
from octavo.loading.weights import Weights
from octavo.models.altup_block import AltUpBlock
from octavo.models.block import Block, BlockBuilder, BlockLike, TablesAndCache, caches_of_layers
from octavo.models.description import ModelDescription
from octavo.ops import Array, LayerKVCache, LinearWeight, Ops, ParallelOps

_NEVER_SAMPLED = -3e4  # a logit within float16's range
_NO_CACHE: TablesAndCache = cast(Any, (None, None))  # for layers without a cache


class Decoder:
    """The network: from token ids to hidden states, and from hidden states to logits or vectors."""

    is_recordable = True  # see `Model`

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
        self._build_embedding_tables(parameters)
        self._altup: AltUp | None = None
        if description.altup is not None:
            is_first, is_last = description.is_first_stage, description.is_last_stage
            self._altup = AltUp(description.altup, self.hidden_size, parameters, is_first, is_last)
            block = partial(AltUpBlock, description.altup)  # in the place of the argument
        self._build_embedding_carriers(parameters)
        self._blocks = self._build_blocks(block, parameters)
        self._ignore_unused(weights)
        self._per_layer_embeddings: PerLayerEmbeddings | None = None
        if description.per_layer_embeddings is not None:
            self._per_layer_embeddings = PerLayerEmbeddings(
                description.per_layer_embeddings, description.stage, len(description.layers), self.hidden_size,
                parameters, description.layer_prefix, description.shard,
            )  # fmt: skip
        self._layer_scales = self._read_layer_scales(weights)
        self._group_of_cache = {
            cache: group for group, layers in enumerate(group_layers(self.layer_caches)) for cache in layers.layers
        }
        self._caches_of_layers = caches_of_layers(description)
        self._build_output(parameters)
        # `worker._agree_on_stream` replaces it, before the runner is built, if another stage cannot have float32.
        self.residual_dtype = self._choose_residual_dtype()
        self._num_weight_bytes = parameters.num_matrix_bytes
        self._matrices, self._expert_matrices = parameters.matrices, parameters.expert_matrices
        # Called with each layer's index and its input [T, H], in order, for draft heads that read hidden states.
        self.on_layer_input: Callable[[int, Array], None] | None = None

    def _build_embedding(self, parameters: Parameters) -> None:
        """Build the embedding and its projection to the hidden size. The last stage has the embedding too if it is the
        output matrix."""
        description = self.description
        is_first, shard = description.is_first_stage, description.shard
        embedding_size = description.embedding_size or self.hidden_size
        is_output = self._is_tied and self._has_output and shard.is_whole
        self._embedding: Embedding | None = None
        if is_first or is_output:
            self._embedding = Embedding(
                description.embedding_name, self.vocab_size, embedding_size, parameters, shard,
                self._output_bias if is_output else False, is_output=is_output,
            )  # fmt: skip
        self._projection: LinearWeight | None = None
        if description.embedding_size is not None and is_first:
            name, has_bias = description.embedding_projection_name, description.projects_after_norm
            self._projection = parameters.linear([name], [self.hidden_size], embedding_size, has_bias)

    def _build_embedding_tables(self, parameters: Parameters) -> None:
        """Build what changes the embedding in the first stage: a norm, and the tables of positions and token types."""
        description = self.description
        self._embedding_norm: Norm | None = None
        self._positions: Array | None = None
        self._token_types: Array | None = None
        if not description.is_first_stage:
            return
        size = self.hidden_size
        if description.projects_after_norm and description.embedding_size is not None:
            size = description.embedding_size
        if description.embedding_norm is not None:
            self._embedding_norm = Norm(description.embedding_norm, parameters, description.embedding_norm_name, size)
        if description.positions is not None:
            self._positions = position_table(description.positions, parameters, size)
        if num_types := description.num_token_types:
            self._token_types = parameters.array(description.token_types_name, (num_types, size))

    def _build_embedding_carriers(self, parameters: Parameters) -> None:
        """Build the makers of rows that are zero except for the embedding at their end."""
        description, size = self.description, self.hidden_size
        # Reused layers read rows [hidden, embedding].
        self._reused_input: ZeroRows | None = None
        if any(description.layers[i].reused is not None for i in description.stage):
            self._reused_input = ZeroRows(size, 2 * size, parameters)
        # The next stage reads rows [residual streams, embedding].
        self._stage_output: ZeroRows | None = None
        if description.carries_embedding and not description.is_last_stage:
            self._stage_output = ZeroRows(size, description.stage_width, parameters)

    def _build_blocks(self, block: BlockBuilder, parameters: Parameters) -> dict[int, BlockLike]:
        """Build the blocks of this stage, by layer."""
        description, blocks = self.description, dict[int, BlockLike]()
        for i in description.stage:
            with parameters.precise(i < description.num_precise_layers):
                prefix = f"{description.layer_prefix}{description.checkpoint_layers[i]}."
                blocks[i] = block(description.layers[i], self.hidden_size, parameters, prefix)
        return blocks

    def _ignore_unused(self, weights: Weights) -> None:
        """Tell `weights` which tensors of the checkpoint only other stages use, or no stage."""
        description = self.description
        layers, own = description.checkpoint_layers, description.stage
        others = [layer for i, layer in enumerate(layers) if i not in own]
        for layer in (*others, *range(len(layers), len(layers) + description.num_unused_layers)):
            weights.ignore(f"{description.layer_prefix}{layer}.")
        # Checkpoints have the weights of reused layers outside of the layers.
        reused = [layer.reused for i, layer in enumerate(description.layers) if i not in own]
        of_reused = [f"{one.name}." for one in reused if one is not None]
        for prefix in (*description.other_stages, *of_reused, *description.unused):
            weights.ignore(prefix)

    def _read_layer_scales(self, weights: Weights) -> dict[int, float]:
        """Return the factor of the residual stream after each layer of this stage."""
        description, scales = self.description, dict[int, float]()
        for i in description.stage:
            name, prefix = description.layers[i].residual_scale_name, description.layer_prefix
            tensor = f"{prefix}{description.checkpoint_layers[i]}.{name}"
            scales[i] = 1.0 if name is None else float(weights.take(tensor, (1,))[0])
        return scales

    def _build_output(self, parameters: Parameters) -> None:
        """Build everything after the last layer: the final norm, and the output matrix or a pooler."""
        description = self.description
        is_last = description.is_last_stage
        self._norm: Norm | None = None
        if description.norm is not None and is_last:
            divisor = description.logits_divisor  # dividing in the norm gives the same as dividing logits (Granite)
            self._norm = Norm(description.norm, parameters, description.norm_name, self.hidden_size, divisor=divisor)
        self._pooler: Pooler | None = None
        if description.pooling is not None and is_last:
            self._pooler = Pooler(description.pooling, self.hidden_size, self.vocab_size, parameters)
        self._projection_head: ProjectionHead | None = None
        if description.projection_head is not None and self._has_output:
            self._projection_head = ProjectionHead(description.projection_head, self.hidden_size, parameters)
        self._lm_head = self._build_lm_head(parameters) if is_last else None

    def _build_lm_head(self, parameters: Parameters) -> LinearWeight | None:
        """Return the last stage's output matrix."""
        description = self.description
        embedding = None if self._embedding is None else self._embedding.weight
        if not self._has_output:
            return embedding  # a model that pools makes no logits, but an adapter may name this matrix as the output
        if description.num_input_only_tokens:
            return self._padded_lm_head(parameters)
        if self._is_tied and description.shard.is_whole:
            return embedding
        # With several workers a tied matrix is read again: the embedding is cut by columns, the output by rows.
        name = description.embedding_name if self._is_tied else description.output_name
        size = self.hidden_size if description.projection_head is None else description.projection_head.size
        return parameters.linear([name], [self.vocab_size], size, self._output_bias, own=self._own_vocab)

    def _padded_lm_head(self, parameters: Parameters) -> LinearWeight:
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

    def _choose_residual_dtype(self) -> str:
        """Return the type of the residual stream: float32 if all its readers quantize it, otherwise the model's type.

        float32 is worth its cost then, because sums of many layers in bfloat16 are less exact than quantized products
        (docs/performance.md)."""
        if self._projection_head is not None or self._per_layer_embeddings is not None:
            return self._dtype
        if not all(block.accepts_float32_residual for block in self._blocks.values()):
            return self._dtype
        if not self.description.is_last_stage:
            return "float32"
        # A pooler takes either type, after the final norm.
        accepts = self._norm is not None if self._pooler is not None else norm_quantizes(self._norm, self._lm_head)
        return "float32" if accepts else self._dtype

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

    @property
    def matrices(self) -> tuple[NamedMatrix, ...]:
        """Return the matrices that adapters may change. A tied matrix counts as two: embedding and output."""
        return (*self._adaptable(), *(matrix for named in self._expert_matrices for matrix in named()))

    def _adaptable(self) -> Iterator[NamedMatrix]:
        """Yield the packed matrices. A tied matrix is yielded twice in the first stage, as embedding and as output; in
        a later stage only as output."""
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
        """Return whether this worker can compute logits without other workers."""
        return self._has_output and self._lm_head is not None and self.description.shard.is_whole

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """Return hidden states [T, H] before the final norm; after the final norm in a model that pools.

        A stage that is not the last returns rows [T, `stage_width`]. `caches` belong to the entries of `layer_caches`
        of this stage's layers."""
        residual, embedding = self._split_input(batch)
        per_layer_inputs = None
        if self._per_layer_embeddings is not None:
            per_layer_inputs = self._per_layer_embeddings.embed(batch.token_ids, embedding)
        stage_output = padded_embedding = None
        if self._stage_output is not None:
            stage_output = self._stage_output.ending_in(embedding)
        if self._reused_input is not None:
            padded_embedding = self._reused_input.ending_in(embedding)
        if self._altup is not None and self.description.is_first_stage:
            residual = self._altup.expand(residual)
        caches_with_tables = self._with_tables(batch, caches)
        deferred: dict[int, Array] = {}  # by layer: the output that is added to the residual stream after this layer
        for layer, block in self._blocks.items():
            if self.on_layer_input is not None:
                self.on_layer_input(layer, residual)
            (tables, cache), second_cache = caches_with_tables[layer]
            residual = block.forward(residual, batch, tables, cache, second_cache, padded_embedding)
            if (output := block.take_deferred()) is not None:
                deferred[layer + self.description.layers[layer].deferred_by] = output
            self._after_layer(layer, residual, batch, deferred.pop(layer, None), per_layer_inputs)
        if stage_output is not None:
            self._ops.add(stage_output[:, : residual.shape[1]], residual)
            return stage_output
        if self._altup is not None and self.description.is_last_stage:
            residual = self._altup.merge(residual)
        return residual if self._pooler is None else apply_norm(self._norm, residual)

    def _split_input(self, batch: StepBatch) -> tuple[Array, Array]:
        """Return the residual streams [T, streams * H] before this stage's layers, and the first layer's input [T, H],
        which is of use only with `carries_embedding`. Both may be the same array, and layers overwrite the first:
        whatever reads the second must copy it before the layers run."""
        if batch.hidden_in is None:
            embedding = self._first_layer_input(batch)
            return embedding, embedding
        if not self.description.carries_embedding:
            return batch.hidden_in, batch.hidden_in
        width = self.description.stage_width - self.description.hidden_size
        return batch.hidden_in[:, :width], batch.hidden_in[:, width:]

    def _first_layer_input(self, batch: StepBatch) -> Array:
        """Return the input of the first layer, [T, H]."""
        ops, description = self._ops, self.description
        residual = self.embed(batch.token_ids, self.residual_dtype)
        if batch.media_rows is not None:
            ops.replace_rows(residual, batch.media_rows[0], batch.media_indices)
        if self._positions is not None:
            ops.add(residual, ops.take_rows(self._positions, batch.positions))
        if self._token_types is not None:
            ops.add(residual, ops.take_rows(self._token_types, batch.token_types))
        residual = apply_norm(self._embedding_norm, residual)
        if self._projection is not None and description.projects_after_norm:
            residual = ops.linear(residual, self._projection, self.residual_dtype)
        return residual

    def _with_tables(
        self, batch: StepBatch, caches: Sequence[LayerKVCache]
    ) -> dict[int, tuple[TablesAndCache, TablesAndCache | None]]:
        """Return the first and the second cache of each layer of this stage, with the tables of their groups."""
        own = self.description.caches_of(self.description.stage)
        with_tables = {i: (batch.groups[self._group_of_cache[i]], c) for i, c in zip(own, caches, strict=True)}
        of_layers = dict[int, tuple[TablesAndCache, TablesAndCache | None]]()
        for layer in self._blocks:
            of_layer = [with_tables[i] for i in self._caches_of_layers[layer]]
            of_layers[layer] = of_layer[0] if of_layer else _NO_CACHE, of_layer[1] if len(of_layer) > 1 else None
        return of_layers

    def _after_layer(
        self, layer: int, residual: Array, batch: StepBatch, deferred: Array | None, per_layer_inputs: Array | None
    ) -> None:
        """Change the residual stream in place after a block: steps 10 to 13 of `octavo.models.block`."""
        if deferred is not None:
            self._ops.add(residual, deferred)
        if layer < self.description.num_media_layers and batch.media_rows is not None:
            self._ops.add_rows(residual, batch.media_rows[layer + 1], batch.media_indices)
        if self._per_layer_embeddings is not None and per_layer_inputs is not None:
            self._per_layer_embeddings.add_to(residual, layer, per_layer_inputs)
        if (scale := self._layer_scales[layer]) != 1.0:
            self._ops.add(residual, residual, scale - 1.0)  # residual *= scale, in place

    def write_encoder_kv(self, rows: Array, positions: Array, slots: Array, caches: Sequence[LayerKVCache]) -> None:
        """Write the cross-attention keys and values of rows [N, H] of an encoder's output to `slots` [N] int64 of their
        group. `positions` [N] int64 have no effect; `caches` are as in `forward`."""
        for layer, number in self.cross_layers:
            layer.write(rows, positions, slots, caches[number])

    @property
    def cross_layers(self) -> list[tuple[CrossAttention, int]]:
        """Return the cross-attention layers of this stage, in order, each with the index of its cache in the stage."""
        first = self.description.caches_of(self.description.stage).start
        layers = [(block.cross_attention, i) for i, block in self._blocks.items()]
        return [(layer, self._caches_of_layers[i][0] - first) for layer, i in layers if layer is not None]

    def pool(self, hidden: Array, starts: Array, ends: Array) -> Array:
        """Return vectors [N, size] float32; vector n pools rows starts[n] .. ends[n] ([N] int64) of hidden [T, H]."""
        assert self._pooler is not None, f"{self.description.architecture} was not described as a model that pools"
        return self._pooler.forward(hidden, starts, ends)

    def logits(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden states [N, H] before the final norm."""
        head = self._projection_head
        consumer = self._lm_head if head is None else head.consumer
        return self.logits_of_normed(apply_norm(self._norm, hidden, consumer))

    def embed(self, token_ids: Array, dtype: str | None = None) -> Array:
        """Return the embeddings [T, H] of token_ids [T] int32, without positions. The default `dtype` is the model's.

        With `projects_after_norm`, rows are not projected yet and have the embedding's size."""
        ops, multiplier = self._ops, self.description.embedding_multiplier
        assert self._embedding is not None, "the first stage embeds"
        if self._projection is None:
            return self._embedding.forward(token_ids, dtype or self._dtype, multiplier)
        embedded = self._embedding.forward(token_ids, self._dtype, multiplier)
        if self.description.projects_after_norm:  # after positions, token types and a norm
            return embedded
        return ops.linear(embedded, self._projection, dtype or self._dtype)

    def final_norm(self, hidden: Array) -> Array:
        """Return the final norm of hidden [N, H], not quantized."""
        return apply_norm(self._norm, hidden)

    def logits_of_normed(self, hidden: Array) -> Array:
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
