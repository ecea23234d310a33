"""Floats quantized at load to float8_e4m3fn, a row to a scale: x / d with d = absmax / 448.

For GPUs that multiply them. The activations are quantized too, row by row (octavo/ops/triton/quantize.py).
"""

from __future__ import annotations

from octavo.quantization.arrays import Array, cast, namespace
from octavo.quantization.stored import StoredWeight

FORMAT = "FP8"
_LARGEST = 448.0


def quantize(rows: Array) -> tuple[Array, Array]:
    """[N, K] -> codes [N, K] and scales [N] float32."""
    xp = namespace(rows)
    values = cast(rows, "float32")
    scales = xp.amax(abs(values), axis=1) / _LARGEST
    codes = values / xp.where(scales > 0, scales, 1.0)[:, None]
    return cast(xp.clip(codes, -_LARGEST, _LARGEST), "float8_e4m3fn"), scales


def dequantize(stored: StoredWeight) -> Array:
    """The values after quantization, float32."""
    codes, scales = quantize(stored.data)
    return cast(codes, "float32") * scales[:, None]
