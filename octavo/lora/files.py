"""An adapter's files, and what identifies them: a hash of their contents.

The front end identifies an adapter when it is asked for; the core reads it later, once, into memory of its own, and
hashes what it has read: whatever is kept by identity is made of bytes that have this hash, and no file system's word is
taken for it. `identify` takes it that a file of the same path, size, times and inode has not changed. Where that is
wrong the core finds another hash, and the request fails.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from octavo.errors import LoadError
from octavo.loading.mapped_file import ReadFile
from octavo.request import AdapterSource

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Where an adapter lies: the configuration of PEFT and its weights, or a GGUF file that holds both."""

    config: str | None
    weights: str

    @property
    def paths(self) -> list[str]:
        return [self.weights] if self.config is None else [self.config, self.weights]


def find(path: str, download_dir: str | None = None, may_fetch: bool = False) -> AdapterFiles:
    """The files of the adapter at a folder or .gguf file; of a hub id, if they `may_fetch`. Raises `LoadError`."""
    try:
        place = Path(path).expanduser()
        is_file = place.is_file()
    except (OSError, RuntimeError) as e:  # a name that is too long, or a user that does not exist
        raise LoadError(f"there is no adapter at {path[:200]}: {getattr(e, 'strerror', None) or e}.") from None
    if is_file:
        if place.suffix == ".gguf":
            return AdapterFiles(None, str(place))
        raise LoadError(f"{path} is a file, and no .gguf file; name the folder that has {CONFIG}.")
    if not place.is_dir():
        if not may_fetch or path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise LoadError(f"there is no adapter at {path}: it is neither a folder nor a .gguf file.")
        from octavo.loading.hub import download

        place = Path(download(path, None, download_dir, lambda names: [name for name in names if name in WEIGHTS]))
    if not (place / CONFIG).is_file():
        raise LoadError(f"{path} is no adapter of PEFT: it has no {CONFIG}.")
    found = next((name for name in WEIGHTS if (place / name).is_file()), None)
    if found is None:
        raise LoadError(f"{path} has no weights: neither {' nor '.join(WEIGHTS)}.")
    return AdapterFiles(str(place / CONFIG), str(place / found))


@dataclass(frozen=True, slots=True)
class AdapterContents:
    """What an adapter's files held when they were read."""

    config: ReadFile | None
    weights: ReadFile

    @property
    def identity(self) -> str:
        files = [self.weights] if self.config is None else [self.config, self.weights]
        return _identity(hashlib.sha256(file.data).digest() for file in files)


def read(source: AdapterSource) -> AdapterContents:
    """The contents of the identity that was asked for. Raises `LoadError` if the files have others by now."""
    config = None if source.config is None else ReadFile(source.config, _MAX_CONFIG_BYTES)
    contents = AdapterContents(config, ReadFile(source.weights))
    if contents.identity != source.identity:
        raise LoadError("its files have changed since it was asked for; ask again.")
    return contents


_identities: dict[tuple[tuple[str, int, int, int, int, int], ...], str] = {}  # by what `os.stat` says
_identities_lock = Lock()
_MAX_IDENTITIES = 65536


def identify(files: AdapterFiles) -> str:
    """The hash of their contents. Files that have not changed since they were read last are not read again. Raises
    `LoadError`."""
    try:
        stats = [os.stat(path) for path in files.paths]
        key = tuple(
            (path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev)
            for path, s in zip(files.paths, stats, strict=True)
        )
        with _identities_lock:
            known = _identities.get(key)
        if known is None:
            known = _identity(map(_digest, files.paths))
            with _identities_lock:
                if len(_identities) >= _MAX_IDENTITIES:
                    _identities.clear()
                _identities[key] = known
    except OSError as e:
        raise LoadError(f"cannot read {e.filename}: {e.strerror}.") from None
    return known


def _digest(path: str) -> bytes:
    # Processors have instructions for it: 1.5 GB/s of a Zen 3 core, where BLAKE2b reads 0.8.
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _identity(digests: Iterable[bytes]) -> str:
    """16 bytes, as the hashes of cached blocks have."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


def source(name: str, path: str, download_dir: str | None = None, may_fetch: bool = False) -> AdapterSource:
    """What the core is told of an adapter. Raises `LoadError`."""
    files = find(path, download_dir, may_fetch)
    identity = identify(files)
    try:
        num_bytes = os.path.getsize(files.weights)
    except OSError as e:
        raise LoadError(f"cannot read {files.weights}: {e.strerror}.") from None
    return AdapterSource(identity, name, files.config, files.weights, num_bytes)


def parse_config(file: ReadFile) -> dict[str, Any]:
    """A JSON object. Raises `LoadError`."""
    try:
        config = json.loads(bytes(file.data).decode())
    except (ValueError, RecursionError) as e:
        raise LoadError(f"{file.path} is no JSON: {' '.join(str(e).split())}.") from None
    if not isinstance(config, dict):
        raise LoadError(f"{file.path} is a JSON {type(config).__name__}, not an object.")
    return config
