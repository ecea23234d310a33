"""The kernel interface: the names of all operations that models are made of, and the functions that load a backend.

A backend is a module that provides the functions of `Ops`. `tests/ops/torch_ref.py` defines them in plain torch, for
tests of kernels; `cpu` calls the native kernels; `cuda` calls the Triton kernels. Models, runner and sampler are
written against `Ops`, compute through `Ops` only, and import no backend.

Every operation is *row-wise*: the result of one token does not depend on the rest of the batch, bit for bit, in every
backend but the reference. Therefore an answer does not depend on load, chunking or caching.

The array type is the backend's: numpy arrays on a CPU, torch tensors on a GPU and in the reference. Small lists that
the host makes (`HostArray`) are numpy arrays for every backend; a backend uploads them without waiting for its device.
Element types are given by name: "float32", "bfloat16", "float16", "int64", ...

Shapes: T tokens of a step in request order, S sequences, H hidden size, D head size, Q query heads, G key/value heads,
N samples, V vocabulary size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo.ops.arrays import (
    ACTIVATIONS,
    BIAS_PADDING,
    NO_TOKEN,
    PARAMETRIC_ACTIVATIONS,
    POOLINGS,
    Array,
    ExpertsWeight,
    HostArray,
    LayerKVCache,
    LinearWeight,
    Routing,
)
from octavo.ops.capabilities import (
    AdapterOpsOver,
    DeviceOpsOver,
    IndexOpsOver,
    ParallelDeviceOpsOver,
    ParallelOpsOver,
    SegmentOpsOver,
)
from octavo.ops.factors import (
    AdapterTable,
    Expand,
    ExpandExperts,
    ExpertsAdapterTable,
    ExpertsFactors,
    Factors,
    FactorShape,
    Lookup,
    LowRank,
    PackedFactors,
    Whole,
)
from octavo.ops.operations import OpsOver

__all__ = [
    "ACTIVATIONS", "BIAS_PADDING", "NO_TOKEN", "PARAMETRIC_ACTIVATIONS", "POOLINGS", "AdapterOps", "AdapterOpsOver",
    "AdapterTable", "Array", "DeviceOps", "DeviceOpsOver", "Expand", "ExpandExperts", "ExpertsAdapterTable",
    "ExpertsFactors", "ExpertsWeight", "FactorShape", "Factors", "HostArray", "IndexOps", "IndexOpsOver",
    "LayerKVCache", "LinearWeight", "Lookup", "LowRank", "Ops", "OpsOver", "PackedFactors", "ParallelDeviceOps",
    "ParallelDeviceOpsOver", "ParallelOps", "ParallelOpsOver", "Routing", "SegmentOps", "SegmentOpsOver", "Whole",
    "load", "load_cuda",
]  # fmt: skip

# Models, runner and sampler are written against these: the protocols over arrays that offer only what `Array` does.
Ops = OpsOver[Array]
DeviceOps = DeviceOpsOver[Array]
AdapterOps = AdapterOpsOver[Array]
IndexOps = IndexOpsOver[Array]
SegmentOps = SegmentOpsOver[Array]
ParallelOps = ParallelOpsOver[Array]
ParallelDeviceOps = ParallelDeviceOpsOver[Array]


def load(cpu_threads: int | None = None, cpus: list[int] | None = None) -> Ops:
    """Return the native backend, which computes on `cpu_threads` threads, each kept on its processor of `cpus`.

    None means the default number of threads, or threads that are kept on no processor. Raises `ConfigError` for
    threads or processors that this process cannot have.
    """
    from octavo.ops import cpu

    cpu.use_threads(cpu_threads, cpus)
    backend: AdapterOpsOver[HostArray] = (
        cpu  # the type checker refuses a backend that lacks an operation or takes other arguments
    )
    return cast(Ops, backend)


def load_cuda() -> DeviceOps:
    """Return Triton's backend, on the current CUDA device."""
    from octavo.ops import cuda

    backend: ParallelDeviceOpsOver[Tensor] = cuda
    return cast(DeviceOps, backend)


if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops import cpu, cuda

    _index: IndexOpsOver[HostArray] = cpu
    _index_of_devices: IndexOpsOver[Tensor] = cuda
    _segments: SegmentOpsOver[HostArray] = cpu
    _parallel: ParallelOpsOver[HostArray] = cpu
    _adapters_of_devices: AdapterOpsOver[Tensor] = cuda
