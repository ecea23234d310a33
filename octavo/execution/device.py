"""A device that computes: streams of work, events, captured steps, memory that the host and the device share.

The runner is written against `Device`. `octavo.execution.cpu_device` is the processor that Python runs on, whose
streams run at once and whose captured step is the native program; `octavo.execution.cuda_device` computes while Python
goes on. The tests drive the runner with one that does its work as late as it may, and notices when somebody touches
memory that work under way has still to read or to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from octavo.config import CacheConfig
from octavo.execution.step_arrays import StepArrays, StepShape
from octavo.ops import Array


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Let the host wait until the device has got there."""
        ...


class Stream(Protocol):
    """Work that a device does in order."""

    def run(
        self, work: Callable[[], None], reads: Sequence[NDArray[Any]] = (), writes: Sequence[NDArray[Any]] = ()
    ) -> None:
        """Append work. `reads` and `writes` are the pinned host arrays that it touches: until it is done, nobody else
        may write the ones nor touch the others."""
        ...

    def record(self) -> Event:
        """The point after all work so far."""
        ...

    def wait(self, event: Event) -> None:
        """Do nothing more before `event`, which another stream has recorded."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What the model makes of a step."""

    hidden: Array  # [T, H] before the final norm
    features: Array  # [T, F]: what a head that guesses tokens reads of the step; `hidden` where it asks for no other
    logits: Array  # [N, V] float32
    best: Array  # [N] int64: the likeliest tokens


class StepModel(Protocol):
    """The model's part of a step, in two pieces because the second has a row for each sample and not for each token."""

    def hidden(self, inputs: StepArrays[Array]) -> tuple[Array, Array]:
        """-> hidden states and features, as in `StepOutputs`; they may be the same array."""

    def logits(self, inputs: StepArrays[Array], hidden: Array) -> tuple[Array, Array]:
        """-> logits and their likeliest tokens."""
        ...


class CapturedStep(Protocol):
    """A step that was captured over arrays that stay where they are."""

    outputs: StepOutputs  # filled anew by each replay; that of another captured step may overwrite them

    def replay(self, used: StepShape) -> None:
        """Do it for a step of that shape."""
        ...


class Device(Protocol):
    """What the runner needs of a device. `compute` is the stream of steps, `copies` that of traffic with the host."""

    name: str
    runs_ahead: (
        bool  # it computes while Python goes on, so that steps are submitted before the last one's tokens are known
    )
    shares_memory: (
        bool  # it reads and writes the host's memory itself: nothing has to be uploaded or kept in two places
    )
    memory_errors: tuple[type[Exception], ...]  # what is raised where a step finds too little memory

    @property
    def compute(self) -> Stream: ...

    @property
    def copies(self) -> Stream: ...

    def free_bytes(self) -> int:
        """Memory that weights may take."""
        ...

    def cache_bytes(self, config: CacheConfig, step: Callable[[], None], other_bytes: int) -> tuple[int, str]:
        """Memory for the KV cache, now that the weights are there, and what grants it, for messages. `step` runs the
        step that takes the most memory; captured steps and towers are going to take `other_bytes` more."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Memory of its own that `work` takes at its height, beyond what is in use; 0 where it has none, and nothing is
        done then."""
        ...

    def release_memory(self) -> None:
        """Give back what is held in reserve, after a step that found too little."""
        ...

    def time_s(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes on the device, when it has been done before."""
        ...

    def pinned(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Host memory that the device can reach by itself, zeroed."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """Memory of the device."""
        ...

    def upload_target(self, pinned: NDArray[Any]) -> Array:
        """Memory of the device that `pinned` is uploaded to: itself, if the device shares memory."""
        ...

    def as_input(self, array: Array) -> Array:
        """The same memory, for captured steps to read whatever it holds when they are replayed."""
        ...

    def view(self, array: Array, dtype: str) -> Array:
        """The bytes of an array, as those of [num_bytes] uint8 or of rows, read as another type."""
        ...

    def copy(self, source: Any, target: Any) -> None:
        """Copy between pinned and device memory, or within the device, as work of the stream that runs it."""
        ...

    def capture_shapes(self, largest: StepShape) -> list[StepShape]:
        """Shapes of the steps that are worth capturing, the smallest first."""
        ...

    def can_replay(self, captured: StepShape, used: StepShape) -> bool:
        """Whether a step of one shape can be replayed as a captured one of the other."""
        ...

    def capture(self, model: StepModel, inputs: StepArrays[Array]) -> CapturedStep:
        """Capture the model's part of a step over `inputs`."""
        ...

    def fetch(self, arrays: Sequence[Array], after: Event) -> list[NDArray[Any]]:
        """Copies on the host, made as soon as `after` has come and whatever `compute` has been given since then."""
        ...
