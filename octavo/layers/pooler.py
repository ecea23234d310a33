"""Pooling of a text's hidden states into one vector, or into a vector for each token, and the projection heads after
it."""

from dataclasses import dataclass

import numpy as np

from octavo.layers.parameters import Parameters
from octavo.layers.projection_head import ProjectionHead, ProjectionHeadDescription
from octavo.loading.weights import floats
from octavo.ops import Array

# vLLM's name of a kind of pooling -> the operation's. "ALL", "CLS" and "LAST" pool single rows: means of one row.
KINDS = {
    "ALL": "mean", "CLS": "mean", "LAST": "mean", "MEAN": "mean", "MAX": "max", "MEAN_SQRT": "mean_sqrt",
    "WEIGHTED_MEAN": "weighted_mean",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolingDescription:
    """The kind of pooling, and the heads after it.

    With `label_tokens` the head consists of these tokens' rows of the output matrix `output_name`. With `is_difference`
    it is the second token's row minus the first token's.
    """

    kind: str  # a key of `KINDS`
    head: tuple[ProjectionHeadDescription, ...] = ()
    label_tokens: tuple[int, ...] = ()
    is_difference: bool = False
    output_name: str = ""
    output_rows: int | None = None  # rows of the output matrix; None: the vocabulary size

    def size(self, hidden_size: int) -> int:
        if self.label_tokens:
            return 1 if self.is_difference else len(self.label_tokens)
        return self.head[-1].size if self.head else hidden_size


class Pooler:
    """Pools given ranges of rows: whole texts, or single tokens, which stay unchanged."""

    def __init__(
        self, description: PoolingDescription, hidden_size: int, vocab_size: int, parameters: Parameters
    ) -> None:
        self._ops, self._dtype = parameters.ops, parameters.dtype
        self._kind = KINDS[description.kind]
        self._heads, size = [], hidden_size
        for one in description.head:
            self._heads.append(ProjectionHead(one, size, parameters))
            size = one.size
        self._labels = None
        if description.label_tokens:
            name = f"{description.output_name}.weight"
            num_rows = description.output_rows or vocab_size
            rows = parameters.weights.take(name, (num_rows, hidden_size))[list(description.label_tokens)]
            if description.is_difference:
                rows = (rows[1:].astype(np.float32) - rows[:1].astype(np.float32)).astype(rows.dtype)
            self._labels = self._ops.pack_linear([floats(rows)])

    def forward(self, hidden: Array, starts: Array, ends: Array) -> Array:
        """Return vectors [N, size] float32; vector n pools rows starts[n] .. ends[n] ([N] int64) of hidden [T, H], the
        hidden states after the final norm."""
        has_head = self._labels is not None or bool(self._heads)
        pooled = self._ops.pool(hidden, starts, ends, self._kind, self._dtype if has_head else "float32")
        if self._labels is not None:
            return self._ops.linear(pooled, self._labels, "float32")
        for number, head in enumerate(self._heads, 1):
            is_last = number == len(self._heads)
            consumer = None if is_last else self._heads[number].consumer
            pooled = head.forward(pooled, consumer, "float32" if is_last else None)
        return pooled
