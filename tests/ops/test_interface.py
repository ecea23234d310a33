"""The backends have the operations of the interface, with its arguments: by name, as the type checker sees them too."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from octavo.ops import AdapterOpsOver, DeviceOpsOver, OpsOver, ParallelOpsOver, cuda, torch_ref


def operations(protocol: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(getattr(protocol, name)) for name in dir(protocol) if name[0] != "_"}


def check(module: ModuleType, *protocols: type) -> None:
    """Of an operation that several have, the last one's arguments are meant."""
    wanted = {name: expected for protocol in protocols for name, expected in operations(protocol).items()}
    for name, expected in wanted.items():
        found = [(p.name, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
        assert found == [(p.name, p.default) for p in list(expected.parameters.values())[1:]], name


def test_the_native_backend_provides_what_hosts_need() -> None:
    pytest.importorskip("octavo._cpu", exc_type=ImportError)
    from octavo.ops import cpu

    check(cpu, ParallelOpsOver, AdapterOpsOver)


@pytest.mark.parametrize("module", [cuda, torch_ref])
def test_other_backends_provide_what_devices_need(module: ModuleType) -> None:
    check(module, DeviceOpsOver, AdapterOpsOver)
    assert operations(OpsOver).keys() < operations(DeviceOpsOver).keys()
