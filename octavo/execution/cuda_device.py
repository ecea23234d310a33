"""The CUDA device of this process. All code that is specific to CUDA, except kernels, is here."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config import CacheConfig
from octavo.errors import ConfigError
from octavo.execution.device import Event, ModelOutputs, StepModel
from octavo.execution.step_arrays import UPDATES_PER_DECODE, StepArrays, StepLimits, StepShape
from octavo.ops import Array

_GIB = 1 << 30


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences of the steps to capture. A step is padded to the next larger size. Padding costs
    less than a third up to 512; below 16 it costs nothing, because reading the weights takes the time."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 513, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


_MIXED_TOKENS = (128, 256, 512)  # larger steps keep the device busy for longer than Python takes to launch them
_TEXT_TOKENS = (*_MIXED_TOKENS, 1024, 2048)  # for encoders, which are small


def shapes_to_capture(limits: StepLimits) -> list[StepShape]:
    """Return the shapes of steps to capture: steps of decodes, by number of sequences, then steps with prompts, by
    number of tokens. If the model takes media, each step with prompts comes without and with media rows, so that steps
    without media upload none. With adapters, all shapes come first without adapters, as fast as if none were served,
    then with them. Models that pool have no decodes, and may sample after every token."""
    largest, groups = limits.largest, limits.groups
    if largest.adapted:
        plain = shapes_to_capture(replace(limits, largest=replace(largest, adapted=False)))
        return plain + [replace(shape, adapted=True) for shape in plain]
    decodes = [
        StepShape(tokens=size, seqs=size, samples=size, updates=UPDATES_PER_DECODE * groups * size)
        for size in graph_sizes(largest.seqs)
    ]
    most = _TEXT_TOKENS if limits.pools == "texts" else _MIXED_TOKENS
    sizes = [size for size in most if size < largest.tokens] + [min(largest.tokens, most[-1])]
    mixed = []
    for size in dict.fromkeys(sizes):
        num_seqs = max(1, min(largest.seqs, size // 2))
        # An admitted sequence sends its whole block table; cached prefixes have at most as many blocks as the step has
        # tokens.
        num_updates = min(largest.updates, groups * (UPDATES_PER_DECODE * num_seqs + size))
        num_samples = size if limits.pools else num_seqs
        shape = StepShape(tokens=size, seqs=num_seqs, samples=num_samples, updates=num_updates)
        mixed += [shape, replace(shape, media=size)] if largest.media else [shape]
    return mixed if limits.pools else decodes + mixed


def can_pad_to(used: StepShape, captured: StepShape) -> bool:
    """Return whether padding turns a step into `captured`. A captured step of decodes can replay only decodes."""
    if captured.tokens == captured.seqs and not used.tokens == used.seqs == used.samples:
        return False
    if used.adapted and not captured.adapted:
        return False
    sizes = ("tokens", "seqs", "samples", "updates", "media")
    return all(getattr(used, name) <= getattr(captured, name) for name in sizes)


def _unpin(device: torch.device, address: int) -> None:
    """Unpin pages before they go back to the system: otherwise CUDA would refuse to pin the next memory at these
    addresses."""
    torch.cuda.synchronize(device)  # nothing may still copy
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class CudaEvent:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a host that waits does not spin: the server needs the processor

    @property
    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(
        self, work: Callable[[], None], reads: Sequence[NDArray[Any]] = (), writes: Sequence[NDArray[Any]] = ()
    ) -> None:
        with torch.cuda.stream(self.stream), torch.inference_mode():
            work()

    def record(self) -> CudaEvent:
        event = CudaEvent()
        event.event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CapturedGraph:
    """A CUDA graph, and the arrays that it writes its results to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: ModelOutputs) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self, used: StepShape) -> None:
        self._graph.replay()


