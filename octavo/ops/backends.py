"""The backends as models see them. Here the type checker compares each with the interface: one that lacks
an operation, or takes other arguments, does not pass. `octavo.ops.load` and `load_cuda` call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from numpy.typing import NDArray

from octavo.ops import DeviceOps, DeviceOpsOver, Ops, OpsOver

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops import torch_ref

    _reference: DeviceOpsOver[Tensor] = torch_ref


def native(cpu_threads: int | None, cpus: list[int] | None) -> Ops:
    from octavo.ops import cpu

    cpu.use_threads(cpu_threads, cpus)
    backend: OpsOver[NDArray[Any]] = cpu
    return cast(Ops, backend)  # its arrays, by what is known of them


def triton() -> DeviceOps:
    from octavo.ops import cuda

    backend: DeviceOpsOver[Tensor] = cuda
    return cast(DeviceOps, backend)
