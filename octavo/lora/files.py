"""An adapter's files, and what identifies them: a hash of their contents.

The front end identifies an adapter when it is asked for; the core reads it later, and makes sure that it still has
those contents, so that whatever is kept by identity never holds anything else.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from octavo.errors import LoadError
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


_identities: dict[tuple[tuple[str, int, int, int], ...], str] = {}  # by path, size, time of change and inode
_identities_lock = Lock()
_MAX_IDENTITIES = 65536


def identify(files: AdapterFiles) -> str:
    """The hash of their contents: BLAKE2b with 16 bytes, as of cached blocks. Files that have not changed since they
    were read last are not read again. Raises `LoadError`."""
    try:
        stats = [os.stat(path) for path in files.paths]
        key = tuple((path, s.st_size, s.st_mtime_ns, s.st_ino) for path, s in zip(files.paths, stats, strict=True))
        with _identities_lock:
            known = _identities.get(key)
        if known is None:
            known = digest(files)
            with _identities_lock:
                if len(_identities) >= _MAX_IDENTITIES:
                    _identities.clear()
                _identities[key] = known
    except OSError as e:
        raise LoadError(f"cannot read {e.filename}: {e.strerror}.") from None
    return known


def digest(files: AdapterFiles) -> str:
    """The hash of what the files hold now. Raises `OSError`."""
    whole = hashlib.blake2b(digest_size=16)
    for path in files.paths:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "blake2b").digest())
    return whole.hexdigest()


def source(name: str, path: str, download_dir: str | None = None, may_fetch: bool = False) -> AdapterSource:
    """What the core is told of an adapter. Raises `LoadError`."""
    files = find(path, download_dir, may_fetch)
    return AdapterSource(identify(files), name, files.config, files.weights)


def read_config(path: str) -> dict[str, Any]:
    """A JSON object. Raises `LoadError`."""
    try:
        if os.path.getsize(path) > _MAX_CONFIG_BYTES:
            raise LoadError(f"{path} is too large to be an adapter's configuration.")
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise LoadError(f"cannot read {path}: {e.strerror}.") from None
    except (ValueError, RecursionError) as e:
        raise LoadError(f"{path} is no JSON: {' '.join(str(e).split())}.") from None
    if not isinstance(config, dict):
        raise LoadError(f"{path} is a JSON {type(config).__name__}, not an object.")
    return config