class CudaDevice:
    """The CUDA device of this process: number `index` of the devices in CUDA_VISIBLE_DEVICES."""

    runs_ahead = True
    shares_memory = False
    memory_errors: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self.name = torch.cuda.get_device_name(self._device)
        self.hardware = f"{self.name} {torch.cuda.get_device_capability(self._device)}"
        # Kernels of steps run before a tower's, which are in torch's default stream with priority 0.
        compute = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(compute)  # so that entering `compute` again changes nothing
        self.compute = CudaStream(compute)
        self.copies = CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        # Results do not wait for copies of blocks, which may be hundreds of MB.
        self._results = CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()
        # By model: the results of its largest captured step. Smaller steps use the beginnings of these arrays; results
        # of their own would take memory for each graph.
        self._outputs: dict[StepModel, list[Tensor]] = {}

    def free_bytes(self) -> int:
        return self._memory_bytes()[0]

    def cache_bytes(self, config: CacheConfig, step: Callable[[], None], other_bytes: int) -> tuple[int, str]:
        step_bytes = self.peak_bytes(step)
        free, total = self._memory_bytes()
        share = config.gpu_memory_utilization
        source = (
            f"--gpu-memory-utilization {share} of {total / _GIB:.2f} GiB, less {(total - free) / _GIB:.2f} GiB in use "
            f"and {(step_bytes + other_bytes) / _GIB:.2f} GiB for the largest step, graphs, towers and copies,"
        )
        return int(total * share) - (total - free) - step_bytes - other_bytes, source

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self._device) - before

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def pinned(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Allocate pages and register them: torch would round the size up to a power of two, and a swap tier may be
        half of the memory."""
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        pages = np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), np.uint8)  # zeros; arrays made from them keep them
        address = pages.ctypes.data
        with torch.cuda.device(self._device):  # threads that read adapters start with device 0
            error = int(torch.cuda.cudart().cudaHostRegister(address, len(pages), 0))  # type: ignore[no-untyped-call]
        if error:
            raise ConfigError(f"{num_bytes / _GIB:.2f} GiB of host memory could not be pinned (CUDA error {error}).")
        weakref.finalize(pages, _unpin, self._device, address).atexit = False
        return pages[:num_bytes].view(dtype).reshape(tuple(shape))

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        with torch.cuda.stream(self.compute.stream):  # in the compute stream, whichever thread calls
            return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=self._device)

    def upload_target(self, pinned: NDArray[Any]) -> Any:
        return self.zeros(pinned.shape, pinned.dtype.name)

    def as_input(self, array: Any) -> Any:
        return array

    def view(self, array: Any, dtype: str) -> Any:
        return array.view(getattr(torch, dtype))

    def copy(self, source: Any, target: Any) -> None:
        source, target = (x if isinstance(x, Tensor) else torch.from_numpy(x) for x in (source, target))
        target.copy_(source, non_blocking=True)

    def capture_shapes(self, limits: StepLimits) -> list[StepShape]:
        return shapes_to_capture(limits)

    def can_replay(self, captured: StepShape, used: StepShape) -> bool:
        return can_pad_to(used, captured)

    def capture(self, model: StepModel, inputs: StepArrays[Array]) -> CapturedGraph:
        """Capture the step in a graph. All its kernels must have been launched before."""

        def work() -> list[Tensor]:
            """Return hidden states, logits and the likeliest tokens; and the features if they are not the hidden
            states."""
            hidden, features = model.hidden(inputs)
            found: list[Any] = [hidden, *model.logits(inputs, hidden)]
            return found + ([] if features is hidden else [features])

        with torch.inference_mode(), torch.cuda.stream(self.compute.stream):
            num_rows = (len(inputs.token_ids), len(inputs.sample_rows), len(inputs.sample_rows))
            kept = self._outputs.get(model, [])
            if not kept or any(len(whole) < count for whole, count in zip(kept, num_rows, strict=False)):
                found = work()
                kept = kept or [tensor[:0] for tensor in found]
                self._outputs[model] = kept = [
                    whole if len(whole) >= len(tensor) else torch.empty_like(tensor)
                    for whole, tensor in zip(kept, found, strict=True)
                ]
            self.compute.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # not `torch.cuda.graph`, which collects garbage before each of about twenty captures
            try:
                # Other threads may use CUDA meanwhile: NCCL's, and those that watch processes.
                graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
                try:
                    found = work()
                    outputs = [whole[: len(each)] for whole, each in zip(kept, found, strict=True)]
                    for output, tensor in zip(outputs, found, strict=True):
                        output.copy_(tensor)
                    del found, tensor
                finally:
                    graph.capture_end()
            finally:
                gc.enable()
        hidden, logits, argmax_tokens, *other = cast(list[Any], outputs)
        return CapturedGraph(graph, ModelOutputs(hidden, other[0] if other else hidden, logits, argmax_tokens))

    def fetch(self, arrays: Sequence[Array], after: Event) -> list[NDArray[Any]]:
        self._results.wait(after)
        tensors: Any = arrays
        with torch.cuda.stream(self._results.stream):
            return [tensor.cpu().numpy() for tensor in tensors]

    def _memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total device memory. Another process may take the free memory meanwhile."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)
