"""Floats quantized at load, 32 elements of a row to a scale: round(x / d) with d = absmax / 127. `--quantization int8`.

The native packer quantizes (csrc/cpu/pack_int.cpp); this is the same in torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.ops import QuantizedMatrix
from octavo.quantization.layout import Layout

FORMAT = "INT8"
LAYOUT = Layout(8, 32, False)


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """The values after quantization."""
    num_out, num_in = matrix.shape
    padded = torch.nn.functional.pad(matrix.data.float(), (0, -num_in % 32)).view(num_out, -1, 32)
    scales = padded.abs().amax(-1, keepdim=True) / 127
    unit = 2.0 ** (math.frexp(scales.max())[1] - 15)  # which makes them fit float16
    scales = (scales / unit).half().float() * unit
    codes = torch.where(scales > 0, padded / scales, 0.0).round().clamp(-127, 127)
    return (codes * scales).view(num_out, -1)[:, :num_in].to(dtype)
