"""Command lines of child processes, and what a process asks of its system.

A child imports exactly what its parent imports, and nothing from the working directory, which `python -m` would search
first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
from collections.abc import Callable, Sequence


def python_command(module: str, *args: str) -> list[str]:
    """The command that runs a module as `python -m module args` would, with `import_path` as its `sys.path`."""
    return _command("", module, args)


def child_command(module: str, *args: str) -> list[str]:
    """The same for a child that ends with its parent (`follow_parent`) and not by a signal: Ctrl-C reaches the whole
    process group, systemd's SIGTERM every process of the unit, and the parent decides how long requests go on. It
    ignores both before it imports anything, which takes long enough for a user to have second thoughts. One that was
    stopped goes on when its parent ends, as it would not see that otherwise."""
    first = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; "
    if sys.platform == "linux":  # which sends the signal when the thread of the parent ends: no harm is done
        first += f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGCONT); "
    return _command(first, module, args)


def server_command(module: str, *args: str) -> list[str]:
    """The same for a program that is told to stop by SIGTERM: on Linux it gets that when its parent ends, too."""
    first = "import signal; "
    if sys.platform == "linux":
        first += f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM); "
    return _command(first, module, args)


def _command(first: str, module: str, args: Sequence[str]) -> list[str]:
    flags = [flag for name, flag in _FLAGS.items() if getattr(sys.flags, name)]
    # Until the path is replaced the child has that of its own start, without its working directory (-P). `site` has run
    # by then, so that what .pth files hook in, such as the finder of an editable installation, is there too.
    code = (
        f"{first}import sys; sys.path[:] = {import_path()!a}; del sys.argv[0]; import runpy; "
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", *flags, "-c", code, module, *args]


_PR_SET_PDEATHSIG = 1
_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}


def import_path() -> list[str]:
    """This process's `sys.path` without the working directory, unless Octavo itself was imported from there or
    PYTHONPATH names it in full."""
    kept = {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    if not sys.flags.ignore_environment:
        kept |= {entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)}
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it has been deleted, and nothing can be imported from it
        return [entry for entry in sys.path if os.path.isabs(entry)]
    is_kept = here in map(os.path.realpath, kept)
    entries = [os.path.abspath(entry) for entry in sys.path]
    return [entry for entry in entries if is_kept or os.path.realpath(entry) != here]


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where there is one (it knows no Windows), else the loop of selectors, which sockets of ZeroMQ need."""
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.new_event_loop


def follow_parent(lines: queue.SimpleQueue[bytes], at_end: Callable[[], None] = lambda: None) -> None:
    """For a thread of a child: pass on the lines that the parent writes to its standard input, and end this process,
    after `at_end`, when that closes, as the parent has ended."""
    rest = b""
    while data := os.read(0, 1 << 16):  # sys.stdin has a lock, for which the interpreter's end would not wait
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(line)
    at_end()
    os._exit(0)


def allow_files(wanted: int | None = None) -> None:
    """Raise the limit of open files, which is often 1024, to `wanted` if it is less; to the most by default."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted is None:
        wanted = hard
    elif hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and (soft < wanted or wanted == resource.RLIM_INFINITY):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
