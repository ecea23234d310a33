"""A matrix as a file holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix of `shape` [N, K]; floats are formats "F32", "F16", "BF16" with the one tensor "data"."""

    format: str
    tensors: Mapping[str, Any]
    shape: tuple[int, int]

    @property
    def data(self) -> Any:
        return self.tensors["data"]

    def rows(self, begin: int, end: int) -> StoredWeight:
        return StoredWeight(self.format, {"data": self.data[begin:end]}, (end - begin, self.shape[1]))
