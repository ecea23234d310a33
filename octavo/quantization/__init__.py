"""Weight formats of few bits: how each is laid out once it is packed, and what it means in floats.

All of them become one family: codes of 4 or 8 bits with a scale by 16 or 32 elements and, in some, a minimum by 32
(`Layout`). One module a family of sources: `gguf` for the block formats of GGUF files, `int8` for floats that are
quantized at load. `ops.cpu_pack` packs; `dequantize` is what the reference backend and mixed matrices use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import QuantizedMatrix
from octavo.quantization import gguf, int8
from octavo.quantization.layout import Layout, common_layout

__all__ = ["Layout", "common_layout", "dequantize", "layout_of"]


def layout_of(matrix_format: str) -> Layout:
    """The least layout that holds a matrix of this `QuantizedMatrix.format`."""
    return int8.LAYOUT if matrix_format == int8.FORMAT else gguf.LAYOUTS[matrix_format]


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [N, K] that the matrix stands for."""
    return int8.dequantize(matrix, dtype) if matrix.format == int8.FORMAT else gguf.dequantize(matrix, dtype)
