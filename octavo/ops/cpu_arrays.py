"""The native backend's arrays: element types by name, and `StepArray`, an array of a step that is being recorded.

A recorded step is replayed without Python. A computation by other means than `octavo.ops` would happen only once,
while the step is recorded. Therefore a `StepArray` refuses such computations. Views share the memory and are allowed.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
FLOAT32, BFLOAT16, INT32, INT64, UINT8 = (DTYPES[n] for n in ("float32", "bfloat16", "int32", "int64", "uint8"))
FLOAT64 = DTYPES["float64"]
CODES: dict[np.dtype[Any], int] = {FLOAT32: _cpu.F32, BFLOAT16: _cpu.BF16}
# One-byte element types of a cache of keys and values.
CACHE_CODES: dict[np.dtype[Any], int] = {
    DTYPES["int8"]: _cpu.INT8, DTYPES["float8_e4m3fn"]: _cpu.FLOAT8_E4M3, DTYPES["float8_e5m2"]: _cpu.FLOAT8_E5M2
}  # fmt: skip


def code_of(op: str, *arrays: NDArray[Any]) -> int:
    """Return the kernels' code of the `arrays`' element type. Raises `TypeError` if the types differ or are
    unsupported."""
    dtype = arrays[0].dtype
    for array in arrays:
        if array.dtype != dtype:
            found = ", ".join(str(a.dtype) for a in arrays)
            raise TypeError(f"{op} wants arrays of one dtype, not {found}.")
    code = CODES.get(dtype)
    if code is None:
        raise TypeError(f"{op} computes on float32 or bfloat16, not {dtype}.")
    return code


def stride(x: NDArray[Any], axis: int = 0) -> int:
    """Return the number of elements from one entry of an axis to the next."""
    return x.strides[axis] // x.itemsize


def is_dense(x: NDArray[Any]) -> bool:
    """Return whether the elements of the last axis lie side by side."""
    return x.strides[-1] == x.itemsize or x.shape[-1] == 1 or x.size == 0


def require(holds: bool, message: str = "") -> None:
    """Raise `ValueError` unless `holds`, with the calling operation's arrays and sizes.

    Kernels check nothing and would read out of bounds. `python -O` would remove assertions."""
    if holds:
        return
    frame = sys._getframe(1)
    found = [
        f"{name} {value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"{name} {value}"
        for name, value in frame.f_locals.items() if isinstance(value, (np.ndarray, int))
    ]  # fmt: skip
    message = message or f"{frame.f_code.co_name.strip('_')}: these do not fit together"
    raise ValueError(f"{message}: {', '.join(found)}")


class StepArray(np.ndarray[Any, Any]):
    """An array of a recorded step: an input of the step, or the output of an operation.

    Only `octavo.ops` may compute on, read or write it; other attempts raise `RuntimeError`. Slices, and reshapes that
    need no copy, are views. `Program.output` returns the same memory as an ordinary array, to be read after the step.

    `np.asarray` cannot be refused; instead, operations that are being recorded refuse the array that it returns.
    """

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"numpy.{ufunc.__name__}")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        _refuse(f"numpy.{function.__name__}")

    def __getitem__(self, key: Any, /) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in keys):
            _refuse("indexing by arrays or lists, which copies,")
        found = super().__getitem__(key)
        if not isinstance(found, StepArray):
            _refuse("reading an element")
        return found

    def reshape(self, *shape: Any, **more: Any) -> Any:
        found = super().reshape(*shape, **more)
        if self.size and address(found) != address(self):
            _refuse("reshape, where it has to copy,")
        return found

    def __repr__(self) -> str:
        return f"StepArray(shape={self.shape}, dtype={self.dtype})"

    __str__ = __repr__


def address(x: NDArray[Any]) -> int:
    """Return the address of the first element. This takes 1 to 2 microseconds, so native functions accept arrays."""
    return int(x.__array_interface__["data"][0])


def _refuse(operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation} was called on an array of a recorded step. A replayed step would not repeat it: compute by "
        "octavo.ops, or outside of the model's step on Program.output(array)."
    )


def _refused(name: str) -> Any:
    def method(self: StepArray, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"ndarray.{name}")

    return method


# All methods of ndarray but those that return views are refused. Operators are refused in `__array_ufunc__`.
_VIEWS = {"view", "reshape", "transpose", "swapaxes", "squeeze"}
_READING_AND_WRITING = [
    "__setitem__", "__delitem__", "__iter__", "__contains__", "__bool__", "__int__", "__float__", "__complex__",
    "__index__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__dlpack__",
]  # fmt: skip
for _name in [name for name in dir(np.ndarray) if name[0] != "_" and callable(getattr(np.ndarray, name))]:
    if _name not in _VIEWS:
        setattr(StepArray, _name, _refused(_name))
for _name in _READING_AND_WRITING:
    setattr(StepArray, _name, _refused(_name))
