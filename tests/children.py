"""A process of its own for what others have had a share in: memory above all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def in_child(function: Callable[..., T], *args: Any) -> T:
    """What a function of a module returns or raises in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
