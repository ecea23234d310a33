"""GGUF's block formats, as `llama.cpp` writes them. The blocks are unpacked by `octavo.loading.gguf_dequant`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.loading.gguf import TENSOR_TYPES
from octavo.loading.gguf_dequant import dequantize_rows
from octavo.ops import QuantizedMatrix
from octavo.quantization.layout import Layout

# Types of five and six bits take eight. Signed types need no minima.
LAYOUTS = {
    "Q4_0": Layout(4, 32, False),
    "Q4_1": Layout(4, 32, True),
    "Q5_0": Layout(8, 32, False),
    "Q5_1": Layout(8, 32, True),
    "Q8_0": Layout(8, 32, False),
    "Q4_K": Layout(4, 32, True),
    "Q5_K": Layout(8, 32, True),
    "Q6_K": Layout(8, 16, False),
}

_TYPES = {t.name: t for t in TENSOR_TYPES.values()}


def block_bytes(matrix_format: str) -> int:
    return _TYPES[matrix_format].block_bytes


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(_TYPES[matrix.format], matrix.data, dtype)
