"""Memory in large pages."""

from __future__ import annotations

import ctypes
import platform
import sys

import numpy as np
import pytest

from octavo.ops import cpu_memory
from octavo.ops.cpu_cache import allocate_kv_cache


def resident_pages(array: np.ndarray, num_bytes: int) -> int:
    """Return how many small pages of the array's first bytes have memory."""
    found = (ctypes.c_ubyte * (num_bytes // 4096))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(num_bytes), found) == 0
    return sum(entry & 1 for entry in found)


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="the system has no such call",
)
def test_the_first_page_of_a_cache_has_memory_before_the_first_request_and_keeps_what_is_in_it() -> None:
    cache = allocate_kv_cache(1024, 16, 2, 64, "bfloat16")
    cache.key[0], first = 7, cpu_memory._HUGE_PAGE_BYTES
    cpu_memory._pages.submit(lambda: None).result()  # the tasks before it have ended
    for part in cache.arrays:
        assert part.ctypes.data % first == 0 and part.nbytes >= 2 * first
        assert resident_pages(part, first) == first // 4096
    assert (cache.key[0] == 7).all()


def test_a_small_cache_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "_pages", None)
    allocate_kv_cache(4, 16, 2, 64, "bfloat16")
