"""Locks files against other processes."""

import contextlib
from typing import Any


def lock(file: Any) -> None:
    """Lock an open file until it is closed. Raises `OSError` if another process has locked it. Without `fcntl`
    (Windows) nothing is locked."""
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
