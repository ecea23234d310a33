"""A device that computes on its own while Python goes on: streams of work, events, captured graphs, pinned memory.

`CudaDevice` is the real one. The runner is written against `Device` so that its tests can drive it with one that does
its work as late as it may, and notices when somebody touches memory that work under way has still to read or to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_TIMED = 5


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Let the host wait until the device has got there."""
        ...


class Graph(Protocol):
    """Work that was captured once, over memory that stays where it is."""

    def replay(self) -> None: ...


class Stream(Protocol):
    """Work that a device does in order."""

    def run(self, work: Callable[[], None], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Append work. `reads` and `writes` are the pinned host tensors that it touches: until it is done, nobody else
        may write the ones nor touch the others."""
        ...

    def record(self) -> Event:
        """The point after all work so far."""
        ...

    def wait(self, event: Event) -> None:
        """Do nothing more before `event`, which another stream has recorded."""
        ...


class Device(Protocol):
    """What the runner needs of a device. `compute` is the stream of steps, `copies` that of traffic with the host."""

    name: str
    torch_device: torch.device

    @property
    def compute(self) -> Stream: ...

    @property
    def copies(self) -> Stream: ...

    def memory_bytes(self) -> tuple[int, int]:
        """What is free, to whoever asks first, and what there is in all."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Do `work` and tell how much memory it took at its height, beyond what was in use before."""
        ...

    def time_s(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes on the device, when it has been done before."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can reach by itself, zeroed."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Capture work for `compute`, and what it returns: tensors that each replay fills anew. Graphs share memory, so
        that a replay may overwrite what another one has returned."""
        ...

    def fetch(self, tensors: Sequence[Tensor], after: Event) -> list[Tensor]:
        """Copies on the host, made as soon as `after` has come and whatever `compute` has been given since then."""
        ...


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Callable[[], None], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> CudaEvent:
        event = CudaEvent()
        event.event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaEvent:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a host that waits does not spin: the server needs the processor

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """The CUDA device of this process: the first that CUDA_VISIBLE_DEVICES leaves."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(self.torch_device)
        compute = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(compute)  # so that entering `compute` again changes nothing
        self.compute = CudaStream(compute)
        self.copies = CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()

    def memory_bytes(self) -> tuple[int, int]:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def time_s(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        work()
        begin.record(self.compute.stream)
        for _ in range(_TIMED):
            work()
        end.record(self.compute.stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / _TIMED

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        work()  # kernels are compiled and libraries set up outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self.compute.stream):
            result = work()
        return graph, result

    def fetch(self, tensors: Sequence[Tensor], after: Event) -> list[Tensor]:
        self.copies.wait(after)
        with torch.cuda.stream(self.copies.stream):
            return [tensor.cpu() for tensor in tensors]
