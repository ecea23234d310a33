"""Fixtures of the kernel tests: every test that takes `isa` runs once for each instruction set of this machine that has
kernels of its own for it, those included that the build emulates (`scripts/install --kernels emulated`).

The Triton kernels' tests do without the native module, as a machine with a GPU may have none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

try:
    from octavo import _cpu
except ImportError:
    _cpu = None


# Instruction sets that replace some kernels of another set's table (csrc/cpu/dispatch.cpp) -> which.
_REPLACED = {
    "amx": {"products", "attention"},
    "amx_emulated": {"products", "attention"},
    "avx512_vnni": {"products"},
    "avx2_vnni": {"products"},
    "avx2_vnni_emulated": {"products"},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module says in KERNELS which kernels it tests: "products" where it does not. The set that this machine would
    choose for them is tested always, the others in the long tier."""
    names_its_own = any(mark.args[0] == "isa" for mark in metafunc.definition.iter_markers("parametrize"))
    if "isa" not in metafunc.fixturenames or names_its_own:
        return
    kernels = getattr(metafunc.module, "KERNELS", "products")
    available = _cpu.available_isas() if _cpu else ["none is built"]
    own = [name for name in available if kernels in _REPLACED.get(name, {kernels})]
    params = [pytest.param(name, marks=pytest.mark.long if i else ()) for i, name in enumerate(own)]
    metafunc.parametrize("isa", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
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
