"""The kernel interface: every operation that a model is made of, named once.

A backend is a module that provides the functions of `Ops`: `torch_ref` says what they mean in plain torch and is the
oracle of every kernel test, `cpu` is native, `cuda` is Triton's. Models, runner and sampler are written against `Ops`,
compute through it only, and import no backend.

Every operation is *row-wise*: what it computes for one token depends on nothing else in the batch, bit for bit, in
every backend but the reference. That is what makes an answer independent of load, chunking and caching.

Arrays are whatever the backend takes: numpy's on a CPU, torch's on a GPU and in the reference. Small lists that the
host makes (`HostArray`) are numpy's for every backend, which brings them to its device without waiting for it.
Element types go by their names: "float32", "bfloat16", "float16", "int64", ...

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

# What models, runner and sampler are written against: the same over arrays of which they know no more than `Array`.
Ops = OpsOver[Array]
DeviceOps = DeviceOpsOver[Array]
AdapterOps = AdapterOpsOver[Array]
IndexOps = IndexOpsOver[Array]
SegmentOps = SegmentOpsOver[Array]
ParallelOps = ParallelOpsOver[Array]
ParallelDeviceOps = ParallelDeviceOpsOver[Array]


def load(cpu_threads: int | None = None, cpus: list[int] | None = None) -> Ops:
    """The native backend, and how many threads compute, on which processors.

    Raises `ConfigError` for threads that this process cannot have.
    """
    from octavo.ops import cpu

    cpu.use_threads(cpu_threads, cpus)
    backend: AdapterOpsOver[HostArray] = (
        cpu  # what lacks an operation, or takes other arguments, does not pass the type checker
    )
    return cast(Ops, backend)


def load_cuda() -> DeviceOps:
    """Triton's backend, on the CUDA device that is current."""
    from octavo.ops import cuda

    backend: ParallelDeviceOpsOver[Tensor] = cuda
    return cast(DeviceOps, backend)


if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops import cpu, cuda, torch_ref

    _index: IndexOpsOver[HostArray] = cpu
    _index_of_devices: IndexOpsOver[Tensor] = cuda
    _segments: SegmentOpsOver[HostArray] = cpu
    _parallel: ParallelOpsOver[HostArray] = cpu
    _reference: DeviceOpsOver[Tensor] = torch_ref
    _reference_of_index: IndexOpsOver[Tensor] = torch_ref
    _reference_of_adapters: AdapterOpsOver[Tensor] = torch_ref
    _adapters_of_devices: AdapterOpsOver[Tensor] = cuda
