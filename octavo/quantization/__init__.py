"""Weight formats of few bits: how each is laid out once it is packed, and what it means in floats.

All of them become one family: codes of 4 or 8 bits with a scale by 16 or 32 elements and, in some, a minimum by 32
(`Layout`). One module a family of sources: `gguf` for the block formats of GGUF files, `int8` for floats that are
quantized at load, and `fp8`, which is outside the family. `ops.cpu_pack` packs; `dequantize` is what the reference
backend and mixed matrices use. `gguf_codes`, `gptq` and `awq` unpack the tensors of files, for other backends' packers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import QuantizedMatrix
from octavo.quantization import fp8, gguf, int8
from octavo.quantization.layout import Layout, common_layout

__all__ = ["Layout", "common_layout", "dequantize", "layout_of"]


def layout_of(matrix_format: str) -> Layout:
    """The least layout that holds a matrix of this `QuantizedMatrix.format`. Raises `ConfigError` if none does."""
    if matrix_format == fp8.FORMAT:
        raise ConfigError("8-bit floats are multiplied by GPUs only; --quantization int8 is for every device.")
    return int8.LAYOUT if matrix_format == int8.FORMAT else gguf.LAYOUTS[matrix_format]


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [N, K] that the matrix stands for."""
    if matrix.format == fp8.FORMAT:
        return fp8.dequantize(matrix, dtype)
    return int8.dequantize(matrix, dtype) if matrix.format == int8.FORMAT else gguf.dequantize(matrix, dtype)
