"""Teams of workers with devices where there is none: `octavo.execution` as it runs on GPUs, over `LateDevice`.

The first worker's device is as late as it may be. The others' compute what they are given at once, as nobody on their
hosts waits: they are at the rows that all exchange before the first one is. `late_followers` has all workers of a test
be such; as a module this is a follower: `python -m tests.execution.late_worker_group`, or with a core's arguments
such a core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from octavo.engine import core_client, core_process
from octavo.execution import compile_ahead, cuda_device, executor, follower, host_workers
from octavo.ops import cuda, cuda_collectives
from octavo.processes import python_command
from tests.execution.late_device import LateDevice, LateStream
from tests.ops import torch_ref

_OPS = "OCTAVO_TESTS_LATE_OPS"


class _PromptStream(LateStream):
    def _append(self, work: Callable[[], bool]) -> None:
        super()._append(work)
        while self.step():
            pass


class PromptDevice(LateDevice):
    """One that has done its work when it has been given it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.compute, self.copies = _PromptStream(self), _PromptStream(self)


def _reference() -> Any:
    """The reference, with the collectives of the CUDA backend."""
    exchanges = {name: getattr(cuda_collectives, name) for name in ("all_gather", "all_reduce", "from_first")}
    return SimpleNamespace(**(vars(torch_ref) | exchanges))


def _sum_in_tree(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """As the kernel does, which takes long in the interpreter, for one, two or four."""
    sums = list(parts)
    while len(sums) > 1:
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
    out.copy_(sums[0] if bias is None else sums[0] + bias)


def _install(device: type[LateDevice], ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "CudaDevice", device)
    monkeypatch.setattr(executor, "load_cuda", lambda: cuda if ops == "triton" else _reference())
    if ops != "triton":
        monkeypatch.setattr(cuda_collectives, "sum_in_tree", _sum_in_tree)
        # It has no kernels to compile, and its arrays are none without memory: it would wait for others' rows.
        monkeypatch.setattr(compile_ahead, "compile_ahead", lambda *_: None)


def _own_command(_module: str, *arguments: str) -> list[str]:
    return python_command("tests.execution.late_worker_group", *arguments)


def late_followers(monkeypatch: pytest.MonkeyPatch, num_devices: int = 8, ops: str = "reference") -> None:
    """Have engines find so many GPUs, which are `LateDevice` with the operations of Triton or the reference."""
    for module in ("checks", "parallel_flags"):
        monkeypatch.setattr(f"octavo.config.{module}.why_not_cuda", lambda: None, raising=False)
    monkeypatch.setattr("octavo.config.parallel_flags.num_cuda_devices", lambda: num_devices)
    for caller in (host_workers, core_client):
        monkeypatch.setattr(caller, "child_command", _own_command)
    monkeypatch.setenv(_OPS, ops)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    _install(LateDevice, ops, monkeypatch)


if __name__ == "__main__":
    if "OCTAVO_TESTS_NO_DEVICE" in os.environ:
        raise SystemExit("CUDA error: invalid device ordinal")
    if len(sys.argv) > 1:
        late_followers(pytest.MonkeyPatch(), ops=os.environ[_OPS])
        core_process.main()
    _install(PromptDevice, os.environ[_OPS], pytest.MonkeyPatch())
    follower.main()
