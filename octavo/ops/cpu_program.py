"""Recording the native backend: operations called inside `Program.record` are noted instead of run.

What the model computes into is taken from a pool of buffers that live as long as the program, so that the addresses in
the recorded calls stay good. A buffer whose tensors Python has dropped is given to later operations, as the calls will
run in the order in which they were recorded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import _cpu
from octavo.ops.cpu_memory import zeros

_recording: Program | None = None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.empty`, out of the program that is being recorded if there is one."""
    return torch.empty(shape, dtype=dtype) if _recording is None else _recording._pool.empty(shape, dtype)


def is_recording() -> bool:
    return _recording is not None


class Program:
    """The native calls of a model's step, replayed by one call for any number of rows up to those it was recorded with.

    Tensors that recorded operations read and that are inputs of the step must be kept by the caller, at their place.
    """

    def __init__(self) -> None:
        self._native = _cpu.Program()
        self._pool = _BufferPool()

    @contextmanager
    def record(self, per_sample: bool) -> Iterator[None]:
        """Note the operations that are called: their rows are the step's tokens, or its samples."""
        global _recording
        self._native.record(per_sample)
        _recording = self
        try:
            yield
        finally:
            _recording = None
            _cpu.stop_recording()

    def run(self, num_tokens: int, num_seqs: int, num_samples: int) -> None:
        """Replay for that many rows; operations that would have none are left out.

        Raises `IndexError` for a token id, position or slot in the inputs that points nowhere.
        """
        self._native.run(num_tokens, num_seqs, num_samples)

    def profile(self, num_tokens: int, num_seqs: int, num_samples: int) -> list[tuple[str, float]]:
        """Replay call by call: the name of each and the nanoseconds that it took."""
        times: list[tuple[str, float]] = self._native.profile(num_tokens, num_seqs, num_samples)
        return times


class _BufferPool:
    """Memory that is handed out as tensors and comes back when the last tensor over it is gone."""

    def __init__(self) -> None:
        self._buffers: list[NDArray[np.uint8]] = []  # every one, for as long as the pool lives
        self._free: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [i for i in self._free if self._buffers[i].nbytes >= num_bytes]
        if fitting:
            index = min(fitting, key=lambda i: self._buffers[i].nbytes)
            self._free.remove(index)
        else:
            index = len(self._buffers)
            self._buffers.append(zeros(num_bytes).numpy())
        # torch keeps this view for as long as any tensor shares its memory.
        view = self._buffers[index][:num_bytes]
        weakref.finalize(view, self._free.append, index).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)
