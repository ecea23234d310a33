"""Recording of the native backend: operations called inside `Program.record` are noted instead of run.

Outputs of recorded operations are buffers of a pool that lives as long as the program, so the addresses in recorded
calls stay valid. When Python drops a buffer's last array, later operations may reuse the buffer: calls run in the order
in which they were recorded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops.cpu_arrays import StepArray, address
from octavo.ops.cpu_memory import zeros


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an empty array; it is from the pool of the program that this thread is recording, if there is one."""
    program = recording()
    return np.empty(shape, dtype) if program is None else program.pool.empty(shape, dtype)


def recording() -> Program | None:
    """Return the program in which this thread is recording native calls; None if it is not recording."""
    program: Program | None = _cpu.recording()
    return program


def check_inputs(op: str, **inputs: NDArray[Any]) -> None:
    """While a step is recorded, raise `RuntimeError` for arrays that are not of the step: they were computed once, by
    other means than `octavo.ops`."""
    if _cpu.recording() is None:
        return
    for name, array in inputs.items():
        if not isinstance(array, StepArray):
            raise RuntimeError(
                f"{op} is being recorded, but its {name} is not an array of the step: it was made by something else "
                "than octavo.ops, or is an input that Program.input was not told of."
            )


def check_runs_now(op: str) -> None:
    """Raise `RuntimeError` while a step is recorded; called by operations that cannot be part of a program."""
    if _cpu.recording() is not None:
        raise RuntimeError(f"{op} cannot be part of a recorded step: call it once the step has run.")


class Program(_cpu.Program):  # type: ignore[misc]  # native, without Python types
    """The native calls of a model's step, replayed by one call for any number of rows up to the recorded number.

    The caller must keep the step's inputs alive at the same addresses. `run(num_tokens, num_seqs, num_samples)` skips
    operations without rows. It raises `IndexError` for a token id, position, row or slot in the inputs that is out of
    range, and `ValueError` for more rows than were recorded. `profile`, with the same arguments, replays call by call
    and returns the name and the nanoseconds of each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = _BufferPool()
        self.held: list[object] = []  # objects that must live as long as the recorded calls may run

    @contextmanager
    def record(self, per_sample: bool) -> Iterator[None]:
        """Note the operations that this thread calls. Their rows are the step's samples if `per_sample`, else its
        tokens."""
        super().record(per_sample)
        try:
            yield
        finally:
            _cpu.stop_recording()

    @staticmethod
    def input(array: NDArray[Any]) -> StepArray:
        """Return the same memory as an input of the step. Each run reads the values that it has then."""
        return array.view(StepArray)

    @staticmethod
    def output(array: NDArray[Any]) -> NDArray[Any]:
        """Return the same memory as an ordinary array, to be read and overwritten between runs."""
        return array.view(np.ndarray)


class _Lease:
    """The owner of memory in numpy's eyes: numpy keeps the lease as long as an array over this memory exists."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: NDArray[np.uint8], num_bytes: int) -> None:
        # A numpy view cannot be the lease: arrays made of it keep only the memory's first owner alive, not the view.
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (num_bytes,), "data": (address(memory), False)
        }  # fmt: skip


class _BufferPool:
    """A pool of buffers that are handed out as arrays. A buffer is free again when the last array over it is gone."""

    def __init__(self) -> None:
        self._buffers: list[NDArray[np.uint8]] = []  # all buffers, free or not
        self._free: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> StepArray:
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [i for i in self._free if self._buffers[i].nbytes >= num_bytes]
        if fitting:
            index = min(fitting, key=lambda i: self._buffers[i].nbytes)
            self._free.remove(index)
        else:
            index = len(self._buffers)
            self._buffers.append(zeros(num_bytes))
        lease = _Lease(self._buffers[index], num_bytes)
        weakref.finalize(lease, self._free.append, index).atexit = False
        return np.asarray(lease).view(dtype).reshape(shape).view(StepArray)
