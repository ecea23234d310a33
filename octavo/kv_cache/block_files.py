"""A folder of cached blocks, one file a block, named by content. Servers may share it, and it outlives them.

A file's time of modification is when its block was last used, or a time in the future until which a session keeps the
block. The file with the oldest time is removed first. A session is a file too, which lists its blocks.

The files of one fingerprint are in one subfolder. The fingerprint covers everything besides the tokens that decides a
block's bits, so a file that is found has the right contents, whichever server or machine wrote it. A file appears
whole, by renaming, and ends with a checksum of its name and its contents: a torn, damaged or misplaced file is found
when it is read, and removed. Nothing here knows pools or threads; `disk_tier` and `disk_fetches` call it.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.file_lock import lock
from octavo.kv_cache.block_pool import BlockName

_FORMAT = "octavo-kv-1"
DIGEST_BYTES = 32
_PAGE = 4096  # file systems give whole pages
_SESSION = ".session"
_KEPT_SHARE = 0.5  # the share of the folder that sessions may keep
_PART = ".part"
_FRESH_NS = 10_000_000_000  # a block used within this time is not marked again: prompts of a conversation begin alike
# The folder is read again when this share of its limit has been written, as other servers write there too.
_RESCAN_SHARE = 1 / 16


_Key = tuple[str, str]  # the fingerprint and the name of a file


class _File(NamedTuple):
    size: int  # on disk
    used: int  # its time, in nanoseconds of `time.time_ns`


def check_folder(folder: str) -> Path:
    """Return the place for all files in a folder, which is made. Raises `ConfigError` if it cannot be used."""
    root = Path(folder, _FORMAT)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(probe := root / f"{secrets.token_hex(8)}{_PART}", os.O_CREAT | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError as e:
        raise _unusable(folder, e) from None
    return root


def _unusable(folder: str, error: OSError) -> ConfigError:
    return ConfigError(f"--kv-cache-disk {folder}: {error.strerror}; name a folder that this process may write.")


def notes_folder(folder: str) -> Path:
    """Return the folder for the notes that servers keep about a model's files."""
    return Path(folder, _FORMAT, "weights")


