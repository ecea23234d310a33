"""Memory in large pages for arrays that live as long as a model: packed matrices, caches, buffers of programs.

A matrix of a small model is smaller than a large page (2 MiB), so matrices share chunks. Measured: one core reads
26 GB/s from large pages and 16 GB/s from small pages. The end of a small page stops the prefetcher, and the address of
each small page must be looked up (twice in a virtual machine).

Where threads run on several NUMA nodes, a node gets the part of a large matrix that its threads multiply. The pages of
caches and small matrices, experts among them, take turns. Containers that forbid the system call (mbind) leave pages
where they are first written.
"""

import ctypes
import itertools
import mmap
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops.cpu_arrays import address

_CHUNK_BYTES = 64 << 20  # reserved addresses; the system provides memory only for pages that are written
_HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64  # a cache line
# Least bytes of a matrix in shares. Each share is an entry in the system's table of the process's memory, which takes
# 65,530 of them.
_LEAST_SHARED_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23  # Linux's; Python has no name for it


class _Arena:
    """Cuts chunks into pieces, one after the other. A chunk is freed when its last piece is gone."""

    def __init__(self) -> None:
        self._chunk: weakref.ref[NDArray[np.uint8]] | None = None
        self._used = 0

    def zeros(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return [num_bytes] uint8 of zeros, aligned to cache lines. They take no memory until they are written."""
        chunk = None if self._chunk is None else self._chunk()
        if chunk is None or self._used + num_bytes > chunk.nbytes:
            chunk = np.zeros(max(num_bytes + _HUGE_PAGE_BYTES, _CHUNK_BYTES), np.uint8)
            _cpu.advise_huge_pages(chunk, chunk.nbytes)
            _place(chunk, in_shares=False)
            self._chunk = weakref.ref(chunk)
            self._used = -address(chunk) % _HUGE_PAGE_BYTES
        begin = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        piece = chunk[begin : begin + num_bytes]
        if num_bytes >= _LEAST_SHARED_BYTES:
            _place(piece, in_shares=True)
        return piece


def _place(memory: NDArray[np.uint8], in_shares: bool) -> None:
    """Place memory whose pages are still to be written on the NUMA nodes of the threads."""
    nodes: list[int] = _cpu.nodes_of_threads()
    if in_shares and len([*itertools.groupby(nodes)]) > len({*nodes}):
        return  # neighbouring threads run on different nodes (--cpu-threads-bind)
    if nodes:
        _cpu.place_pages(
            memory=memory, bytes=memory.nbytes, page_bytes=_HUGE_PAGE_BYTES, nodes=nodes, in_shares=in_shares
        )


zeros = _Arena().zeros
_pages = ThreadPoolExecutor(1, "octavo-pages")  # its thread starts with the first task


def _advise(array: NDArray[Any], advice: int) -> None:
    """Tell the system `advice` about the small pages that lie in the array as a whole. Errors are ignored."""
    page = mmap.PAGESIZE
    begin = -(-address(array) // page) * page
    end = (address(array) + array.nbytes) // page * page
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(advice))


def release_pages(array: NDArray[Any]) -> None:
    """Give the memory of an array back to the system; its contents are lost. The next write gets new memory at the same
    address, so programs that hold the address stay valid."""
    if sys.platform == "linux":  # other systems have no such call that takes effect at once
        _advise(array, mmap.MADV_DONTNEED)


def get_first_page(array: NDArray[np.uint8]) -> None:
    """Get the memory of an array's first large page in the background. Its contents stay as they are.

    The first request writes into the first page of each layer's keys and values. The system clears each page before,
    which took 45 to 130 ms for a model of 30 layers. Linux before 5.14 has no such call, and refuses it."""
    if sys.platform == "linux" and array.nbytes >= _HUGE_PAGE_BYTES:
        _pages.submit(_advise, array[:_HUGE_PAGE_BYTES], _MADV_POPULATE_WRITE)


def empty_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return [num_bytes] uint8, uninitialised and aligned to cache lines (numpy's own memory is not).

    An array of at least half a large page begins at a large page; its last page is large if at least half is used."""
    size = (num_bytes + _HUGE_PAGE_BYTES // 2) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    alignment = _HUGE_PAGE_BYTES if size else _ALIGNMENT
    memory = np.empty(max(size, num_bytes) + alignment, np.uint8)
    begin = -address(memory) % alignment
    _cpu.advise_huge_pages(memory[begin : begin + size], size)
    found = memory[begin : begin + num_bytes]
    _place(found, in_shares=False)
    return found
