"""Has Triton's interpreter sum products as tensor cores do, so that its bits are the same whatever the tile.

It multiplies whole tiles with numpy, whose order of summation follows their shape and the processor. Tensor cores add
16 elements of k at a time to an accumulator, in ascending order: kernels promise equal bits on that. The 16 are added
in float64, where sums of products of halves are exact in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_STEP = 16  # of k, of an instruction


def install() -> None:
    """For all kernels of this process that are interpreted."""
    from triton.runtime.interpreter import InterpreterBuilder

    whole = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        if a.data.dtype != np.float32 and a.data.dtype != np.float16:
            return whole(self, a, b, d, *args)
        wide_a, wide_b, total = a.data.astype(np.float64), b.data.astype(np.float64), d.data.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # rows that nobody has written, or reads
            for k in range(0, wide_a.shape[1], _STEP):
                total = total + np.matmul(wide_a[:, k : k + _STEP], wide_b[k : k + _STEP]).astype(np.float32)
        return type(d)(total, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