class BlockFiles:
    """The blocks of one fingerprint in a folder of bounded size. The bound covers the blocks of all fingerprints; the
    block that was used longest ago is removed first.

    Any thread may call `knows`, `has` and `read` while one calls the others.
    """

    def __init__(self, folder: str, fingerprint: bytes, limit_bytes: int) -> None:
        """Find what is in the folder. Raises `ConfigError` if it cannot be used."""
        self._root = check_folder(folder)
        self._fingerprint, self._own, self.limit_bytes = fingerprint, fingerprint.hex(), limit_bytes
        self.num_bytes = 0  # of all fingerprints, as far as known
        self.num_kept_bytes = 0  # of blocks that sessions keep
        self._files: dict[_Key, _File] = {}
        self._by_time: list[tuple[int, _Key]] = []  # heap of all files, with former times of some
        self._sessions: dict[str, int] = {}  # names of the own sessions' files, and their times
        self._kept: dict[_Key, int] = {}  # sizes of files whose time is in the future
        self._ends: list[tuple[int, _Key]] = []  # heap of the times of `_kept`
        self.num_damaged = 0  # files that were removed since `take_num_damaged`; guarded by `_lock`
        self._unscanned_bytes = 0  # written since the last scan
        self._lock = threading.Lock()  # for `_files`, sums over them and `num_damaged`
        try:
            (self._root / self._own).mkdir(exist_ok=True, mode=0o700)
            self.scan()
        except OSError as e:
            raise _unusable(folder, e) from None

    def has(self, name: BlockName) -> bool:
        """Return whether the folder has a block, even if another server has written it."""
        return self._has(block_file_name(name))

    def _has(self, file_name: str) -> bool:
        if (self._own, file_name) in self._files:
            return True
        try:
            found = os.stat(self._path_of(self._own, file_name))
        except OSError:
            return False
        self._note_file((self._own, file_name), _on_disk(found.st_size), found.st_mtime_ns)
        return True

    def knows(self, name: BlockName) -> bool:
        """Return whether the folder had a block when this process last wrote or scanned. No file is touched."""
        return (self._own, block_file_name(name)) in self._files

    def write(self, name: BlockName, contents: NDArray[np.uint8], keep_until: float = 0.0) -> bool:
        """Write a block, [num_bytes] uint8, and keep it until `time.time` is `keep_until`. Returns False if the block
        is larger than the folder's limit. Raises `OSError`, and leaves no part of the block."""
        return self._write(block_file_name(name), contents.data, keep_until)

    def _write(self, file_name: str, data: memoryview, keep_until: float) -> bool:
        size = _on_disk(len(data) + DIGEST_BYTES)
        if size > self.limit_bytes:
            return False
        if self._unscanned_bytes > _RESCAN_SHARE * self.limit_bytes:
            self.scan()
        self._make_room(size)
        key, path = (self._own, file_name), self._path_of(self._own, file_name)
        part, file = _open_part(path)
        try:
            _write_all(file, [data, memoryview(self._digest(file_name, data))])
            used = self._time_of_use(0 if key in self._kept else size, keep_until)
            if self._has(file_name):  # another server, or another session of this one, may keep it longer
                used = max(used, self._files[key].used)
            os.utime(file, ns=(used, used))
            os.rename(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        finally:
            os.close(file)
        self._note_file(key, size, used)
        self._unscanned_bytes += size
        return True

    @property
    def fingerprint_hex(self) -> str:
        return self._own

    def is_intact(self, name: BlockName, contents: memoryview, digest: memoryview) -> bool:
        """Return whether `digest` is the checksum of a block's name and contents."""
        return self._digest(block_file_name(name), contents) == digest

    def read(self, name: BlockName, into: NDArray[np.uint8]) -> bool:
        """Fill `into`, [num_bytes], with a block. Returns False if it is gone, damaged (then it is removed) or
        unreadable (then it is not known any more, and written again when it is computed)."""
        file_name, digest = block_file_name(name), bytearray(DIGEST_BYTES)
        try:
            file = os.open(self._path_of(self._own, file_name), os.O_RDONLY)
        except OSError:
            self._forget_file((self._own, file_name))
            return False
        try:
            is_whole = os.fstat(file).st_size == into.nbytes + DIGEST_BYTES
            is_whole = is_whole and _read_all(file, [into.data, memoryview(digest)])
        except OSError:
            self._forget_file((self._own, file_name))
            return False
        finally:
            os.close(file)
        if is_whole and digest == self._digest(file_name, into.data):
            return True
        self._remove((self._own, file_name), is_damaged=True)
        return False

    def touch(self, names: Iterable[BlockName]) -> None:
        """Mark the blocks of a prompt, in order, as used now. Each block gets an earlier time than the block before it,
        because it is useless without that block. Kept blocks stay as they are, and so do blocks used in the last
        seconds if their order is right."""
        now = time.time_ns()
        previous_used = now + 1
        for name in names:
            key = self._own, block_file_name(name)
            if (found := self._files.get(key)) is None or found.used > now:
                continue
            if found.used >= previous_used or found.used <= now - _FRESH_NS:
                previous_used -= 1
                self._set_time(key, found.size, previous_used)
            else:
                previous_used = found.used

    def keep(self, names: Iterable[BlockName], keep_until: float) -> None:
        """Keep blocks until `time.time` is `keep_until`. If sessions keep too much already, mark the blocks as used now
        instead."""
        for name in names:
            key = self._own, block_file_name(name)
            if (found := self._files.get(key)) is not None:
                used = self._time_of_use(0 if key in self._kept else found.size, keep_until)
                self._set_time(key, found.size, max(found.used, used))

    def _set_time(self, key: _Key, size: int, used: int) -> None:
        """Change the time of a file."""
        self._note_file(key, size, used)
        with contextlib.suppress(OSError):
            os.utime(self._path_of(*key), ns=(used, used))  # for other servers, and for the next one

    def _time_of_use(self, size: int, keep_until: float) -> int:
        """Return the time for a file of `size` bytes that is used now: `keep_until` if sessions may keep `size` bytes
        more, otherwise now."""
        now, end = time.time_ns(), int(keep_until * 1e9)  # the system's own times are some milliseconds coarse
        with self._lock:
            self._expire_kept(now)
            return end if end > now and self.num_kept_bytes + size <= _KEPT_SHARE * self.limit_bytes else now

    def _expire_kept(self, now: int) -> None:
        """With the lock held: count files as kept no more whose time has come."""
        while self._ends and self._ends[0][0] <= now:
            ended, key = heapq.heappop(self._ends)
            if key in self._kept and self._files[key].used == ended:
                self.num_kept_bytes -= self._kept.pop(key)

    def keep_session(self, session: str, names: Collection[BlockName], keep_until: float) -> None:
        """Add blocks to a session's file, for `drop_session`, and keep those that are in the folder. Blocks of the
        session that are gone are removed from its file."""
        self.keep(names, keep_until)
        lines = {line for line in self._lines(session) if self._has(line)} | {block_file_name(name) for name in names}
        self._write(session + _SESSION, memoryview("\n".join(sorted(lines)).encode()), keep_until)

    def drop_session(self, session: str, names: Iterable[BlockName] = ()) -> None:
        """Remove a session, and those of its blocks and of `names` that no other session has."""
        own = self._lines(session) | {block_file_name(name) for name in names}
        for other in self.sessions():
            if own and other != session:
                own -= self._lines(other)
        for file_name in own:
            self._remove((self._own, file_name))
        self.forget_session(session)

    def forget_session(self, session: str) -> None:
        """Remove a session, but none of its blocks."""
        self._remove((self._own, session + _SESSION))

    def sessions(self) -> dict[str, float]:
        """Return the sessions of the own fingerprint, and until when each is kept, in seconds of `time.time`: a time in
        the past if it has ended, or if there was no room to keep it."""
        return {name.removesuffix(_SESSION): used / 1e9 for name, used in self._sessions.copy().items()}

    def session_names(self, session: str) -> set[BlockName]:
        """Return the blocks of a session; an empty set if there is no such session."""
        parts = [line.partition("-") for line in self._lines(session)]
        return {(int(pool), bytes.fromhex(key)) for key, _, pool in parts}

    def _lines(self, session: str) -> set[str]:
        key = self._own, session + _SESSION
        try:
            data = Path(self._path_of(*key)).read_bytes()
        except OSError:
            return set()
        content = memoryview(data)[:-DIGEST_BYTES]
        if data[-DIGEST_BYTES:] == self._digest(key[1], content):
            return set(bytes(content).decode().split())
        self._remove(key, is_damaged=True)
        return set()

    def remove(self, names: Iterable[BlockName]) -> None:
        for name in names:
            self._remove((self._own, block_file_name(name)))

    def remove_all(self) -> None:
        """Remove all blocks of the own fingerprint."""
        self.scan()
        for key in [key for key in list(self._files) if key[0] == self._own]:
            self._remove(key)

    def scan(self) -> None:
        """Read the folder again, to find the files of other servers too. Removes parts that killed processes have left,
        and the blocks used longest ago if there are too many."""
        found: list[tuple[_Key, int, int]] = []
        for fingerprint, entry in self._entries():
            try:
                if entry.name.endswith(_PART):
                    _remove_if_left(entry.path)
                    continue
                stat = entry.stat()
            except OSError:  # gone since
                continue
            found.append(((fingerprint, entry.name), _on_disk(stat.st_size), stat.st_mtime_ns))
        now = time.time_ns()
        files = {key: _File(size, used) for key, size, used in found}
        kept = {key: file.size for key, file in files.items() if file.used > now}
        by_time = [(file.used, key) for key, file in files.items()]
        ends = [(files[key].used, key) for key in kept]
        heapq.heapify(by_time)
        heapq.heapify(ends)
        with self._lock:  # `knows` takes no lock: it sees the former files or the new ones
            self._files, self._by_time, self._kept, self._ends = files, by_time, kept, ends
            self._sessions = {key[1]: file.used for key, file in files.items() if self._is_session(key)}
            self.num_bytes, self.num_kept_bytes = sum(file.size for file in files.values()), sum(kept.values())
        self._unscanned_bytes = 0
        self._make_room(0)

    def _entries(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield (fingerprint, entry) for every file."""
        for fingerprint in _folders(str(self._root)):
            for folder in _folders(fingerprint.path):
                with contextlib.suppress(OSError), os.scandir(folder.path) as entries:
                    yield from ((fingerprint.name, entry) for entry in entries if entry.is_file(follow_symlinks=False))

    def _make_room(self, num_bytes: int) -> None:
        while self._files and self.num_bytes + num_bytes > self.limit_bytes:
            with self._lock:
                used, key = heapq.heappop(self._by_time)
                is_oldest = key in self._files and self._files[key].used == used
            if is_oldest:
                self._remove(key)

    def _remove(self, key: _Key, is_damaged: bool = False) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path_of(*key))
        self._forget_file(key, is_damaged)

    def take_num_damaged(self) -> int:
        """Return the number of damaged files that were found since the last call."""
        with self._lock:
            count, self.num_damaged = self.num_damaged, 0
        return count

    def _note_file(self, key: _Key, size: int, used: int) -> None:
        """Note that a file is there, and its time."""
        with self._lock:
            self._subtract(key)
            self._add(key, size, used)
            if len(self._by_time) > 2 * len(self._files) + 1000:  # most entries are former times
                self._by_time = [(file.used, key) for key, file in self._files.items()]
                heapq.heapify(self._by_time)

    def _forget_file(self, key: _Key, is_damaged: bool = False) -> None:
        with self._lock:
            self._subtract(key)
            self.num_damaged += is_damaged

    def _add(self, key: _Key, size: int, used: int) -> None:
        self._files[key] = _File(size, used)
        if self._is_session(key):
            self._sessions[key[1]] = used
        self.num_bytes += size
        heapq.heappush(self._by_time, (used, key))
        if used > time.time_ns():
            self._kept[key] = size
            self.num_kept_bytes += size
            heapq.heappush(self._ends, (used, key))

    def _subtract(self, key: _Key) -> None:
        if (file := self._files.pop(key, None)) is not None:
            self.num_bytes -= file.size
            self.num_kept_bytes -= self._kept.pop(key, 0)
            if self._is_session(key):
                self._sessions.pop(key[1], None)

    def _is_session(self, key: _Key) -> bool:
        return key[0] == self._own and key[1].endswith(_SESSION)

    def _path_of(self, fingerprint: str, file_name: str) -> str:
        return _path(self._root, fingerprint, file_name)

    def _digest(self, file_name: str, contents: memoryview) -> bytes:
        digest = hashlib.sha256(self._fingerprint + file_name.encode())
        digest.update(contents)  # at 1.6 GB/s with the processor's instructions; CRC-32 is no faster
        return digest.digest()


def block_file_name(name: BlockName) -> str:
    pool, key = name
    return f"{key.hex()}-{pool}"


def block_paths(folder: str, fingerprint: str, file_names: Sequence[str]) -> list[str] | None:
    """Return the paths of blocks' files; None if these are not the names of a fingerprint and of blocks."""
    root, is_block = str(Path(folder, _FORMAT)), re.compile("[0-9a-f]{1,128}-[0-9]{1,4}").fullmatch
    if not re.fullmatch("[0-9a-f]{1,128}", fingerprint) or not all(map(is_block, file_names)):
        return None
    return [_path(root, fingerprint, file_name) for file_name in file_names]


def _path(root: str | Path, fingerprint: str, file_name: str) -> str:
    return f"{root}/{fingerprint}/{file_name[:2]}/{file_name}"


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _folders(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _remove_if_left(path: str) -> None:
    """Remove an unfinished file if the process that wrote it has ended."""
    file = os.open(path, os.O_WRONLY)
    try:
        lock(file)
        os.unlink(path)
    except BlockingIOError:
        pass  # its writer lives
    finally:
        os.close(file)


def _open_part(path: str) -> tuple[str, int]:
    """Make a file beside `path` and lock it: an unlocked part was left by a killed process. Returns its path and
    descriptor."""
    while True:
        part, flags = f"{path}-{secrets.token_hex(8)}{_PART}", os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            file = os.open(part, flags, 0o600)
        except FileNotFoundError:
            Path(part).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(part, flags, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                lock(file)
                if os.fstat(file).st_nlink:
                    return part, file
        except OSError:  # this file system has no locks
            os.close(file)
            os.unlink(part)
            raise
        os.close(file)  # another server's scan came before the lock, and has removed the part


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(file, parts))


def _read_all(file: int, parts: list[memoryview]) -> bool:
    """Fill `parts` from a file. Returns False if the file is too short."""
    while parts:
        num_bytes = os.readv(file, parts)
        if num_bytes == 0:
            return False
        parts = _after(parts, num_bytes)
    return True


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return `parts` without their first `num_bytes`."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts[0])
        parts = parts[1:]
    return [parts[0][num_bytes:], *parts[1:]] if parts else []
