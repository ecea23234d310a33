"""Measures the best rates of this machine's processors with the native kernels, in about a second: bytes read and
operations.

Every rate is the fastest of a few tries, because other programs can only slow a try down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter

import ml_dtypes
import numpy as np

_READ_BYTES = 384 << 20  # larger than the last-level cache of most processors
_MATRIX = (4096, 2048)  # [N, K] of the products
_ROWS = 256
_TRIES_S = 0.15  # for each figure


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    bytes_per_s: float  # read from memory by all threads
    int8_per_s: float  # multiplications and additions of 8-bit products
    bf16_per_s: float

    def operations_per_s(self, is_quantized: bool) -> float:
        return self.int8_per_s if is_quantized else self.bf16_per_s


@cache
def measure_speed() -> MachineSpeed:
    """Return the machine's speed with the threads that `octavo.ops.load` has set."""
    from octavo.ops import cpu
    from octavo.quantization import StoredWeight

    random = np.random.default_rng(0)
    n, k = _MATRIX
    numbers = random.standard_normal(_MATRIX, np.float32).astype(ml_dtypes.bfloat16)
    # Enough copies of a matrix to exceed the caches, read by products with one row.
    wide = cpu.pack_linear([StoredWeight("BF16", {"data": numbers}, (n, k))] * (_READ_BYTES // numbers.nbytes))
    row = numbers[:1].copy()
    bytes_per_s = wide.num_bytes / best_s(partial(cpu.linear, row, wide))
    del wide
    rows = numbers[:_ROWS].copy()
    found = []
    for stored_format in ("INT8", "BF16"):
        weight = cpu.pack_linear([StoredWeight(stored_format, {"data": numbers}, (n, k))])
        x = cpu.quantize(rows, weight) if weight.takes_float32 else rows
        found.append(2 * _ROWS * n * k / best_s(partial(cpu.linear, x, weight)))
    return MachineSpeed(bytes_per_s, *found)


def best_s(call: Callable[[], object]) -> float:
    """Return the shortest time of a call, in seconds."""
    call()
    best, end = float("inf"), perf_counter() + _TRIES_S
    while perf_counter() < end:
        begin = perf_counter()
        call()
        best = min(best, perf_counter() - begin)
    return best
