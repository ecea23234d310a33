"""What can be seen of the CUDA device without one, in the place of whose driver is something that takes notes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.execution.cuda_device import CudaDevice, CudaEvent


class Driver:
    """What of it pins memory: as CUDA does, it refuses pages that are pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.devices: list[torch.device] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if any(address < begin + size and begin < address + num_bytes for begin, size in self.pinned.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()

    def enter(device: torch.device) -> nullcontext[None]:
        driver.devices.append(device)
        return nullcontext()

    replaced = SimpleNamespace(
        cudart=lambda: driver, device=enter, synchronize=lambda device: None,
        _is_in_bad_fork=lambda: True,  # read by torch.manual_seed, which the next fixtures' setup calls
    )  # fmt: skip
    monkeypatch.setattr("octavo.execution.cuda_device.torch.cuda", replaced)
    return driver


def new_device() -> CudaDevice:
    device = object.__new__(CudaDevice)
    device._device = torch.device("cuda", 1)
    return device


def test_pinned_memory_is_pinned_for_its_device_as_long_as_anything_refers_to_it(driver: Driver) -> None:
    device = new_device()
    array = device.pinned([3, 5], "int64")
    assert (array.shape, array.dtype, array.any()) == ((3, 5), np.int64, False)
    assert list(driver.pinned.values()) == [120] and driver.devices == [torch.device("cuda", 1)]
    row, tensor = array[1], torch.from_numpy(array[2])
    del array
    assert driver.pinned, "a view is left"
    del row
    assert driver.pinned, "a tensor is left"
    del tensor
    assert not driver.pinned
    for _ in range(3):  # an engine after another: the system maps their pages to the same addresses
        device.pinned([1 << 20], "uint8")


def test_memory_that_cannot_be_pinned_is_an_error_that_says_how_much(driver: Driver) -> None:
    driver.pinned[0] = 1 << 62
    with pytest.raises(ConfigError, match=r"1\.00 GiB of host memory could not be pinned \(CUDA error 712\)"):
        new_device().pinned([1 << 30], "uint8")


def test_results_do_not_wait_for_copies_of_blocks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, waited = [], []

    class Stream:
        def __init__(self, device: torch.device, priority: int = 0) -> None: ...

        def wait_event(self, event: object) -> None:
            waited.append(self)

    for name, value in {
        "Stream": Stream, "Event": lambda blocking: object(), "set_device": lambda device: None,
        "set_stream": lambda stream: None, "get_device_name": lambda device: "",
        "get_device_capability": lambda device: (9, 0), "graph_pool_handle": lambda: None,
        "stream": lambda stream: entered.append(stream) or nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    device = CudaDevice()
    [found] = device.fetch([torch.ones(2)], CudaEvent())
    assert found.tolist() == [1, 1] and entered == waited
    assert entered[0] not in (device.compute.stream, device.copies.stream)
