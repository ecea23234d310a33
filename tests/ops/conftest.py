"""Fixtures of the kernel tests: every test that takes `isa` runs once for each instruction set of this machine, those
included that the build emulates (CMake's OCTAVO_EMULATED_ISAS, which scripts/test sets).

The Triton kernels' tests do without the native module, as a machine with a GPU may have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

try:
    from octavo import _cpu
except ImportError:
    _cpu = None


def _isas() -> Iterator[Any]:
    """Of an instruction set that this machine has, the emulation is tested in the long tier."""
    available = _cpu.available_isas() if _cpu else ["none is built"]
    for name in available:
        real = name.removesuffix("_emulated")
        yield pytest.param(name, marks=pytest.mark.long) if name != real and real in available else name


@pytest.fixture(scope="module", params=_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _cpu.isa()
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(before)


@pytest.fixture
def any_isa() -> Iterator[None]:
    """Restores the instruction set that a test changes."""
    before = _cpu.isa()
    yield
    _cpu.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads that a test changes."""
    before = _cpu.num_threads()
    yield
    _cpu.set_threads(before)


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Keeps the reference's threads from spinning against the kernels' own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
