"""Embedding: a table's rows by token. With several workers each has some of the columns; the columns are gathered
unchanged, so the bits are the same as with one worker."""

from octavo.layers.all_gather import AllGather
from octavo.layers.parameters import Parameters
from octavo.layers.tensor_parallel import Shard
from octavo.ops import Array
from octavo.quantization.formats import PLAIN

_WHOLE_GROUPS = 256  # the most columns of a group of quantized weights; tables are cut at multiples of it


class Embedding:
    """An embedding, or only some `columns` of its rows. With `is_output` the matrix also makes logits.

    If the columns cannot be cut, for example because a row has one scale, each worker has the whole table."""

    def __init__(
        self, name: str, num_rows: int, size: int, parameters: Parameters, shard: Shard, bias: bool | str = False,
        columns: range | None = None, is_output: bool = False,
    ) -> None:  # fmt: skip
        self._ops, self._all_gather, self._wanted = parameters.ops, None, None
        wanted = range(size) if columns is None else columns
        stored = parameters.weights.matrix_format(f"{name}.weight")

        def can_be_cut(own: range, num_parts: int) -> bool:
            each, left = divmod(len(own), num_parts)
            is_of_groups = stored != "FP8" and own.start % _WHOLE_GROUPS == each % _WHOLE_GROUPS == 0
            return not left and (stored in PLAIN or is_of_groups)

        taken = wanted
        if len(wanted) < size and not can_be_cut(wanted, 1):
            self._wanted, taken = slice(wanted.start, wanted.stop), range(size)
        if not shard.is_whole and can_be_cut(taken, shard.size):
            own = shard.of(len(taken), "columns of an embedding")
            self._all_gather = AllGather(parameters.ops, shard, own, len(taken), "columns of an embedding")
            taken = taken[own.start : own.stop]
        self.weight = parameters.linear(
            [name], [num_rows], len(taken), bias, columns=(taken.start, size), is_embedding=not is_output
        )

    def forward(self, token_ids: Array, dtype: str, scale: float = 1.0) -> Array:
        """Return the rows [T, columns] of token_ids [T] int32."""
        found = self._ops.embedding(token_ids, self.weight, dtype, scale)
        if self._all_gather is not None:
            found = self._all_gather.forward(found)
        return found if self._wanted is None else found[:, self._wanted]
