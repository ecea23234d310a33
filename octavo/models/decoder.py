"""Builds the network of a `ModelDescription`: an `InputLayer`, blocks, an `OutputLayer`. With bidirectional attention
it is an encoder. Parts that a model lacks are None.

A step of Gemma 3n in two pipeline stages, with four residual streams side by side. Most models have a single stream,
and need the embedding only once:

    first stage                                           last stage

    token ids                                             rows [T, 5 * H]
      | embed                                               | split
    embedding [T, H] ----+---------------+                streams [T, 4 * H]    embedding [T, H]
      | expand           |               |                  |                     |
    streams [T, 4 * H]   per-layer       [zeros,            |                   per-layer inputs
      | layers <-------- inputs           embedding]        | layers <------------+
    streams                              |                streams
      +----------- add to the zeros ---> rows               | merge
                                         [T, 5 * H]       hidden states [T, H]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from octavo.kv_cache.groups import group_layers
from octavo.layers.altup import AltUp
from octavo.layers.cross_attention import CrossAttention
from octavo.layers.in_place import scale_in_place
from octavo.layers.parameters import NamedMatrix, Parameters
from octavo.layers.per_layer_embeddings import PerLayerEmbeddings
from octavo.layers.zero_rows import ZeroRows
from octavo.loading.weights import Weights
from octavo.models.altup_block import AltUpBlock
from octavo.models.block import Block, BlockBuilder, BlockLike, TablesAndCache, cache_indices_by_layer
from octavo.models.description import ModelDescription
from octavo.models.input_layer import InputLayer
from octavo.models.output_layer import OutputLayer
from octavo.ops import Array, LayerKVCache, Ops
from octavo.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class EmbeddingCopies:
    """What later layers and the next stage read of a step's embedding [T, H]: made before the layers overwrite it."""

    # [T, stage_width], rows for the next stage: zeros, to which this stage's last output is added, then the embedding
    stage_output: Array | None
    padded_embedding: Array | None  # [T, 2 * H]: a half that each reused layer overwrites, then the embedding
    per_layer_inputs: Array | None  # [T, layers * size]: parts of the per-layer embedding, which are only read


