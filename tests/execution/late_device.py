"""A device that does everything as late as it may, in any order that its streams allow, and looks at memory meanwhile.

Work waits in its stream until somebody waits for an event behind it; which stream goes on next is then drawn at random.
Host memory that work under way will read must stay as it was when the work was given; host memory that it will write
is filled with nonsense until it has been written; and whatever a captured step has returned is overwritten as soon as
another one is replayed, as steps that share their memory would.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config import CacheConfig
from octavo.execution.cuda_device import can_pad_to, shapes_to_capture
from octavo.execution.device import Event, ModelOutputs, StepModel
from octavo.execution.step_arrays import StepArrays, StepLimits, StepShape


class LateEvent:
    def __init__(self, device: LateDevice, stream: LateStream, place: int) -> None:
        self._device, self._stream, self._place = device, stream, place

    @property
    def is_reached(self) -> bool:
        return self._stream.num_done >= self._place

    def wait(self) -> None:
        self._device.run_until(lambda: self.is_reached)


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], bool]] = deque()  # each returns False as long as it must not run yet
        self._num_given = 0
        self.num_done = 0

    def run(
        self, work: Callable[[], None], reads: Sequence[NDArray[Any]] = (), writes: Sequence[NDArray[Any]] = ()
    ) -> None:
        self._device.maybe_fail()
        seen = [array.copy() for array in reads]
        for array in writes:
            _spoil(torch.from_numpy(array))

        def run() -> bool:
            for array, before in zip(reads, seen, strict=True):
                assert np.array_equal(array, before), "the host wrote to memory that the device has still to read"
            self._device.is_running = True
            try:
                with torch.inference_mode():
                    work()
            finally:
                self._device.is_running = False
            return True

        self._append(run)

    def record(self) -> Event:
        return LateEvent(self._device, self, self._num_given)

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self._append(lambda: event.is_reached)

    def step(self) -> bool:
        """Do the next piece of work, if there is one and it may run."""
        if not self._work or not self._work[0]():
            return False
        self._work.popleft()
        self.num_done += 1
        return True

    def _append(self, work: Callable[[], bool]) -> None:
        self._num_given += 1
        self._work.append(work)


class LateStep:
    """A captured step."""

    def __init__(self, device: LateDevice, model: StepModel, inputs: StepArrays[Any]) -> None:
        self._device, self._model, self._inputs = device, model, inputs
        self.outputs = ModelOutputs(*(tensor.clone() for tensor in self._compute()))  # not of what is uploaded

    def _compute(self) -> tuple[Any, Any, Any, Any]:
        with torch.inference_mode():
            hidden, features = self._model.hidden(self._inputs)
            return hidden, features, *self._model.logits(self._inputs, hidden)

    def replay(self, used: StepShape) -> None:
        self._device.num_replays += 1
        found = self._compute()
        for step in self._device.captured:
            for tensor in _tensors(step.outputs):
                _spoil(tensor)
        for output, tensor in zip(_tensors(self.outputs), found, strict=True):
            output.copy_(tensor)


class LateDevice:
    """`memory_failures` is the share of pieces of work that are refused for want of memory."""

    name = hardware = "a device that is late"
    runs_ahead = True
    shares_memory = False
    memory_errors: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)

    def __init__(self, seed: int, memory_failures: float = 0.0) -> None:
        self._random = random.Random(seed)
        self.memory_failures = memory_failures
        self.compute, self.copies = LateStream(self), LateStream(self)
        self.captured: list[LateStep] = []
        self.num_replays = 0
        self.num_failures = 0
        self.num_given = 0  # pieces of work
        self.refused = range(0)  # the numbers of those that are refused for want of memory
        self.is_running = False  # something that a stream was given

    def free_bytes(self) -> int:
        return 1 << 30

    def cache_bytes(self, config: CacheConfig, step: Callable[[], None], other_bytes: int) -> tuple[int, str]:
        step()
        return (1 << 30) - other_bytes, "a device that is late"

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 1 << 20

    def release_memory(self) -> None:
        """Nothing is held in reserve."""

    def pinned(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        return np.zeros(tuple(shape), dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype))

    def upload_target(self, pinned: NDArray[Any]) -> Tensor:
        return self.zeros(pinned.shape, pinned.dtype.name)

    def as_input(self, array: Any) -> Any:
        return array

    def view(self, array: Any, dtype: str) -> Tensor:
        tensor: Tensor = array.view(getattr(torch, dtype))
        return tensor

    def copy(self, source: Any, target: Any) -> None:
        source, target = (x if isinstance(x, Tensor) else torch.from_numpy(x) for x in (source, target))
        target.copy_(source)

    def capture_shapes(self, limits: StepLimits) -> list[StepShape]:
        return shapes_to_capture(limits)

    def can_replay(self, captured: StepShape, used: StepShape) -> bool:
        return can_pad_to(used, captured)

    def capture(self, model: StepModel, inputs: StepArrays[Any]) -> LateStep:
        self.captured.append(LateStep(self, model, inputs))
        return self.captured[-1]

    def fetch(self, arrays: Sequence[Any], after: Event) -> list[NDArray[Any]]:
        after.wait()
        for _ in range(self._random.randrange(4)):  # it goes on meanwhile
            self.compute.step()
        return [tensor.clone().numpy() for tensor in arrays]

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            streams = [self.compute, self.copies]
            self._random.shuffle(streams)
            assert any(stream.step() for stream in streams), "the streams wait for each other"

    def maybe_fail(self) -> None:
        self.num_given += 1
        if self.num_given - 1 in self.refused or self._random.random() < self.memory_failures:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _tensors(outputs: ModelOutputs) -> list[Any]:
    return [outputs.hidden, outputs.features, outputs.logits, outputs.argmax_tokens]


def _spoil(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype is not torch.uint8 else 0xA5)
