"""The backends have the operations of the interface, with its arguments: by name, as the type checker sees them too."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Generic, Protocol

import pytest

from octavo.ops import AdapterOpsOver, DeviceOpsOver, IndexOpsOver, OpsOver, ParallelOpsOver, cuda
from tests.ops import torch_ref


def operations(*protocols: type) -> dict[str, inspect.Signature]:
    """Of an operation that several have, the last one's arguments are meant, if it is not the one that all inherit."""
    classes = dict.fromkeys(base for protocol in protocols for base in reversed(protocol.__mro__))
    found = [item for base in classes for item in vars(base).items() if base not in (object, Protocol, Generic)]
    return {name: inspect.signature(value) for name, value in found if name[0] != "_"}


def check(module: ModuleType, *protocols: type) -> None:
    for name, expected in operations(*protocols).items():
        found = [(p.name, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
        assert found == [(p.name, p.default) for p in list(expected.parameters.values())[1:]], name


def test_the_native_backend_provides_what_hosts_need() -> None:
    pytest.importorskip("octavo._cpu", exc_type=ImportError)
    from octavo.ops import cpu

    check(cpu, ParallelOpsOver, AdapterOpsOver, IndexOpsOver)


@pytest.mark.parametrize("module", [cuda, torch_ref])
def test_other_backends_provide_what_devices_need(module: ModuleType) -> None:
    check(module, DeviceOpsOver, AdapterOpsOver, IndexOpsOver)
    assert operations(OpsOver).keys() < operations(DeviceOpsOver).keys()
