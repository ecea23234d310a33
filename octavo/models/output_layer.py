"""The last part of a `Decoder`: from hidden states to logits or vectors."""

from __future__ import annotations

from typing import cast

import numpy as np

from octavo.layers.norm import Norm, apply_norm, norm_quantizes
from octavo.layers.parameters import Parameters
from octavo.layers.pooler import Pooler
from octavo.layers.projection_head import ProjectionHead
from octavo.models.description import ModelDescription
from octavo.ops import Array, LinearWeight, ParallelOps

_NEVER_SAMPLED = -3e4  # a logit within float16's range


class OutputLayer:
    """The final norm, and the output matrix or a pooler. Only the last stage has them."""

    def __init__(self, description: ModelDescription, parameters: Parameters, embedding: LinearWeight | None) -> None:
        """`embedding` is the packed embedding of this stage: the output matrix of a tied model."""
        self._description, self._ops = description, parameters.ops
        self._own_vocab = description.shard.cut(description.vocab_size)
        self._norm: Norm | None = None
        self._pooler: Pooler | None = None
        self._projection_head: ProjectionHead | None = None
        self.lm_head: LinearWeight | None = None
        if description.is_last_stage:
            self._build(parameters, embedding)

    def _build(self, parameters: Parameters, embedding: LinearWeight | None) -> None:
        description, size = self._description, self._description.hidden_size
        if description.norm is not None:
            divisor = description.logits_divisor  # dividing in the norm gives the same as dividing logits (Granite)
            self._norm = Norm(description.norm, parameters, description.norm_name, size, divisor=divisor)
        if description.pooling is not None:
            self._pooler = Pooler(description.pooling, size, description.vocab_size, parameters)
        elif description.projection_head is not None:
            self._projection_head = ProjectionHead(description.projection_head, size, parameters)
        self.lm_head = self._build_lm_head(parameters, embedding)

    def _build_lm_head(self, parameters: Parameters, embedding: LinearWeight | None) -> LinearWeight | None:
        description = self._description
        if description.pooling is not None:
            return embedding  # a model that pools makes no logits, but an adapter may name this matrix as the output
        if description.num_input_only_tokens:
            return self._build_padded_lm_head(parameters)
        if description.tie_word_embeddings and description.shard.is_whole:
            return embedding
        # With several workers a tied matrix is read again: the embedding is cut by columns, the output by rows.
        name = description.embedding_name if description.tie_word_embeddings else description.output_name
        head = description.projection_head
        size = description.hidden_size if head is None else head.size
        return parameters.linear(
            [name], [description.vocab_size], size, description.output_bias_name, own=self._own_vocab
        )

    def _build_padded_lm_head(self, parameters: Parameters) -> LinearWeight:
        """Return the output matrix with added rows of zeros for tokens that have no rows in the checkpoint. A bias
        keeps these tokens from being sampled."""
        description = self._description
        assert not description.tie_word_embeddings and not description.output_bias
        num_output_tokens = description.vocab_size - description.num_input_only_tokens
        name, shape = f"{description.output_name}.weight", (num_output_tokens, description.hidden_size)
        rows = parameters.weights.take(name, shape)
        bias = np.zeros(description.vocab_size, rows.dtype)
        bias[num_output_tokens:] = _NEVER_SAMPLED
        own = slice(self._own_vocab.start, self._own_vocab.stop)
        return parameters.packed(np.pad(rows, ((0, description.num_input_only_tokens), (0, 0)))[own], bias[own])

    @property
    def is_pooler(self) -> bool:
        """Whether this stage makes vectors."""
        return self._pooler is not None

    @property
    def accepts_float32_residual(self) -> bool:
        """Whether the last layer's residual stream may be float32 if the model's type is smaller. A pooler takes either
        type, after the final norm."""
        if self._projection_head is not None:
            return False
        return self._norm is not None if self.is_pooler else norm_quantizes(self._norm, self.lm_head)

    @property
    def can_compute_locally(self) -> bool:
        """Return whether this worker can compute logits without other workers."""
        return self._description.makes_logits and self.lm_head is not None and self._description.shard.is_whole

    def pool(self, hidden: Array, starts: Array, ends: Array) -> Array:
        """Return vectors [N, size] float32; vector n pools rows starts[n] .. ends[n] ([N] int64) of hidden [T, H]."""
        assert self._pooler is not None, f"{self._description.architecture} was not described as a model that pools"
        return self._pooler.forward(hidden, starts, ends)

    def logits(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden states [N, H] before the final norm."""
        head = self._projection_head
        consumer = self.lm_head if head is None else head.consumer
        return self.logits_of_normed(apply_norm(self._norm, hidden, consumer))

    def final_norm(self, hidden: Array) -> Array:
        """Return the final norm of hidden [N, H], not quantized."""
        return apply_norm(self._norm, hidden)

    def logits_of_normed(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden [N, H] after the final norm."""
        description, ops = self._description, self._ops
        assert self.lm_head is not None, "the last stage makes logits"
        if self._projection_head is not None:
            hidden = self._projection_head.forward(hidden, self.lm_head)
        logits = ops.linear(hidden, self.lm_head, "float32")
        if not description.shard.is_whole:
            logits = cast(ParallelOps, ops).all_gather(logits, self._own_vocab.start, description.vocab_size)
        cap = description.logits_softcap
        return ops.activation(logits, "softcap", parameters=(cap,)) if cap else logits
