"""Finds this machine's devices without importing torch, because a server asks before it starts a core."""

import ctypes
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def num_cuda_devices() -> int:
    """Return the number of CUDA devices that the driver shows to this process, as limited by CUDA_VISIBLE_DEVICES. 0
    without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def with_devices(own: range) -> dict[str, str]:
    """Return environment variables that limit a child process to these CUDA devices of this process."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(own.stop)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(names.split(",")[own.start : own.stop])}


_expected: list[bool] = []


def expect_cuda() -> None:
    """Assume as many CUDA devices as flags ask for, in this process, which compiles kernels and launches nothing."""
    _expected.append(True)
    why_not_cuda.cache_clear()


def expects_cuda() -> bool:
    return bool(_expected)


@cache
def why_not_cuda() -> str | None:
    """Return why this process cannot use a CUDA device, and what to do about it; None if it can."""
    if _expected and find_spec("triton") is not None:
        return None
    if num_cuda_devices() == 0:
        return "no CUDA device was found: the driver (libcuda.so.1) is missing or shows none"
    if not _torch_has_cuda():
        return "the installed torch was built without CUDA; install a CUDA build of it (https://pytorch.org)"
    if find_spec("triton") is None:
        return "the package triton is missing; scripts/install cuda brings it"
    return None


def _torch_has_cuda() -> bool:
    """Return whether torch was built with CUDA, as torch/version.py says. Importing torch would take seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None
