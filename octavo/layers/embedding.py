"""Rows of a table by token. Workers share them out by columns: each looks up its part of every row, and the parts are
brought together as they are, so that bits are those of one worker."""

from __future__ import annotations

from octavo.layers.gathered import Gathered
from octavo.layers.parameters import Parameters
from octavo.layers.share import Share
from octavo.ops import Array
from octavo.quantization.formats import PLAIN

_WHOLE_GROUPS = 256  # columns that a group of weights has at most


class Embedding:
    """Of a table whose columns cannot be cut, as those of a row with one scale, each worker has all."""

    def __init__(
        self, name: str, num_rows: int, size: int, parameters: Parameters, share: Share, bias: bool | str = False
    ) -> None:
        self._ops, self._gathered, cut = parameters.ops, None, (0, 1)
        stored = parameters.weights.matrix_format(f"{name}.weight")
        of_whole_groups = stored != "FP8" and size % (_WHOLE_GROUPS * share.size) == 0
        if not share.is_whole and size % share.size == 0 and (stored in PLAIN or of_whole_groups):
            cut = share.rank, share.size
            own = share.of(size, "columns of an embedding")
            self._gathered = Gathered(parameters.ops, share, own, size, "columns of an embedding")
        self.weight = parameters.linear([name], [num_rows], size // cut[1], bias, part=cut)

    def forward(self, token_ids: Array, dtype: str, scale: float = 1.0) -> Array:
        """[T] int32 -> [T, size]"""
        found = self._ops.embedding(token_ids, self.weight, dtype, scale)
        return found if self._gathered is None else self._gathered.forward(found)
