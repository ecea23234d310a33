"""Files of tensors in memory: mapped files, whose pages are read on access and released again, and files read whole.

The server process maps GGUF files only for their headers, so numpy is imported with the first array.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from octavo.errors import LoadError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Pages of a mapped file count as the process's memory: they are released after this many bytes.
_MAPPED_BYTES = 32 << 20
# Bytes to request beyond the end of each array. Pages that were not requested are read on access: 0.6 GB/s from a disk
# that reads 2 GB/s. Each request has `_REQUEST_BYTES`, because the system cuts longer requests short.
_AHEAD_BYTES = 64 << 20
_REQUEST_BYTES = 1 << 20
_HUGE_PAGE_BYTES = 2 << 20


class MappedFile:
    """A private mapping of a whole file: writable, as torch wants its buffers, but writes never reach the disk.

    It lasts as long as the last array over it. Raises `LoadError` if the file cannot be opened or is empty.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            if stat.S_ISFIFO(os.stat(path).st_mode):  # opening it would wait for somebody who writes
                raise LoadError(f"{path} is not a file.")
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise LoadError(f"{path} is damaged: it has 0 bytes; fetch it again.")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as e:
            raise LoadError(f"cannot read {path}: {e.strerror or e}.") from None
        self._num_mapped_bytes = 0
        self._requested = range(0)  # bytes

    def array(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return `num_bytes` bytes of the file from `offset`, aliasing the mapping. Pages that were read for earlier
        arrays may be released."""
        import numpy as np

        if self._num_mapped_bytes > _MAPPED_BYTES:
            self.forget_pages()
        self._num_mapped_bytes += num_bytes
        self._read_ahead(offset, offset + num_bytes + _AHEAD_BYTES)
        return np.frombuffer(self.data, np.uint8, num_bytes, offset) if num_bytes else np.empty(0, np.uint8)

    def stream(self) -> BinaryIO:
        """Return a stream over the file's bytes."""
        return open(self.path, "rb")

    def forget_pages(self) -> None:
        """Release the pages that were read. Arrays over the file stay valid; the system reads their pages again when
        they are used."""
        self._num_mapped_bytes = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)

    def _read_ahead(self, begin: int, end: int) -> None:
        """Ask the system to read the bytes from `begin` to `end` in the background."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        known = self._requested
        follows = begin in known
        begin = known.stop if follows else begin // _REQUEST_BYTES * _REQUEST_BYTES
        requests = range(begin, min(end, len(self.data)), _REQUEST_BYTES)
        for at in requests:
            self.data.madvise(mmap.MADV_WILLNEED, at, min(_REQUEST_BYTES, len(self.data) - at))
        if requests:
            self._requested = range(known.start if follows else begin, requests[-1] + _REQUEST_BYTES)


class MemoryFile(MappedFile):
    """A file whose bytes are in memory and do not change."""

    def __init__(self, data: bytes) -> None:
        self.path, self._num_mapped_bytes = "the file", 0
        self.data = mmap.mmap(-1, max(len(data), 1))
        self.data.write(data)

    def stream(self) -> BinaryIO:
        return io.BytesIO(self.data)

    def forget_pages(self) -> None:
        """Do nothing: the bytes could not be read again."""

    def _read_ahead(self, begin: int, end: int) -> None:
        """Do nothing: all bytes are in memory."""


class ReadFile(MemoryFile):
    """A copy of a file in memory, which later changes of the file do not reach. Raises `LoadError` if the file cannot
    be read, is empty, or has more than `max_bytes`."""

    def __init__(self, path: str, max_bytes: int | None = None) -> None:
        self.path, self._num_mapped_bytes = path, 0
        try:
            with open(path, "rb", buffering=0) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes == 0:
                    raise LoadError(f"{path} is damaged: it has 0 bytes; fetch it again.")
                if max_bytes is not None and num_bytes > max_bytes:
                    raise LoadError(f"{path} is too large: it has {num_bytes} bytes, and {max_bytes} are read at most.")
                self.data = _memory(num_bytes)
                view, begin = memoryview(self.data), 0
                while begin < num_bytes:
                    found = file.readinto(view[begin:])
                    if not found:
                        raise LoadError(f"{path} became shorter while it was read; ask again.")
                    begin += found
        except OSError as e:
            raise LoadError(f"cannot read {path}: {e.strerror or e}.") from None


def _memory(num_bytes: int) -> mmap.mmap:
    """Return `num_bytes` zeros, in huge pages if the system has them: allocating small pages takes longer than reading
    the file."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
