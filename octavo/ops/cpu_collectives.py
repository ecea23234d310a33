"""Collectives of the native backend: processes of one host that share a model exchange rows through shared memory."""

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import ConfigError
from octavo.ops.cpu_arrays import FLOAT32, is_dense, require, stride
from octavo.ops.cpu_program import check_inputs, empty, recording

_HEAD_BYTES = 64  # a cache line for each worker's count


@dataclass(frozen=True, slots=True)
class _Group:
    """The group of worker processes that this process belongs to, and their shared memory. Programs keep it alive."""

    native: Any
    memory: NDArray[np.uint8]


_group: _Group | None = None


def group_bytes(size: int, max_floats: int) -> int:
    """Return the bytes of shared memory for `size` workers that together exchange up to `max_floats` numbers."""
    return size * _HEAD_BYTES + 2 * 4 * max_floats


def check_is_in_no_group() -> None:
    """Raise `ConfigError` if this process has joined a group and not left it."""
    if _group is not None:
        raise ConfigError("this process has a model that several workers share already; close that first.")


def join_group(rank: int, size: int, file: int, num_bytes: int, connections: list[int]) -> None:
    """Join a group of `size` workers as worker `rank`. They exchange rows through the memory of `file`.

    The memory is `num_bytes` zeros at first. If the other end of one of `connections` hangs up, running and later
    exchanges raise `RuntimeError` instead of waiting."""
    global _group
    check_is_in_no_group()
    memory = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
    _group = _Group(_cpu.Group(rank, size, memory, num_bytes, connections), memory)


def leave_group() -> None:
    """Leave the group. Programs recorded before must not run any more."""
    global _group
    _group = None


def _native() -> Any:
    assert _group is not None, "this process has no others to exchange rows with"
    if (program := recording()) is not None:
        program.held.append(_group)
    return _group.native


def all_reduce(x: NDArray[Any], bias: NDArray[Any] | None = None) -> None:
    require(x.dtype == FLOAT32 and x.flags.c_contiguous)
    check_inputs("all_reduce", x=x)
    rows, width = x.shape
    require(bias is None or (bias.dtype == FLOAT32 and bias.shape == (width,) and is_dense(bias)))
    _cpu.exchange(
        group=_native(), x=x, x_stride=width, rows=rows, x_width=width, begin=0, out=x, width=width, sums=True,
        bias=bias,
    )  # fmt: skip


def all_gather(x: NDArray[Any], begin: int, width: int) -> NDArray[Any]:
    require(is_dense(x) and 0 <= begin <= begin + x.shape[1] <= width)
    check_inputs("all_gather", x=x)
    out = empty((x.shape[0], width), x.dtype)
    sizes = stride(x), x.shape[1], begin, width
    each = FLOAT32.itemsize // x.itemsize  # nothing is computed, so two bfloat16 travel as one float32
    if any(size % each for size in sizes):
        raise ConfigError(f"columns {begin} to {begin + x.shape[1]} of {width} in {x.dtype} are not pairs.")
    row, own, first, all_own = (size // each for size in sizes)
    _cpu.exchange(
        group=_native(), x=x, x_stride=row, rows=x.shape[0], x_width=own, begin=first, out=out, width=all_own,
        sums=False, bias=None,
    )  # fmt: skip
    return out
