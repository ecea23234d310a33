"""Compilation of kernels before they are needed: steps run on arrays that have shapes but no memory ("outlines"), and
launches only compile.

`octavo.execution.compile_ahead` runs a model's steps in this way while its weights are loaded. In a thread that is
`outlining`, arrays that the kernels' wrappers make are on torch's device "meta", and each launch goes to a function
instead of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo.ops.triton import launch

Launch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # kernel, arguments, constants and options


@contextmanager
def outlining(on_launch: Launch) -> Iterator[None]:
    """Inside this context, hand this thread's launches to `on_launch`."""
    launch.outlines.on_launch = on_launch
    try:
        yield
    finally:
        launch.outlines.on_launch = None


@contextmanager
def compiling(num_threads: int) -> Iterator[None]:
    """Inside this context, compile this thread's launches on `num_threads` threads; at its end all are compiled, and
    their launchers too. If another thread launches a kernel meanwhile, it waits for the compilation or, at worst,
    compiles it again."""
    with _Compilers(num_threads) as pool, AsyncCompileMode(pool), outlining(_compile):
        yield


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and build their launchers.

    Up to Triton 3.6 a C compiler builds a launcher for each signature of a kernel. Triton does this when the kernel is
    launched first, one kernel after the other, in 0.3 to 0.5 s each, and keeps the result beside compiled kernels."""

    def submit(self, compile_kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_with_launcher() -> Any:
            kernel = compile_kernel(*args, **kwargs)
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(compile_with_launcher)


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    _launch(kernel, *args, grid=(1,), warmup=True, **options)


_launch: Any = JITFunction.run


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if launch.outlines.on_launch is not None:
        return launch.outlines.on_launch(self, args, kwargs)
    return _launch(self, *args, grid=grid, warmup=warmup, **kwargs)


JITFunction.run = _run
