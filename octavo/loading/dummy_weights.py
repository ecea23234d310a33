"""Weights without a checkpoint: random ones that depend on the seed only, for tests and benchmarks."""

import os
import zlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.loading.weights import Weights, floats
from octavo.quantization import StoredWeight
from octavo.quantization.array_functions import FLOATS, converted
from octavo.quantization.formats import PLAIN_OF_DTYPE

_STD = 0.02  # the initializer_range of most configurations
# How many random numbers are drawn for small and for large tensors. They are primes, so that no two rows of a matrix
# take the same stretch of numbers.
_FEW, _MANY = 1_048_583, 16_777_259


class DummyWeights(Weights):
    """Weights that have every tensor, in any shape: a stretch of the same random numbers, from a place that depends on
    the tensor's name. So a large model is made as fast as memory is copied. Types differ by rounding only."""

    def __init__(self, dtype: str, seed: int | None, quantization: str | None = None) -> None:
        super().__init__(dtype, quantization)
        self._seed = int.from_bytes(os.urandom(4)) if seed is None else seed
        self._numbers = cache(self._draw)
        self._last: tuple[str, StoredWeight] | None = None

    def _draw(self, count: int) -> NDArray[Any]:
        # Philox gives the same numbers on every machine (Salmon et al. 2011).
        generator = np.random.Generator(np.random.Philox(zlib.crc32(f"{self._seed}".encode())))
        return converted(generator.standard_normal(count, np.float32) * np.float32(_STD), self._dtype)

    def __contains__(self, name: str) -> bool:
        return True

    def take(
        self, name: str, shape: tuple[int, ...], dtype: str | None = None, own: range | None = None
    ) -> NDArray[Any]:
        if own is not None:
            return self.take(name, shape, dtype)[own.start : own.stop]
        if dtype not in (None, self._dtype):
            return converted(self.take(name, shape), dtype)
        if name.endswith("norm.weight") or (len(shape) == 1 and name.endswith(".weight")):
            return np.ones(shape, FLOATS[self._dtype])
        out = np.empty(shape, FLOATS[self._dtype])
        flat = out.reshape(-1)
        numbers = self._numbers(_FEW if len(flat) <= _FEW else _MANY)
        # crc32 rather than hash(), which differs between processes.
        begin, at = zlib.crc32(name.encode()) % len(numbers), 0
        while at < len(flat):
            part = numbers[begin : begin + len(flat) - at]
            flat[at : at + len(part)] = part
            begin, at = 0, at + len(part)
        return out

    def stored_format(self, name: str) -> str:
        return PLAIN_OF_DTYPE[self._dtype]

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        if self._last is None or self._last[0] != name:  # experts that share a tensor are taken one after the other
            self._last = name, floats(self.take(name, shape))
        return self._last[1]
