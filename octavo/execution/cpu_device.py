"""The host's processors as a device: streams run their work at once, and a captured step is a native program.

It shares the host's memory, so nothing is uploaded. One program, recorded at full size, replays steps of any size.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.config import CacheConfig
from octavo.execution.device import Event, ModelOutputs, StepModel
from octavo.execution.step_arrays import StepArrays, StepLimits, StepShape
from octavo.loading.memory import available_memory_bytes
from octavo.ops import Array
from octavo.ops.cpu_program import Program

_GIB = 1 << 30


class InlineStream:
    """A stream that runs work when it is appended. It is also its own event, which is always reached."""

    is_reached = True

    def run(
        self, work: Callable[[], None], reads: Sequence[NDArray[Any]] = (), writes: Sequence[NDArray[Any]] = ()
    ) -> None:
        work()

    def record(self) -> Event:
        return self

    def wait(self, event: Event | None = None) -> None:
        """Do nothing: all work is done."""


class CapturedProgram:
    """A step, recorded as a list of native calls."""

    def __init__(self, model: StepModel, inputs: StepArrays[Array]) -> None:
        self.program = Program()
        watched: StepArrays[Array] = StepArrays(
            *(self.program.input(getattr(inputs, field.name)) for field in fields(inputs))
        )
        with self.program.record(per_sample=False):
            hidden, features = model.hidden(watched)
        with self.program.record(per_sample=True):
            logits, argmax_tokens = model.logits(watched, hidden)
        results: Any = hidden, features, logits, argmax_tokens
        outputs: list[Any] = [self.program.output(array) for array in results]
        self.outputs = ModelOutputs(*outputs)

    def replay(self, used: StepShape) -> None:
        self.program.run(used.tokens, used.seqs, used.samples)


class HostMemory:
    """The parts of a device that has no memory of its own."""

    runs_ahead = False  # Python and kernels share the processors: nothing can overlap
    memory_errors: tuple[type[Exception], ...] = ()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        return 0

    def release_memory(self) -> None:
        """Do nothing: no memory is reserved."""

    def pinned(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        return np.zeros(tuple(shape), dtype)


class CpuDevice(HostMemory):
    """The processors of this machine."""

    name = "CPU"
    shares_memory = True

    def __init__(self) -> None:
        self.compute = self.copies = InlineStream()

    @property
    def hardware(self) -> str:
        return str(_cpu.isa())

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def cache_bytes(self, config: CacheConfig, step: Callable[[], None], other_bytes: int) -> tuple[int, str]:
        share, available = config.cpu_memory_utilization, available_memory_bytes()
        return int(
            available * share
        ) - other_bytes, f"--cpu-memory-utilization {share} of {available / _GIB:.2f} GiB free RAM"

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        return np.zeros(tuple(shape), dtype)

    def upload_target(self, pinned: NDArray[Any]) -> Any:
        return pinned

    def as_input(self, array: Any) -> Any:
        return Program.input(array)

    def view(self, array: Any, dtype: str) -> Any:
        return array.view(np.dtype(dtype))

    def copy(self, source: Any, target: Any) -> None:
        np.copyto(target, source)

    def capture_shapes(self, limits: StepLimits) -> list[StepShape]:
        return [limits.largest]

    def can_replay(self, captured: StepShape, used: StepShape) -> bool:
        return True

    def capture(self, model: StepModel, inputs: StepArrays[Array]) -> CapturedProgram:
        return CapturedProgram(model, inputs)

    def fetch(self, arrays: Sequence[Array], after: Event) -> list[NDArray[Any]]:
        return [np.asarray(array) for array in arrays]
