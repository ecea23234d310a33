"""The files and sockets of this process, for tests that say that nothing was left open."""

from __future__ import annotations

import gc
import os
from pathlib import Path

FOLDER = "/proc/self/fd"


def open_files() -> set[tuple[str, str]]:
    """(number, what it leads to) of each.

    Only those that are there after and were not before are the test's. Their count says nothing: what earlier tests
    left to the garbage collector may close in between.
    """
    gc.collect()
    found = set()
    for number in os.listdir(FOLDER):
        try:
            found.add((number, str(Path(FOLDER, number).readlink())))
        except FileNotFoundError:  # the listing's own
            continue
    return found
