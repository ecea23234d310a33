"""A matrix as a file holds it: loading, models and packers exchange matrices in this form only.

The other modules of `octavo.quantization` know what a format's tensors mean. This module cuts matrices by rows and
columns without reading them, for the parts of fused matrices and for tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.quantization.formats import AXES, BLOCK_TYPES, COLUMN_UNITS, DATA_AXES


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix of `shape` [N, K]. Its tensors may alias a mapped file: never write to them.

    - "F32", "F16", "BF16": floats "data" [N, K]; "INT8", "INT4", "FP8": the same, and the packer quantizes them.
    - GGUF's block formats ("Q4_1", "Q6_K", ...): "data" uint8 [N, bytes of a row]. Rows may be any distance apart.
    - "GPTQ", "GPTQ_V2": "qweight" int32 [K * bits / 32, N], "qzeros" int32 [groups, N * bits / 32], "scales"
      [groups, N] and, in some, "g_idx" int32 [K]. "AWQ": "qweight" int32 [K, N / 8], "qzeros", "scales".
    - "CODES4", "CODES8": unpacked matrices (`Codes`): "codes", "scales", and perhaps "minima" and "order".
    - The tensors of other formats are described in the modules that unpack them.

    Tensors are numpy arrays; a GPU's packers make a `StoredWeight` of torch tensors.
    """

    format: str
    tensors: Mapping[str, Any]
    shape: tuple[int, int]

    @property
    def data(self) -> Any:
        """The only tensor of a format with one tensor."""
        return self.tensors["data"]

    @property
    def num_bytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors.values())

    @property
    def has_single_rows(self) -> bool:
        """True if no two outputs share a word, so that rows can be cut one by one."""
        return self._unit(0) == 1

    def rows(self, begin: int, end: int) -> StoredWeight:
        """Return rows begin .. end - 1 as a matrix over the same memory. Raises `ConfigError` if a bound would cut a
        word that holds several outputs."""
        return self._shard(0, begin, end)

    def columns(self, begin: int, end: int) -> StoredWeight:
        """Return columns begin .. end - 1 as a matrix over the same memory. Raises `ConfigError` if a bound would cut a
        block or group.

        "FP8" has a scale for each row of the packed matrix: a part of the columns gets its own scales.
        """
        return self._shard(1, begin, end)

    def take_rows(self, order: Any) -> StoredWeight:
        """Return a copy of the rows with the numbers `order`. Raises `ConfigError` if outputs share words."""
        if not self.has_single_rows:
            raise ConfigError(f"rows of a {self.format} matrix {list(self.shape)} cannot be put in another order.")
        tensors = {}
        for name, tensor in self.tensors.items():
            axis = self._axis(name, 0)
            tensors[name] = tensor if axis is None else tensor[order] if axis == 0 else tensor[:, order]
        return StoredWeight(self.format, tensors, (len(order), self.shape[1]))

    def every_second_row(self, first: int) -> StoredWeight:
        """Return rows first, first + 2, ... over the same memory. Raises `ConfigError` if outputs share words."""
        if not self.has_single_rows:
            raise ConfigError(f"rows of a {self.format} matrix {list(self.shape)} do not lie by themselves.")
        tensors = {}
        for name, tensor in self.tensors.items():
            axis = self._axis(name, 0)
            tensors[name] = tensor if axis is None else tensor[first::2] if axis == 0 else tensor[:, first::2]
        return StoredWeight(self.format, tensors, (len(range(first, self.shape[0], 2)), self.shape[1]))

    def scaled(self, scale: float) -> StoredWeight:
        """Return `scale` times the matrix, in its own type. Raises `ConfigError` unless the format is one of floats,
        "INT8" or "FP8"."""
        if scale == 1.0:
            return self
        if self.format not in ("F32", "F16", "BF16", "INT8", "FP8"):
            raise ConfigError(f"a {self.format} matrix {list(self.shape)} cannot be multiplied with {scale}.")
        data = (self.data.astype("float32") * scale).astype(self.data.dtype)
        return StoredWeight(self.format, {"data": data}, self.shape)

    def transposed(self) -> StoredWeight:
        """Return the matrix as [K, N], over the same memory. Raises `ConfigError` if its elements are not floats."""
        if self.format in AXES or self.format in BLOCK_TYPES:
            raise ConfigError(f"{self.format} matrices cannot be transposed.")
        return StoredWeight(self.format, {"data": self.data.T}, self.shape[::-1])

    def shard(self, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> StoredWeight:
        """Return the part of the matrix within the bounds (begin, end) of rows and columns; None: all."""
        found = self if rows is None else self.rows(*rows)
        return found if columns is None else found.columns(*columns)

    def _shard(self, side: int, begin: int, end: int) -> StoredWeight:
        size = self.shape[side]
        assert 0 <= begin <= end <= size, f"{begin} to {end} of {size}"
        unit = self._unit(side)
        if any(bound % unit and bound != size for bound in (begin, end)):
            what = ("rows", "columns")[side]
            raise ConfigError(
                f"{what} {begin} to {end} of a {self.format} matrix {list(self.shape)} cannot be separated: {what} are "
                f"stored in groups of {unit}. Divide the model among another number of devices."
            )
        tensors = {}
        for name, tensor in self.tensors.items():
            axis = self._axis(name, side)
            if axis is None:
                tensors[name] = tensor
                continue
            entries = tensor.shape[axis]
            part = slice(begin * entries // size, end * entries // size)
            tensors[name] = tensor[part] if axis == 0 else tensor[:, part]
        g_idx = tensors.get("g_idx")
        if side == 1 and "places" in tensors:
            raise ConfigError(
                f"columns of a {self.format} matrix {list(self.shape)} with a sparse part cannot be divided among "
                "devices."
            )
        if side == 1 and ("order" in tensors or (g_idx is not None and bool((g_idx[1:] < g_idx[:-1]).any()))):
            raise ConfigError(
                f"columns of a {self.format} matrix {list(self.shape)} that was quantized in the order of activations "
                "(desc_act) cannot be divided among devices."
            )
        if side == 1 and "g_idx" in tensors and self._axis("scales", side) is not None:
            first_group = begin * self.tensors["scales"].shape[0] // size
            tensors["g_idx"] = tensors["g_idx"] - first_group
        shape = (end - begin, self.shape[1]) if side == 0 else (self.shape[0], end - begin)
        return StoredWeight(self.format, tensors, shape)

    def _unit(self, side: int) -> int:
        """Return the number of which cuts must be multiples: rows for side 0, columns for side 1."""
        if self.format not in AXES:
            return COLUMN_UNITS.get(self.format, 1) if side == 1 else 1
        size, unit = self.shape[side], 1
        for name, tensor in self.tensors.items():
            axis = self._axis(name, side)
            if axis is not None:  # an entry of the tensor may hold several elements: a word, or a group's scale
                entries = tensor.shape[axis]
                # 32 elements of three bits take three words. With a shorter last group, the size of a group is unknown.
                is_whole = size % entries == 0 or 32 * entries % size == 0
                unit = math.lcm(unit, size // math.gcd(size, entries) if is_whole else size)
        return unit

    def _axis(self, name: str, side: int) -> int | None:
        """Return the axis of a tensor over rows (side 0) or columns (side 1); None if the whole tensor belongs to every
        row or column."""
        axis = AXES.get(self.format, DATA_AXES)[name][side]
        is_single_group = side == 1 and axis is not None and self.tensors[name].shape[axis] == 1
        return None if is_single_group else axis
