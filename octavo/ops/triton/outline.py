"""Kernels met before they are needed: steps on arrays that have shapes but no memory, whose launches only compile.

`octavo.execution.compile_ahead` runs a model's steps like this while its weights are being loaded. A thread that is
`outlining` gets arrays on torch's device "meta" wherever the kernels' wrappers make any, and hands each launch to a
function instead of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from octavo.ops.triton import launch

Launch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # kernel, arguments, constants and options


@contextmanager
def outlining(on_launch: Launch) -> Iterator[None]:
    """In this thread, until it ends."""
    launch.outlines.on_launch = on_launch
    try:
        yield
    finally:
        launch.outlines.on_launch = None


@contextmanager
def compiling(num_threads: int) -> Iterator[None]:
    """`outlining` that compiles what is launched, side by side; all is compiled at the end. A kernel that somebody else
    launches meanwhile is waited for or, at worst, compiled twice."""
    with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool), outlining(_compile):
        yield


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    _launch(kernel, *args, grid=(1,), warmup=True, **options)


_launch: Any = JITFunction.run


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if launch.outlines.on_launch is not None:
        return launch.outlines.on_launch(self, args, kwargs)
    return _launch(self, *args, grid=grid, warmup=warmup, **kwargs)


JITFunction.run = _run
