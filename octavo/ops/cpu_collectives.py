"""Collectives of the native backend: processes of one host that share a model exchange rows through shared memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops.cpu_arrays import FLOAT32, is_dense, stride
from octavo.ops.cpu_program import check_inputs, empty

_HEAD_BYTES = 64  # a cache line for each worker's count
_group: Any = None  # of this process: native
_memory: NDArray[np.uint8] | None = None  # that the group is over


def group_bytes(size: int, max_floats: int) -> int:
    """Bytes of memory that `size` workers exchange up to `max_floats` numbers through, those of all of them."""
    return size * _HEAD_BYTES + 2 * 4 * max_floats


def join_group(rank: int, size: int, file: int, num_bytes: int, connections: list[int]) -> None:
    """Be worker `rank` of `size` that exchange rows through the memory of `file`, `num_bytes` of zeros at first. If the
    other end of one of `connections` hangs up, what runs or comes raises `RuntimeError` and no longer waits."""
    global _group, _memory
    _memory = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
    _group = _cpu.Group(rank, size, _memory, num_bytes, connections)


def all_reduce(x: NDArray[Any]) -> None:
    assert _group is not None, "this process has no others to exchange rows with"
    assert x.dtype == FLOAT32 and x.flags.c_contiguous
    check_inputs("all_reduce", x=x)
    rows, width = x.shape
    _cpu.exchange(_group, x, width, rows, width, 0, x, width, True)


def all_gather(x: NDArray[Any], begin: int, width: int) -> NDArray[Any]:
    assert _group is not None, "this process has no others to exchange rows with"
    assert x.dtype == FLOAT32 and is_dense(x) and 0 <= begin <= begin + x.shape[1] <= width
    check_inputs("all_gather", x=x)
    out = empty((x.shape[0], width), FLOAT32)
    _cpu.exchange(_group, x, stride(x), x.shape[0], x.shape[1], begin, out, width, False)
    return out
