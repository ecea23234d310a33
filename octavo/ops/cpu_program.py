"""Recording the native backend: operations called inside `Program.record` are noted instead of run.

What the model computes into is taken from a pool of buffers that live as long as the program, so that the addresses in
the recorded calls stay good. A buffer whose arrays Python has dropped is given to later operations, as the calls will
run in the order in which they were recorded.
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
    """`np.empty`, out of the program that this thread is recording if there is one."""
    program = recording()
    return np.empty(shape, dtype) if program is None else program.pool.empty(shape, dtype)


def recording() -> Program | None:
    """The program that this thread is recording: what native calls are noted in, and nothing else."""
    program: Program | None = _cpu.recording()
    return program


def check_inputs(op: str, **inputs: NDArray[Any]) -> None:
    """While a step is recorded: that what an operation reads or writes is of the step. Anything else was computed by
    other means, once."""
    if _cpu.recording() is None:
        return
    for name, array in inputs.items():
        if not isinstance(array, StepArray):
            raise RuntimeError(
                f"{op} is being recorded, but its {name} is not an array of the step: it was made by something else "
                "than octavo.ops, or is an input that Program.input was not told of."
            )


def check_runs_now(op: str) -> None:
    """Refuse an operation that programs do not hold while one is recorded."""
    if _cpu.recording() is not None:
        raise RuntimeError(f"{op} cannot be part of a recorded step: call it once the step has run.")


class Program(_cpu.Program):  # type: ignore[misc]  # native, without Python types
    """The native calls of a model's step, replayed by one call for any number of rows up to those it was recorded with.

    Inputs of the step must be kept by the caller, at their place. `run(num_tokens, num_seqs, num_samples)` leaves out
    operations that would have no rows. It raises `IndexError` for a token id, position, row or slot in the inputs that
    points nowhere, and `ValueError` for more rows than were recorded. `profile`, with the same arguments, replays call
    by call -> the name of each and the nanoseconds that it took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = _BufferPool()
        self.held: list[object] = []  # for as long as its calls may run

    @contextmanager
    def record(self, per_sample: bool) -> Iterator[None]:
        """Note the operations that this thread calls: their rows are the step's tokens, or its samples."""
        super().record(per_sample)
        try:
            yield
        finally:
            _cpu.stop_recording()

    @staticmethod
    def input(array: NDArray[Any]) -> StepArray:
        """The same memory as an input of the step, whose values are read anew by each run."""
        return array.view(StepArray)

    @staticmethod
    def output(array: NDArray[Any]) -> NDArray[Any]:
        """The same memory as an ordinary array, to be read and overwritten between runs."""
        return array.view(np.ndarray)


class _Lease:
    """Memory that arrays are over; numpy keeps it for as long as there is one."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: NDArray[np.uint8], num_bytes: int) -> None:
        # Not a view of numpy's: those keep the memory's first owner only, and would be gone at once.
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (num_bytes,), "data": (address(memory), False)
        }  # fmt: skip


class _BufferPool:
    """Memory that is handed out as arrays and comes back when the last array over it is gone."""

    def __init__(self) -> None:
        self._buffers: list[NDArray[np.uint8]] = []  # every one, for as long as the pool lives
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
