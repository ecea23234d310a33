"""Finds what only a full collection would free."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def counted_garbage(*modules: str) -> Iterator[Counter[str]]:
    """Collect nothing in the block. Then the counter has the classes of these modules whose objects were in cycles."""
    found = Counter[str]()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(one) for one in gc.garbage]
        found.update(kind.__qualname__ for kind in kinds if kind.__module__.startswith(modules))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
