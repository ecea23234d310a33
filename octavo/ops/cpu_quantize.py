"""Activations as integer matrices multiply them (csrc/cpu/quantize.h)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops import LinearWeight
from octavo.ops.cpu_arrays import UINT8, code_of, is_dense, stride
from octavo.ops.cpu_pack import PackedWeight
from octavo.ops.cpu_program import check_inputs, empty


def quantize(x: NDArray[Any], consumer: LinearWeight) -> NDArray[Any]:
    assert isinstance(consumer, PackedWeight)
    if not consumer.is_quantized or x.dtype == UINT8:
        assert x.dtype != UINT8 or consumer.order is None, "quantize: in another order than the matrix's"
        return x
    rows, width = x.shape
    assert width == consumer.in_features, f"quantize: {width} elements for a matrix of {consumer.in_features}"
    assert is_dense(x)
    check_inputs("quantize", x=x)
    out = empty((rows, consumer.num_blocks * _cpu.QBLOCK_BYTES), UINT8)
    code, kind = code_of("quantize", x), _cpu.ACTIVATIONS["identity"]
    order = 0 if consumer.order is None else consumer.order
    _cpu.activation(x, stride(x), rows, width, code, out, _cpu.Q8, kind, 0.0, 0.0, 0.0, 0.0, order)
    return out
