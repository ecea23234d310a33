"""Compiled kernels and launchers in one file, for machines that have no C compiler or should not wait for one.

`octavo kernels` makes an archive, on a machine with or without a GPU; a server uses the archive that OCTAVO_KERNELS
names. An archive belongs to one version of Triton, of Python and of the kernels' sources, and to some compute
capabilities (`archive_key`). Kernels that it lacks are compiled as usual. It contains machine code: use archives only
from sources whose programs you would run.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import logging
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import build
from triton.runtime import cache as triton_cache
from triton.runtime.driver import driver

from octavo.errors import ConfigError
from octavo.ops.triton import launch

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_KEPT = (".cubin", ".json", ".so")  # the files of Triton's cache that a launch needs
# Number of multiprocessors of the usual device of a compute capability, from which tiles are chosen ("Compute
# Capabilities" of the CUDA programming guide; A100, A10, L40S, H100, B200).
MULTIPROCESSORS = {(8, 0): 108, (8, 6): 72, (8, 9): 142, (9, 0): 132, (10, 0): 148}


@cache
def archive_key() -> str:
    """Return a key of everything that kernels depend on besides model and device."""
    sources = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    python = sys.implementation.cache_tag
    return f"{sources.hexdigest()[:16]}-triton-{triton.__version__}-{python}-{platform.machine()}"


def _use_portable_keys() -> None:
    """Have Triton name compiled files alike on all machines with the same `archive_key`."""
    # Triton's own key hashes the compiler's library, to distinguish builds of one version.
    triton_cache.triton_key = _triton_key
    if hasattr(build, "_get_cache_manager"):  # from 3.7 on a launcher's name contains folders of libraries
        build._get_cache_manager = _module_cache


def _triton_key() -> str:
    return f"octavo-{triton.__version__}"


def _module_cache(source: bytes, config: object) -> Any:
    return triton_cache.get_cache_manager(hashlib.sha256(archive_key().encode() + source).hexdigest())


def use_archive(path: str, folder: Path) -> bool:
    """Unpack the archive's kernels to a subfolder of `folder`, where Triton finds them. Returns whether they can be
    used here. Call it before any kernel is launched. Raises `ConfigError` for a file that is no archive."""
    try:
        with tarfile.open(path) as archive:
            manifest = json.loads(_read(archive, _MANIFEST))
            if manifest["key"] != archive_key():
                logger.warning(
                    "OCTAVO_KERNELS=%s is of %s and this is %s: kernels are compiled here", path, manifest["key"],
                    archive_key(),
                )  # fmt: skip
                return False
            own = list(launch.capability(launch.device()))
            if own not in manifest["capabilities"]:
                logger.warning("OCTAVO_KERNELS=%s has no kernels for compute capability %d.%d", path, *own)
                return False
            target = folder / archive_key()
            target.mkdir(parents=True, exist_ok=True)
            _unpack(archive, target)
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"OCTAVO_KERNELS={path} is not an archive of `octavo kernels` ({error}).") from error
    os.environ["TRITON_CACHE_DIR"] = str(target)
    _use_portable_keys()
    return True


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()


def _unpack(archive: tarfile.TarFile, target: Path) -> None:
    """Write the files that `target` lacks. Other processes may do the same."""
    for member in archive.getmembers():
        parts = Path(member.name).parts
        if not member.isfile() or len(parts) != 2 or ".." in parts or parts[0] == "/":
            continue
        file = target / member.name
        if file.exists():
            continue
        content = _read(archive, member.name)
        if file.name.startswith("__grp__"):
            content = _with_paths(content, file.parent)
        file.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(content)
        Path(new.name).replace(file)


def _with_paths(group: bytes, folder: Path) -> bytes:
    """Return a group's index with paths in `folder`. Triton stores the full path of each file, and ignores a group if a
    file is missing."""
    files = json.loads(group)["child_paths"]
    kept = {name: str(folder / name) for name in files if Path(name).suffix in _KEPT}
    return json.dumps({"child_paths": kept}).encode()


@contextmanager
def making_archive(output: str, capabilities: Sequence[tuple[int, int]]) -> Iterator[Iterator[tuple[int, int]]]:
    """Yield the capabilities one by one. Kernels compiled meanwhile are for a device of the current capability, and go
    to `output`. The process can launch no kernels afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_STORE_BINARY_ONLY": "1"}
        _use_portable_keys()
        _provide_libcuda(Path(folder))
        build._load_module_from_path = lambda name, path: _Anything()  # the launcher may be for another machine
        yield map(_become_absent, capabilities)
        _write(output, Path(folder), capabilities)


class _Anything:
    """Stands for a launcher that is built but not loaded."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self


class _AbsentDriver:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.capability = 10 * capability[0] + capability[1]
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _become_absent(capability: tuple[int, int]) -> tuple[int, int]:
    """Make this process compile for a device that is absent."""
    driver.set_active(_AbsentDriver(capability))
    launch._capability = lambda device: capability  # type: ignore[assignment]
    launch._num_multiprocessors = lambda device: MULTIPROCESSORS[capability]  # type: ignore[assignment]
    return capability


def _provide_libcuda(folder: Path) -> None:
    """Provide an empty libcuda: launchers are linked with the driver's library, and its name is enough."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        there = folder / "libcuda"
        there.mkdir()
        compiler = os.environ.get("CC", "cc")
        flags = ["-shared", "-Wl,-soname,libcuda.so.1", "-xc", os.devnull, "-o", str(there / "libcuda.so.1")]
        try:
            subprocess.run([compiler, *flags], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"`octavo kernels` needs a C compiler: {compiler} failed ({error}). Set CC.") from error
        os.environ["TRITON_LIBCUDA_PATH"] = str(there)


def _write(output: str, folder: Path, capabilities: Sequence[tuple[int, int]]) -> None:
    manifest = json.dumps({"key": archive_key(), "capabilities": [list(each) for each in capabilities]}).encode()
    part = f"{output}.part"
    with tarfile.open(part, "w:gz") as archive:
        entry = tarfile.TarInfo(_MANIFEST)
        entry.size = len(manifest)
        archive.addfile(entry, io.BytesIO(manifest))
        for file in sorted(folder.glob("*/*")):
            if file.parent.name != "libcuda" and file.suffix in _KEPT:
                archive.add(file, f"{file.parent.name}/{file.name}")
    os.replace(part, output)
