"""Conversion of activations to the type that a matrix multiplies: int8, once or as a pair (csrc/cpu/quantize.h), or the
matrix's float type."""

from typing import Any

from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops import LinearWeight
from octavo.ops.cpu_arrays import BFLOAT16, CODES, FLOAT32, UINT8, code_of, is_dense, require, stride
from octavo.ops.cpu_pack import first_part
from octavo.ops.cpu_program import check_inputs, empty

# The type of activations for a float matrix, by the matrix's format.
FLOAT_FORMATS = {
    _cpu.WEIGHT_F32: FLOAT32, _cpu.WEIGHT_BF16: BFLOAT16, _cpu.ROWS_F32: FLOAT32, _cpu.ROWS_BF16: BFLOAT16,
}  # fmt: skip


def quantize(x: NDArray[Any], consumer: LinearWeight) -> NDArray[Any]:
    consumer = first_part(consumer)
    if x.dtype == UINT8:
        require(consumer.order is None, "quantize: in another order than the matrix's")
        return x
    if x.dtype == FLOAT_FORMATS.get(consumer.format):
        return x
    rows, width = x.shape
    require(width == consumer.in_features, f"quantize: {width} elements for a matrix of {consumer.in_features}")
    require(is_dense(x))
    check_inputs("quantize", x=x)
    if consumer.is_quantized:
        out, out_code = empty((rows, consumer.row_bytes), UINT8), consumer.row_code
    else:
        out = empty(x.shape, FLOAT_FORMATS[consumer.format])
        out_code = CODES[out.dtype]
    code, kind = code_of("quantize", x), _cpu.ACTIVATIONS["identity"]
    _cpu.activation(
        x=x, x_stride=stride(x), rows=rows, width=width, dtype=code, out=out, out_dtype=out_code, kind=kind,
        parameter0=0.0, parameter1=0.0, parameter2=0.0, parameter3=0.0, order=consumer.order,
    )  # fmt: skip
    return out
