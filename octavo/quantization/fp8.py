"""Floats quantized at load to float8_e4m3fn, a row to a scale: x / d with d = absmax / 448.

For GPUs that multiply them. The activations are quantized too, row by row (octavo/ops/triton/quantize.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import QuantizedMatrix

FORMAT = "FP8"
_LARGEST = 448.0


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> codes [N, K] and scales [N] float32."""
    values = rows.float()
    scales = values.abs().amax(1) / _LARGEST
    codes = values / torch.where(scales > 0, scales, 1.0)[:, None]
    return codes.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """The values after quantization."""
    codes, scales = quantize(matrix.data)
    return (codes.float() * scales[:, None]).to(dtype)
