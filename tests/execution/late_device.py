"""A device that does everything as late as it may, in any order that its streams allow, and looks at memory meanwhile.

Work waits in its stream until somebody waits for an event behind it; which stream goes on next is then drawn at random.
Host memory that work under way will read must stay as it was when the work was given; host memory that it will write
is filled with nonsense until it has been written; and whatever a graph has returned is overwritten as soon as another
graph runs, as graphs that share their memory would.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.execution.device import Event, Graph, T


class LateEvent:
    def __init__(self, device: LateDevice, stream: LateStream, place: int) -> None:
        self._device, self._stream, self._place = device, stream, place

    @property
    def has_come(self) -> bool:
        return self._stream.num_done >= self._place

    def wait(self) -> None:
        self._device.run_until(lambda: self.has_come)


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], bool]] = deque()  # each returns False as long as it must not run yet
        self._num_given = 0
        self.num_done = 0

    def run(self, work: Callable[[], None], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self._device.maybe_fail()
        seen = [tensor.clone() for tensor in reads]
        for tensor in writes:
            _spoil(tensor)

        def run() -> bool:
            for tensor, before in zip(reads, seen, strict=True):
                assert torch.equal(tensor, before), "the host wrote to memory that the device has still to read"
            with torch.inference_mode():
                work()
            return True

        self._append(run)

    def record(self) -> Event:
        return LateEvent(self._device, self, self._num_given)

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self._append(lambda: event.has_come)

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


class LateGraph:
    def __init__(self, device: LateDevice, work: Callable[[], Any], outputs: tuple[Tensor, ...]) -> None:
        self._device, self._work, self._outputs = device, work, outputs

    def replay(self) -> None:
        self._device.num_replays += 1
        found = self._work()
        for outputs in self._device.graph_outputs:
            for tensor in outputs:
                _spoil(tensor)
        for output, tensor in zip(self._outputs, found, strict=True):
            output.copy_(tensor)


class LateDevice:
    """`memory_failures` is the share of pieces of work that are refused for want of memory."""

    name = "a device that is late"
    torch_device = torch.device("cpu")

    def __init__(self, seed: int, memory_failures: float = 0.0) -> None:
        self._random = random.Random(seed)
        self.memory_failures = memory_failures
        self.compute, self.copies = LateStream(self), LateStream(self)
        self.graph_outputs: list[tuple[Tensor, ...]] = []
        self.num_replays = 0
        self.num_failures = 0

    def memory_bytes(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 1 << 20

    def time_s(self, work: Callable[[], object]) -> float:
        work()
        return 1.0

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        outputs = work()
        assert isinstance(outputs, tuple)
        self.graph_outputs.append(outputs)
        return LateGraph(self, work, outputs), outputs

    def fetch(self, tensors: Sequence[Tensor], after: Event) -> list[Tensor]:
        after.wait()
        return [tensor.clone() for tensor in tensors]

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            streams = [self.compute, self.copies]
            self._random.shuffle(streams)
            assert any(stream.step() for stream in streams), "the streams wait for each other"

    def maybe_fail(self) -> None:
        if self._random.random() < self.memory_failures:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _spoil(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype is not torch.uint8 else 0xA5)
