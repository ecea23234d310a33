"""What a model takes from a checkpoint, found by building it over weights that only take notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.stored import StoredWeight


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    name: str
    shape: tuple[int, ...]
    share: StoredWeight | None

    @property
    def is_matrix(self) -> bool:
        return self.share is not None


class RecordingWeights:
    def __init__(self, dtype: str) -> None:
        self.tensors: list[RecordedTensor] = []

    def take(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        self.tensors.append(RecordedTensor(name, shape, None))
        return np.broadcast_to(np.zeros((), np.float32), shape)

    def take_matrix(
        self, name: str, shape: tuple[int, int], rows: tuple[int, int] | None = None, columns: Any = None
    ) -> StoredWeight:
        stored = StoredWeight("F32", {"data": np.broadcast_to(np.zeros((), np.float32), shape)}, shape)
        if rows is not None:
            stored = stored.rows(*rows)
        self.tensors.append(RecordedTensor(name, shape, stored))
        return stored
