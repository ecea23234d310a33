"""Collects the facts for a bug report: versions, platform, processor, devices, limits, packages and variables.

It measures nothing and uses no network. Values of variables that may be secret are left out.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.hardware import num_cuda_devices, why_not_cuda
from octavo.loading.memory import GIB, available_memory_bytes
from octavo.variables import VARIABLES
from octavo.version import __version__

PACKAGES = (
    "octavo", "numpy", "ml-dtypes", "tokenizers", "huggingface-hub", "msgspec", "pyzmq", "fastapi", "starlette",
    "uvicorn", "uvloop", "httptools", "pydantic", "prometheus-client", "jinja2", "llguidance", "psutil", "torch",
    "triton", "transformers", "opentelemetry-sdk", "ray",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(OCTAVO|VLLM|HF|CUDA|NVIDIA|OMP|TRITON|PIP|UV)_.*|TRANSFORMERS_(CACHE|OFFLINE)"
    r"|(HTTPS?|NO|ALL)_PROXY|PYTHON(DONTWRITEBYTECODE|OPTIMIZE)",
    re.IGNORECASE,
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|HEADERS|COOKIE", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/@\s]+@")  # user and password in an address
# Processor flags that decide the choice of kernels, in Linux's spelling.
_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile",
    "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Return all facts by section, as plain data."""
    return {
        "octavo": {"version": __version__, "path": str(Path(__file__).resolve().parents[1]), "commit": _commit()},
        "python": {"version": sys.version.split()[0], "executable": sys.executable, "prefix": sys.prefix},
        "platform": {
            "system": platform.platform(),
            "libc": " ".join(platform.libc_ver()),
            "machine": platform.machine(),
        },
        "processor": _processor(),
        "memory": _memory(),
        "limits": limits(),
        "gpus": _gpus(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "variables": variables(os.environ),
    }


def variables(environ: Any) -> dict[str, str]:
    """Return the variables that matter to Octavo. If a name suggests a secret, the value only says that it is set."""
    found = {}
    for name in sorted(environ):
        if name in VARIABLES or _VARIABLES.fullmatch(name):
            found[name] = "(set, not shown)" if _SECRET.search(name) else _LOGIN.sub("//***@", environ[name])
    return found


def limits() -> dict[str, Any]:
    """Return the limits of this process, including its container's. None means no limit."""
    import resource

    def of(kind: int, which: int = 0) -> int | None:
        found = resource.getrlimit(kind)[which]
        return None if found == resource.RLIM_INFINITY else found

    return {
        "open_files": of(resource.RLIMIT_NOFILE),
        "open_files_at_most": of(resource.RLIMIT_NOFILE, 1),  # a server raises open_files to this
        "locked_bytes": of(resource.RLIMIT_MEMLOCK),
        "address_space_bytes": of(resource.RLIMIT_AS),
        "processors": processor_quota(),
    }


def processor_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the number of processors whose time this process's control groups grant; None without a quota."""
    from octavo.loading.memory import own_groups

    found = []
    for group in own_groups(root):
        try:
            quota, period = (group / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))  # "max" raises ValueError: no limit
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def as_text(found: dict[str, Any]) -> str:
    """Return the facts as text: sections with lines of `name: value`."""
    lines = []
    for section, entries in found.items():
        lines.append(f"{section}:")
        pairs = entries.items() if isinstance(entries, dict) else enumerate(entries)
        lines += [f"  {name}: {_shown(value)}" for name, value in pairs] or ["  (none)"]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "(none)"
    return "(none)" if value is None else str(value)


def _processor() -> dict[str, Any]:
    model, flags = platform.processor() or "unknown", set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = set(value.split())
    except OSError:
        pass
    try:
        from octavo import _cpu

        kernels: Any = {"kernels": _cpu.isa(), "kernels_available": _cpu.available_isas()}
    except ImportError as error:
        kernels = {"kernels": f"cannot be loaded: {error}"}
    return {
        "model": model,
        "flags": [flag for flag in _FLAGS if flag in flags],
        **kernels,
        "processors": os.cpu_count(),
        "usable_processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _memory() -> dict[str, Any]:
    import psutil

    return {
        "total_gib": round(psutil.virtual_memory().total / GIB, 2),
        "available_to_this_process_gib": round(available_memory_bytes() / GIB, 2),
        "swap_used_gib": round(psutil.swap_memory().used / GIB, 2),
    }


def _gpus() -> dict[str, Any]:
    found: dict[str, Any] = {"devices": num_cuda_devices(), "why_not_used": why_not_cuda()}
    if found["devices"]:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        found["names"] = _output(query)
    return found


def _commit() -> str | None:
    """Return the git description of the checkout, or None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    return (
        _output(["git", "-C", str(folder), "describe", "--always", "--dirty"]) if (folder / ".git").exists() else None
    )


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