class Decoder:
    """The network of one pipeline stage: token ids to hidden states, hidden states to logits or vectors. It follows
    every protocol of `octavo.models.registry`: `Model`, `PoolingModel`, `StageModel`, `CrossModel`."""

    is_recordable = True  # see `Model`

    def __init__(
        self,
        description: ModelDescription,
        weights: Weights,
        ops: Ops,
        max_positions: int,
        dtype: str,
        build_block: BlockBuilder = Block,
    ) -> None:
        """Take the stage's tensors from `weights`, and pack them. `max_positions` is the most tokens of a sequence,
        `dtype` the type of activations. `build_block` builds a layer: an architecture may have its own. Raises
        `LoadError` for a missing tensor."""
        self.description, self._ops, self._dtype = description, ops, dtype
        self.vocab_size, self.hidden_size = description.vocab_size, description.hidden_size
        self.layer_caches = description.layer_caches
        self._group_of_cache = {
            i: group for group, members in enumerate(group_layers(self.layer_caches)) for i in members.layers
        }
        # A layer has three indices. `layer` or `i` is its index in the model: of `description.layers`, in
        # `description.stage`, of `self._blocks`. `description.checkpoint_layers[i]` is its index in the checkpoint, in
        # names of tensors. `self._cache_indices_by_layer[i]` are the indices of its caches (none, one or two) in
        # `layer_caches`. The `caches` of `forward` are the stage's: the first has index `cache_indices(stage).start`.
        self._cache_indices_by_layer = cache_indices_by_layer(description)
        parameters = Parameters(weights, ops, max_positions, dtype)
        # 1. From tokens to the first layer.
        self.input = InputLayer(description, parameters)
        self._altup: AltUp | None = None
        if description.altup is not None:
            is_first, is_last = description.is_first_stage, description.is_last_stage
            self._altup = AltUp(description.altup, self.hidden_size, parameters, is_first, is_last)
            build_block = partial(AltUpBlock, description.altup)
        self._build_zero_padded_embeddings(parameters)
        # 2. The layers, and what changes the residual stream between them.
        self._blocks = self._build_blocks(build_block, parameters)
        self._ignore_other_weights(weights)
        self._per_layer_embeddings: PerLayerEmbeddings | None = None
        if description.per_layer_embeddings is not None:
            self._per_layer_embeddings = PerLayerEmbeddings(
                description.per_layer_embeddings, description.stage, len(description.layers), self.hidden_size,
                parameters, description.layer_prefix, description.shard,
            )  # fmt: skip
        self._layer_scales = self._read_layer_scales(weights)
        self._on_layer_input: Callable[[int, Array], None] | None = None
        # 3. From the last layer to logits or vectors.
        self.output = OutputLayer(description, parameters, self.input.embedding)
        # 4. Facts for workers and adapters.
        self.residual_dtype = self._choose_residual_dtype()
        self._num_weight_bytes = parameters.num_matrix_bytes  # every part above has added its own
        self._matrices, self._expert_matrices = parameters.matrices, parameters.expert_matrices

    def _build_zero_padded_embeddings(self, parameters: Parameters) -> None:
        """Build `ZeroRows` for [zeros, embedding]. Reused layers put hidden states over the zeros
        (`_reused_input_rows`); the end of the stage adds its output to them (`_stage_rows`)."""
        description, size = self.description, self.hidden_size
        # Reused layers read rows [hidden, embedding].
        self._reused_input_rows: ZeroRows | None = None
        if any(description.layers[i].reused is not None for i in description.stage):
            self._reused_input_rows = ZeroRows(size, 2 * size, parameters)
        # The next stage reads rows [residual streams, embedding].
        self._stage_rows: ZeroRows | None = None
        if description.carries_embedding and not description.is_last_stage:
            self._stage_rows = ZeroRows(size, description.stage_width, parameters)

    def _build_blocks(self, build_block: BlockBuilder, parameters: Parameters) -> dict[int, BlockLike]:
        description, blocks = self.description, dict[int, BlockLike]()
        for i in description.stage:
            with parameters.sixteen_bit_inputs(i < description.num_precise_layers):
                prefix = f"{description.layer_prefix}{description.checkpoint_layers[i]}."
                blocks[i] = build_block(description.layers[i], self.hidden_size, parameters, prefix)
        return blocks

    def _ignore_other_weights(self, weights: Weights) -> None:
        """Name the tensors that this stage leaves, those of other stages and those of no stage, so that
        `Weights.check_all_taken` does not report them. Call this before it. A prefix may name a reused layer that this
        stage has too: what was taken stays taken."""
        description = self.description
        checkpoint_layers, stage = description.checkpoint_layers, description.stage
        # Other stages' layers, and layers after the last that are not used, such as multi-token prediction's.
        others = [checkpoint_layer for i, checkpoint_layer in enumerate(checkpoint_layers) if i not in stage]
        first_unused = max(checkpoint_layers, default=-1) + 1  # default: a part that `planning` measures has no layer
        for checkpoint_layer in (*others, *range(first_unused, first_unused + description.num_unused_layers)):
            weights.ignore(f"{description.layer_prefix}{checkpoint_layer}.")
        # A checkpoint has the weights of reused layers outside of its layers.
        reused = [layer.reused for i, layer in enumerate(description.layers) if i not in stage]
        reused_prefixes = [f"{one.name}." for one in reused if one is not None]
        for prefix in (*description.other_stages, *reused_prefixes, *description.unused):
            weights.ignore(prefix)

    def _read_layer_scales(self, weights: Weights) -> dict[int, float]:
        """Return the factor of the residual stream after each layer that has one."""
        description, scales = self.description, dict[int, float]()
        for i in description.stage:
            if (name := description.layers[i].residual_scale_name) is not None:
                tensor = f"{description.layer_prefix}{description.checkpoint_layers[i]}.{name}"
                scales[i] = float(weights.take(tensor, (1,))[0])
        return scales

    def _choose_residual_dtype(self) -> str:
        """Return the type of the residual stream: float32 if every reader accepts it and the model has no per-layer
        embeddings, otherwise the model's type. In bfloat16 the sum over many layers would lose more than quantized
        products do (docs/performance.md)."""
        readers = [block.accepts_float32_residual for block in self._blocks.values()]
        if self.description.is_last_stage:
            readers.append(self.output.accepts_float32_residual)
        return "float32" if self._per_layer_embeddings is None and all(readers) else self._dtype

    def watch_layer_inputs(self, watch: Callable[[int, Array], None]) -> None:
        """Have a draft head's `watch` called with each layer's index and its input [T, streams * H], in order. Call
        this before steps are captured."""
        assert self._on_layer_input is None, "one draft head reads hidden states"
        self._on_layer_input = watch

    @property
    def matrices(self) -> tuple[NamedMatrix, ...]:
        """Return the matrices that adapters may change. A tied matrix counts as two: embedding and output."""
        return (*self._named_matrices(), *(matrix for named in self._expert_matrices for matrix in named()))

    def _named_matrices(self) -> Iterator[NamedMatrix]:
        """Yield the packed matrices. A tied matrix is yielded twice in the first stage, as embedding and as output; in
        a later stage only as output."""
        output_name, is_tied = self.description.output_name, self.description.tie_word_embeddings
        embedding = self.input.embedding
        for matrix in self._matrices:
            if matrix.weight is embedding and self.description.is_first_stage:
                yield replace(matrix, replaceable=True, is_embedding=True)
            if matrix.weight is self.output.lm_head:
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
        """Elements of a row for the next stage: the residual streams, and the embedding if later layers read it."""
        return self.description.stage_width

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """Return hidden states [T, H]: before the final norm, or after it if the model pools. A stage that is not the
        last returns rows [T, `stage_width`].

        The type is `residual_dtype`; after the final norm, the model's. `caches[i]` is for the stage's i-th entry of
        `layer_caches`."""
        # 1. Embed the tokens, or take the rows of the previous stage.
        residual, embedding = self._embed_or_receive(batch)
        # 2. Compute what later layers need from the embedding, before the layers overwrite it.
        copies = self._copy_embedding(batch, embedding)
        # 3. Run the layers. With AltUp there are several residual streams side by side.
        if self._altup is not None and self.description.is_first_stage:
            residual = self._altup.expand(residual)
        residual = self._run_layers(residual, batch, caches, copies)
        # 4. Return the rows for the next stage, or the hidden states.
        if copies is not None and copies.stage_output is not None:
            # A stage with a layer that reads the embedding has the model's type (`_choose_residual_dtype`), and
            # `_agree_on_stream` (worker.py) gives it to all stages.
            assert self.residual_dtype == self._dtype, "rows for the next stage have the model's type"
            self._ops.add(copies.stage_output[:, : residual.shape[1]], residual)
            return copies.stage_output
        if self._altup is not None and self.description.is_last_stage:
            residual = self._altup.merge(residual)
        return self.output.final_norm(residual) if self.output.is_pooler else residual

    def logits(self, hidden: Array) -> Array:
        return self.output.logits(hidden)

    def pool(self, hidden: Array, starts: Array, ends: Array) -> Array:
        return self.output.pool(hidden, starts, ends)

    def _copy_embedding(self, batch: StepBatch, embedding: Array | None) -> EmbeddingCopies | None:
        """Return what later layers and stages need from the embedding [T, H]; None if they need nothing, as in most
        models."""
        per_layer, stage_rows, reused_rows = self._per_layer_embeddings, self._stage_rows, self._reused_input_rows
        if per_layer is None and stage_rows is None and reused_rows is None:
            return None
        assert embedding is not None, "models with such layers carry the embedding"
        per_layer_inputs = None if per_layer is None else per_layer.embed(batch.token_ids, embedding)
        return EmbeddingCopies(
            stage_output=None if stage_rows is None else stage_rows.with_zeros_before(embedding),
            padded_embedding=None if reused_rows is None else reused_rows.with_zeros_before(embedding),
            per_layer_inputs=per_layer_inputs,
        )

    def _run_layers(
        self, residual: Array, batch: StepBatch, caches: Sequence[LayerKVCache], copies: EmbeddingCopies | None
    ) -> Array:
        """Return the residual streams [T, streams * H] after this stage's layers."""
        caches_by_layer = self._resolve_caches(batch, caches)
        padded_embedding = None if copies is None else copies.padded_embedding
        deferred_by_layer: dict[int, Array] = {}  # outputs of earlier layers, by the layer after which each is added
        for layer, block in self._blocks.items():
            if self._on_layer_input is not None:
                self._on_layer_input(layer, residual)
            residual, deferred = block.forward(residual, batch, caches_by_layer[layer], padded_embedding)
            if deferred is not None:
                deferred_by_layer[layer + self.description.layers[layer].deferred_by] = deferred
            self._finish_layer(layer, residual, batch, deferred_by_layer.pop(layer, None), copies)
        assert not deferred_by_layer, "a deferred output would be added in another stage"
        return residual

    def _embed_or_receive(self, batch: StepBatch) -> tuple[Array, Array | None]:
        """Return the residual streams [T, streams * H] before this stage's layers, and the embedding [T, H], which may
        be the same array. Without `carries_embedding` later stages have no embedding."""
        if batch.hidden_in is None:
            embedding = self.input.forward(batch, self.residual_dtype)
            return embedding, embedding
        if not self.description.carries_embedding:
            return batch.hidden_in, None
        width = self.description.stage_width - self.description.hidden_size
        return batch.hidden_in[:, :width], batch.hidden_in[:, width:]

    def _resolve_caches(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> dict[int, list[TablesAndCache]]:
        """Return the caches of each layer of this stage, with the tables of their groups."""
        stage_caches = self.description.cache_indices(self.description.stage)
        with_tables = {i: (batch.groups[self._group_of_cache[i]], c) for i, c in zip(stage_caches, caches, strict=True)}
        return {layer: [with_tables[i] for i in self._cache_indices_by_layer[layer]] for layer in self._blocks}

    def _finish_layer(
        self, layer: int, residual: Array, batch: StepBatch, deferred_output: Array | None,
        copies: EmbeddingCopies | None,
    ) -> None:  # fmt: skip
        """Change the residual stream in place after a block: steps 10 to 13 of `octavo.models.block`."""
        # 10. Add the deferred output of an earlier layer.
        if deferred_output is not None:
            self._ops.add(residual, deferred_output)
        # 11. Add media rows.
        if layer < self.description.num_media_layers and batch.media_rows is not None:
            self._ops.add_rows(residual, batch.media_rows[layer + 1], batch.media_indices)
        # 12. Add the gated per-layer embedding.
        if self._per_layer_embeddings is not None and copies is not None and copies.per_layer_inputs is not None:
            self._per_layer_embeddings.add_to(residual, layer, copies.per_layer_inputs)
        # 13. Multiply the stream by the checkpoint's factor.
        scale_in_place(self._ops, residual, self._layer_scales.get(layer, 1.0))

    def write_encoder_kv(self, rows: Array, positions: Array, slots: Array, caches: Sequence[LayerKVCache]) -> None:
        """Write the cross-attention keys and values of rows [N, H] of an encoder's output to `slots` [N] int64 of their
        group. `positions` [N] int64 may be any valid positions: keys are not rotated. `caches` are as in `forward`."""
        for attention, cache_index in self.cross_layers:
            attention.write(rows, positions, slots, caches[cache_index])

    @property
    def cross_layers(self) -> list[tuple[CrossAttention, int]]:
        """Return the cross-attention layers of this stage, in order, each with the index of its cache in the stage."""
        first = self.description.cache_indices(self.description.stage).start
        of_layers = [(block.cross_attention, i) for i, block in self._blocks.items()]
        return [(one, self._cache_indices_by_layer[i][0] - first) for one, i in of_layers if one is not None]
