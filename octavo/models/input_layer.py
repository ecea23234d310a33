"""The first part of a `Decoder`: from token ids to the input of the first layer."""

from octavo.layers.embedding import Embedding
from octavo.layers.norm import Norm, apply_norm
from octavo.layers.parameters import Parameters
from octavo.layers.positions import position_table
from octavo.models.description import ModelDescription
from octavo.ops import Array, LinearWeight
from octavo.step_batch import StepBatch


class InputLayer:
    """The embedding, its projection to the hidden size, positions, token types, and a norm. The first stage has all of
    them that the description has. The last stage has the embedding alone if it is the output matrix too."""

    def __init__(self, description: ModelDescription, parameters: Parameters) -> None:
        self._description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        self._embedding = self._build_embedding(parameters)
        self._projection: LinearWeight | None = None
        self._norm: Norm | None = None
        self._positions: Array | None = None
        self._token_types: Array | None = None
        if description.is_first_stage:
            self._build_projection(parameters)
            self._build_tables(parameters)

    def _build_embedding(self, parameters: Parameters) -> Embedding | None:
        description, shard = self._description, self._description.shard
        # With several workers a tied matrix is read twice: the embedding is cut by columns, the output matrix by rows.
        is_output = description.tie_word_embeddings and description.makes_logits and shard.is_whole
        if not description.is_first_stage and not is_output:
            return None
        return Embedding(
            description.embedding_name, description.vocab_size, description.embedding_size or description.hidden_size,
            parameters, shard, description.output_bias_name if is_output else False, is_output=is_output,
        )  # fmt: skip

    def _build_projection(self, parameters: Parameters) -> None:
        description, num_in = self._description, self._description.embedding_size
        if num_in is not None:
            name, has_bias = description.embedding_projection_name, description.projects_after_norm
            self._projection = parameters.linear([name], [description.hidden_size], num_in, has_bias)

    def _build_tables(self, parameters: Parameters) -> None:
        """Build the norm, and the tables of positions and token types."""
        description, size = self._description, self._description.hidden_size
        if description.projects_after_norm and description.embedding_size is not None:
            size = description.embedding_size
        if description.embedding_norm is not None:
            self._norm = Norm(description.embedding_norm, parameters, description.embedding_norm_name, size)
        if description.positions is not None:
            self._positions = position_table(description.positions, parameters, size)
        if num_types := description.num_token_types:
            self._token_types = parameters.array(description.token_types_name, (num_types, size))

    @property
    def embedding(self) -> LinearWeight | None:
        """The packed embedding, if this stage has it."""
        return None if self._embedding is None else self._embedding.weight

    @property
    def can_embed_locally(self) -> bool:
        """Return whether this worker can `embed` without other workers."""
        has_projection = self._projection is not None or self._description.embedding_size is None
        return self._embedding is not None and has_projection and self._description.shard.is_whole

    def forward(self, batch: StepBatch, dtype: str) -> Array:
        """Return the first layer's input [T, H] as `dtype`."""
        ops = self._ops
        # 1. Embed the tokens. 2. Replace the embeddings of media tokens.
        hidden = self.embed(batch.token_ids, dtype)
        if batch.media_rows is not None:
            ops.replace_rows(hidden, batch.media_rows[0], batch.media_indices)
        # 3. Add positions and token types.
        if self._positions is not None:
            ops.add(hidden, ops.take_rows(self._positions, batch.positions))
        if self._token_types is not None:
            ops.add(hidden, ops.take_rows(self._token_types, batch.token_types))
        # 4. Norm. 5. Project the result, if `embed` has not.
        hidden = apply_norm(self._norm, hidden)
        if self._projection is not None and self._description.projects_after_norm:
            hidden = ops.linear(hidden, self._projection, dtype)
        return hidden

    def embed(self, token_ids: Array, dtype: str | None = None) -> Array:
        """Return the embeddings [T, H] of token_ids [T] int32, without positions. The default `dtype` is the model's.

        With `projects_after_norm`, rows are not projected yet and have the embedding's size."""
        multiplier = self._description.embedding_multiplier
        assert self._embedding is not None, "the first stage embeds"
        if self._projection is None:
            return self._embedding.forward(token_ids, dtype or self._dtype, multiplier)
        embedded = self._embedding.forward(token_ids, self._dtype, multiplier)
        if self._description.projects_after_norm:
            return embedded
        return self._ops.linear(embedded, self._projection, dtype or self._dtype)
