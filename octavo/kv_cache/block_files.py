"""A folder of cached blocks, one file a block, named by content. Servers may share it, and it outlives them.

The files of one fingerprint are in one subfolder. The fingerprint covers everything beside the tokens that decides a
block's bits, so a file from another server, machine or year is right or not found. A file appears whole, by renaming,
and ends with a checksum of its name and its contents: a torn, damaged or misplaced file is found when it is read, and
removed. Nothing here knows pools or threads; `octavo.kv_cache.disk_tier` calls it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError

Name = tuple[int, bytes]  # the pool of a block, and its key in the pool's index

_FORMAT = "octavo-kv-1"
_DIGEST_BYTES = 32
_PAGE = 4096  # file systems give whole pages
_PART = ".part"
# The folder is read again when this share of its limit has been written, as other servers write there too.
_RESCAN_SHARE = 16


def notes_folder(folder: str) -> Path:
    """Return the place for what servers note of a model's files."""
    return Path(folder, _FORMAT, "weights")


class BlockFiles:
    """The blocks of one fingerprint in a folder of bounded size. The bound covers the blocks of all fingerprints; the
    block that was used longest ago is removed first.

    Any thread may call `knows`, `has` and `read` while one calls the others.
    """

    def __init__(self, folder: str, fingerprint: bytes, limit_bytes: int) -> None:
        """Find what is in the folder. Raises `ConfigError` if it cannot be used."""
        self._root = Path(folder, _FORMAT)
        self._fingerprint, self._own, self.limit_bytes = fingerprint, fingerprint.hex(), limit_bytes
        self.num_bytes = 0  # of all fingerprints, as far as known
        self._sizes: dict[tuple[str, str], int] = {}  # by fingerprint and file name, the least recently used first
        self.num_damaged = 0  # blocks that `read` has removed
        self._unscanned_bytes = 0  # written since the last scan
        self._lock = threading.Lock()  # for `num_bytes` and `_sizes`
        try:
            (self._root / self._own).mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(probe := self._root / f"{secrets.token_hex(8)}{_PART}", os.O_CREAT | os.O_WRONLY, 0o600))
            probe.unlink()
            self.scan()
        except OSError as e:
            raise ConfigError(
                f"--kv-cache-disk {folder}: {e.strerror}; name a folder that this process may write."
            ) from None

    def has(self, name: Name) -> bool:
        """Return whether a block is there, also if another server has written it."""
        if self.knows(name):
            return True
        path = self._path(name)
        try:
            size = path.stat().st_size
        except OSError:
            return False
        self._count((self._own, path.name), _on_disk(size))
        return True

    def knows(self, name: Name) -> bool:
        """Return whether a block was there when this process last wrote or looked. No file is touched."""
        return (self._own, _file_name(name)) in self._sizes

    def write(self, name: Name, contents: NDArray[np.uint8]) -> bool:
        """Write a block, [num_bytes] uint8. Returns False if it is larger than the folder may be. Raises `OSError`;
        then nothing is left of it."""
        size = _on_disk(contents.nbytes + _DIGEST_BYTES)
        if size > self.limit_bytes:
            return False
        if self._unscanned_bytes * _RESCAN_SHARE > self.limit_bytes:
            self.scan()
        self._make_room(size)
        path, data = self._path(name), contents.data
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f"{path.name}-{secrets.token_hex(8)}{_PART}")
        file = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a part without a lock is what a killed process left
            _write_all(file, [data, memoryview(self._digest(name, data))])
            _mark_used(file)
            os.rename(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        finally:
            os.close(file)
        self._count((self._own, path.name), size)
        self._unscanned_bytes += size
        return True

    def read(self, name: Name, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return a block, [num_bytes] uint8, or None if it is gone, damaged (then it is removed) or unreadable."""
        path, found = self._path(name), np.empty(num_bytes, np.uint8)
        digest = bytearray(_DIGEST_BYTES)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            self._discount((self._own, path.name))
            return None
        try:
            is_whole = os.fstat(file).st_size == num_bytes + _DIGEST_BYTES
            is_whole = is_whole and _read_all(file, [found.data, memoryview(digest)])
        except OSError:
            return None
        finally:
            os.close(file)
        if is_whole and digest == self._digest(name, found.data):
            return found
        self._remove((self._own, path.name))
        self.num_damaged += 1
        return None

    def touch(self, names: Iterable[Name]) -> None:
        """Mark blocks as used now, in order: the last ones go last."""
        for name in names:
            key = self._own, _file_name(name)
            if (size := self._sizes.get(key)) is not None:
                self._count(key, size)
                with contextlib.suppress(OSError):
                    _mark_used(self._path(name))

    def remove(self, names: Iterable[Name]) -> None:
        for name in names:
            self._remove((self._own, _file_name(name)))

    def remove_all(self) -> None:
        """Remove all blocks of the own fingerprint."""
        self.scan()
        for key in [key for key in self._sizes if key[0] == self._own]:
            self._remove(key)

    def scan(self) -> None:
        """Find the files again: those of other servers too. Parts that killed processes have left are removed, and the
        blocks that were used longest ago if there are too many."""
        found: list[tuple[int, tuple[str, str], int]] = []
        for fingerprint, entry in self._entries():
            try:
                if entry.name.endswith(_PART):
                    _remove_if_left(entry.path)
                    continue
                stat = entry.stat()
            except OSError:  # gone since
                continue
            found.append((stat.st_mtime_ns, (fingerprint, entry.name), _on_disk(stat.st_size)))
        found.sort()
        with self._lock:
            self._sizes = {key: size for _, key, size in found}
            self.num_bytes = sum(self._sizes.values())
        self._unscanned_bytes = 0
        self._make_room(0)

    def _entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield every file with the fingerprint that it is of."""
        for fingerprint in _folders(str(self._root)):
            for folder in _folders(fingerprint.path):
                with contextlib.suppress(OSError), os.scandir(folder.path) as entries:
                    yield from ((fingerprint.name, entry) for entry in entries if entry.is_file(follow_symlinks=False))

    def _make_room(self, num_bytes: int) -> None:
        while self._sizes and self.num_bytes + num_bytes > self.limit_bytes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, key: tuple[str, str]) -> None:
        with contextlib.suppress(OSError):
            self._path_of(*key).unlink()
        self._discount(key)

    def _count(self, key: tuple[str, str], size: int) -> None:
        """Note that a file is there, as the one that was used last."""
        with self._lock:
            self.num_bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size

    def _discount(self, key: tuple[str, str]) -> None:
        with self._lock:
            self.num_bytes -= self._sizes.pop(key, 0)

    def _path(self, name: Name) -> Path:
        return self._path_of(self._own, _file_name(name))

    def _path_of(self, fingerprint: str, file_name: str) -> Path:
        return self._root / fingerprint / file_name[:2] / file_name

    def _digest(self, name: Name, contents: memoryview) -> bytes:
        digest = hashlib.sha256(self._fingerprint + _file_name(name).encode())
        digest.update(contents)  # at 1.6 GB/s with the processor's instructions; CRC-32 is no faster
        return digest.digest()


def _file_name(name: Name) -> str:
    pool, key = name
    return f"{key.hex()}-{pool}"


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _mark_used(file: int | Path) -> None:
    """Set a file's time, for other servers and for the next one. The system's own is some milliseconds coarse."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _folders(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _remove_if_left(path: str) -> None:
    """Remove a part that nobody writes any more."""
    file = os.open(path, os.O_WRONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        pass  # its writer lives
    finally:
        os.close(file)


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(file, parts))


def _read_all(file: int, parts: list[memoryview]) -> bool:
    """Fill `parts`. Returns False if the file ends before."""
    while parts:
        num_bytes = os.readv(file, parts)
        if num_bytes == 0:
            return False
        parts = _after(parts, num_bytes)
    return True


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of `parts` after their first `num_bytes`."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts[0])
        parts = parts[1:]
    return [parts[0][num_bytes:], *parts[1:]] if parts else []
