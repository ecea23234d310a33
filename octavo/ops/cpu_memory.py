"""Memory for what lives as long as a model: packed matrices, caches and the buffers of programs, in large pages.

A matrix of a small model is smaller than a large page (2 MiB), so matrices share chunks. It matters: one core was
measured to read 26 GB/s from large pages and 16 from small ones, whose ends stop its prefetcher and each of which has
to be looked up, in a virtual machine twice.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops.cpu_arrays import address

_CHUNK_BYTES = 64 << 20  # of addresses; memory is taken only where something is written
_HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64  # a cache line


class _Arena:
    """Cuts chunks into pieces, one after the other. A chunk is given back when the last piece of it is gone."""

    def __init__(self) -> None:
        self._chunk: weakref.ref[NDArray[np.uint8]] | None = None
        self._used = 0

    def zeros(self, num_bytes: int) -> NDArray[np.uint8]:
        """[num_bytes] uint8 of zeros, aligned to cache lines. They cost nothing until they are written."""
        chunk = None if self._chunk is None else self._chunk()
        if chunk is None or self._used + num_bytes > chunk.nbytes:
            chunk = np.zeros(max(num_bytes + _HUGE_PAGE_BYTES, _CHUNK_BYTES), np.uint8)
            _cpu.advise_huge_pages(chunk, chunk.nbytes)
            self._chunk = weakref.ref(chunk)
            self._used = -address(chunk) % _HUGE_PAGE_BYTES
        begin = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return chunk[begin : begin + num_bytes]


zeros = _Arena().zeros


def release_pages(array: NDArray[Any]) -> None:
    """Give the memory of an array back to the system, which gives other when it is next written. Its contents are lost.
    Its address stays, so that programs which name it go on."""
    if sys.platform != "linux":
        return  # elsewhere there is no such advice that holds at once
    page = mmap.PAGESIZE
    begin = -(-address(array) // page) * page
    end = (address(array) + array.nbytes) // page * page
    if end > begin:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED))


def empty_pages(num_bytes: int) -> NDArray[np.uint8]:
    """[num_bytes] uint8, uninitialised and aligned to cache lines, which numpy's own memory is not; what fills at least
    half of a large page begins with one, and its last page is large if at least half of it is used."""
    size = (num_bytes + _HUGE_PAGE_BYTES // 2) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    alignment = _HUGE_PAGE_BYTES if size else _ALIGNMENT
    memory = np.empty(max(size, num_bytes) + alignment, np.uint8)
    begin = -address(memory) % alignment
    _cpu.advise_huge_pages(memory[begin : begin + size], size)
    return memory[begin : begin + num_bytes]
