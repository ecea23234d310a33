"""An adapter's files, and its identity: a hash of their contents.

The front end identifies an adapter when a request names it. The core reads the files later, once, into its own memory,
and hashes the bytes that it has read. So everything that is stored by identity is made from bytes with this hash,
whatever the file system reports. `identify` assumes that a file with the same path, size, times and inode has not
changed. If this is wrong, the core finds another hash, and the request fails.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from octavo.errors import LoadError, RequestError
from octavo.loading.mapped_file import ReadFile
from octavo.request import AdapterSource

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The paths of an adapter's files: PEFT's configuration and weights, or a GGUF file with both (`config` is
    None)."""

    config: str | None
    weights: str

    @property
    def paths(self) -> list[str]:
        return [self.weights] if self.config is None else [self.config, self.weights]


def refusal(name: str, error: LoadError, folder: str, param: str) -> RequestError:
    """Return the refusal of a request for an adapter that cannot be read. The log has the server's own paths, and
    clients get those below the adapter's `folder`."""
    logger.warning("adapter %s: %s", name, error)
    said = str(error).replace(f"{folder}/", "").replace(folder, "its folder")
    return RequestError(f"adapter {name!r}: {said}", param=param)


def find(path: str, download_dir: str | None = None, may_fetch: bool = False) -> AdapterFiles:
    """Return the files of the adapter in a folder or .gguf file; with `may_fetch`, also of a hub id, whose files are
    downloaded. Raises `LoadError`."""
    try:
        place = Path(os.path.abspath(Path(path).expanduser()))  # links stay: one to a hub's blob has the file's name
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
    """The contents of an adapter's files when they were read."""

    config: ReadFile | None
    weights: ReadFile

    @property
    def identity(self) -> str:
        files = [self.weights] if self.config is None else [self.config, self.weights]
        return _identity(hashlib.sha256(file.data).digest() for file in files)


def read(source: AdapterSource) -> AdapterContents:
    """Return the contents of an adapter's files. Raises `LoadError` if they no longer have the source's identity."""
    config = None if source.config is None else ReadFile(source.config, _MAX_CONFIG_BYTES)
    contents = AdapterContents(config, ReadFile(source.weights))
    if contents.identity != source.identity:
        raise LoadError("its files have changed since it was asked for; ask again.")
    return contents


_identities: dict[tuple[tuple[str, int, int, int, int, int], ...], str] = {}  # by path and `os.stat`
_identities_lock = Lock()
_MAX_IDENTITIES = 65536


def identify(files: AdapterFiles) -> str:
    """Return the hash of the files' contents. Files that have not changed since the last call are not read again.
    Raises `LoadError`."""
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
    # Processors have instructions for SHA-256: a Zen 3 core hashes 1.5 GB/s, and 0.8 GB/s with BLAKE2b.
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _identity(digests: Iterable[bytes]) -> str:
    """Return the hash of the files' digests in hexadecimal: 16 bytes, like the hashes of cached blocks."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]


def source(name: str, path: str, download_dir: str | None = None, may_fetch: bool = False) -> AdapterSource:
    """Return the description of an adapter that the core gets. Raises `LoadError`."""
    files = find(path, download_dir, may_fetch)
    identity = identify(files)
    try:
        num_bytes = os.path.getsize(files.weights)
    except OSError as e:
        raise LoadError(f"cannot read {files.weights}: {e.strerror}.") from None
    return AdapterSource(identity, name, files.config, files.weights, num_bytes)


def parse_config(file: ReadFile) -> dict[str, Any]:
    """Return the JSON object in a configuration file. Raises `LoadError`."""
    try:
        config = json.loads(bytes(file.data).decode())
    except (ValueError, RecursionError) as e:
        raise LoadError(f"{file.path} is no JSON: {' '.join(str(e).split())}.") from None
    if not isinstance(config, dict):
        raise LoadError(f"{file.path} is a JSON {type(config).__name__}, not an object.")
    return config
