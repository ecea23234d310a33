"""Seeds that follow from names, so that neither the order of tests nor the place in a table changes random numbers."""

from __future__ import annotations

import hashlib
import random
import sys


def seed_of(*names: str) -> int:
    """Return a number below 2^32 that depends on the names alone."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode(errors="backslashreplace")).digest()[:4], "big")


def seed_everything(*names: str) -> None:
    """Seed the random state of the process: Python's, and numpy's and torch's where they have been imported."""
    seed = seed_of(*names)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
