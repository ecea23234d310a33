"""The interface of a device: streams of work, events, captured steps, and pinned memory for transfers. The runner is
written against `Device`. `octavo.execution.cpu_device` is the processor that Python runs on: its streams run work at
once, and its captured step is the native program. `octavo.execution.cuda_device` computes while Python goes on. The
tests run the runner on a device that does its work as late as possible, and that notices if anything touches memory
that pending work will read or write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from octavo.config import CacheConfig
from octavo.execution.step_arrays import StepArrays, StepLimits, StepShape
from octavo.ops import Array


class Event(Protocol):
    """A point in a stream's work."""

    @property
    def is_reached(self) -> bool:
        """Whether the device has reached it."""

    def wait(self) -> None:
        """Wait on the host until the device has reached it."""


class Stream(Protocol):
    """A queue of work that a device does in order."""

    def run(
        self, work: Callable[[], None], reads: Sequence[NDArray[Any]] = (), writes: Sequence[NDArray[Any]] = ()
    ) -> None:
        """Append work. `reads` and `writes` are the pinned host arrays that the work uses: until it is done, no other
        code may write `reads` or touch `writes`."""

    def record(self) -> Event:
        """Return the point after all work so far."""

    def wait(self, event: Event) -> None:
        """Let later work wait for `event` of another stream."""


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """The results of the model's part of a step."""

    hidden: Array  # [T, H] before the final norm
    features: Array  # [T, F]: what a draft head reads; `hidden` unless it reads other layers
    logits: Array  # [N, V] float32
    argmax_tokens: Array  # [N] int64: the most likely tokens


class StepModel(Protocol):
    """The model's part of a step. It has two parts: hidden states, with a row for each token, and logits, with a row
    for each sample."""

    def hidden(self, inputs: StepArrays[Array]) -> tuple[Array, Array]:
        """Return hidden states and features, as in `ModelOutputs`; they may be the same array."""

    def logits(self, inputs: StepArrays[Array], hidden: Array) -> tuple[Array, Array]:
        """Return logits and the most likely tokens."""


class CapturedStep(Protocol):
    """A captured step. Its input arrays stay at their addresses."""

    outputs: ModelOutputs  # overwritten by each replay, also of other captured steps

    def replay(self, used: StepShape) -> None:
        """Run it for a step of this shape."""


class Device(Protocol):
    """What the runner needs of a device. `compute` is the stream of steps, `copies` the stream of copies to and from
    the host."""

    name: str
    runs_ahead: bool  # it computes asynchronously: steps are submitted before the last one's tokens are known
    shares_memory: bool  # it uses the host's memory: nothing is uploaded or kept twice
    memory_errors: tuple[type[Exception], ...]  # raised if a step finds too little memory

    @property
    def hardware(self) -> str:
        """Return the name and capability of the hardware. Caches on disk are for equal ones, as bits may differ."""

    @property
    def compute(self) -> Stream: ...

    @property
    def copies(self) -> Stream: ...

    def free_bytes(self) -> int:
        """Return the memory that weights may take."""

    def cache_bytes(self, config: CacheConfig, step: Callable[[], None], other_bytes: int) -> tuple[int, str]:
        """Return the memory for the KV cache once the weights are loaded, and what limits it, for messages. `step` runs
        the largest step; captured steps and towers will take `other_bytes` more."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Return the peak of device memory that `work` takes beyond what is in use. A device without memory of its own
        returns 0 and runs nothing."""

    def release_memory(self) -> None:
        """Free reserved memory, after a step that found too little."""

    def pinned(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Allocate pinned host memory, zeroed."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """Allocate device memory, zeroed."""

    def upload_target(self, pinned: NDArray[Any]) -> Array:
        """Return device memory that `pinned` is uploaded to: `pinned` itself, if the device shares the host's
        memory."""

    def as_input(self, array: Array) -> Array:
        """Mark an array as an input of captured steps: each replay reads its current contents."""

    def view(self, array: Array, dtype: str) -> Array:
        """Return an array's bytes, [num_bytes] uint8 or rows, as another type."""

    def copy(self, source: Any, target: Any) -> None:
        """Copy between pinned and device memory, or on the device, in the stream that runs it."""

    def capture_shapes(self, limits: StepLimits) -> list[StepShape]:
        """Return the shapes of steps to capture, the smallest first."""

    def can_replay(self, captured: StepShape, used: StepShape) -> bool:
        """Return whether a step of one shape can be replayed by a captured step of another."""

    def capture(self, model: StepModel, inputs: StepArrays[Array]) -> CapturedStep:
        """Capture the model's part of a step with these `inputs`."""

    def fetch(self, arrays: Sequence[Array], after: Event) -> list[NDArray[Any]]:
        """Return copies on the host, made once `after` is reached, without waiting for later work of `compute`."""
