"""Command lines of child processes, listening sockets, and a process's settings in the operating system.

A child imports from the same path as its parent, not from the working directory, which `python -m` would search
first."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    import socket

ACCEPTS_PER_TURN = 8  # connections; each takes some 0.1 ms


def python_command(module: str, *args: str) -> list[str]:
    """Return the command that runs a module like `python -m module args`, with `import_path` as its `sys.path`."""
    return _command("", module, args)


def child_command(module: str, *args: str) -> list[str]:
    """Return the command of a child that ends with its parent (`follow_parent`) and ignores SIGINT and SIGTERM. Ctrl-C
    reaches the whole process group, systemd's SIGTERM every process of the unit, but the parent decides how long
    requests go on. The child ignores both before its imports, which take long enough for a user to press Ctrl-C. When
    the parent ends, a stopped child is continued, so that it notices."""
    first = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; "
    if sys.platform == "linux":  # Linux sends SIGCONT when the parent's thread ends, which does no harm
        first += f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGCONT); "
    return _command(first, module, args)


def server_command(module: str, *args: str) -> list[str]:
    """Return the command of a program that stops on SIGTERM. On Linux it gets SIGTERM also when its parent ends."""
    first = "import signal; "
    if sys.platform == "linux":
        first += f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM); "
    return _command(first, module, args)


def _command(first: str, module: str, args: Sequence[str]) -> list[str]:
    flags = [flag for name, flag in _FLAGS.items() if getattr(sys.flags, name)]
    # Until its path is replaced, the child has its default path without the working directory (-P). `site` has run by
    # then, so that hooks of .pth files, such as the finder of an editable installation, work too.
    code = (
        f"{first}import sys; sys.path[:] = {import_path()!a}; del sys.argv[0]; import runpy; "
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", *flags, "-c", code, module, *args]


_PR_SET_PDEATHSIG = 1
_FLAGS = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}


def import_path() -> list[str]:
    """Return this process's `sys.path` without the working directory, unless Octavo was imported from there or
    PYTHONPATH contains it as an absolute path."""
    kept = {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    if not sys.flags.ignore_environment:
        kept |= {entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)}
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # the working directory has been deleted
        return [entry for entry in sys.path if os.path.isabs(entry)]
    is_kept = here in map(os.path.realpath, kept)
    entries = [os.path.abspath(entry) for entry in sys.path]
    return [entry for entry in entries if is_kept or os.path.realpath(entry) != here]


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's factory if it is installed (not on Windows), otherwise the selector loop, which ZeroMQ's sockets
    need."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.SelectorEventLoop
    return uvloop.new_event_loop


def bind(host: str, port: int, flags: str = "--port or --host", *, listens: bool = True) -> socket.socket:
    """Return a socket that is bound to an address, and listens. Raises `ConfigError`, which names the `flags` of the
    address."""
    import socket

    # asyncio turns Nagle's algorithm off only for sockets that name their protocol.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        if listens:
            sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror or error}. Choose another {flags}."
        ) from None
    return sock


def accepting_several(listeners: Sequence[socket.socket] | None) -> list[socket.socket] | None:
    """Return `listeners` with `ACCEPTS_PER_TURN - 1` copies of each. libuv accepts one connection from a socket in a
    turn of the loop: while turns take milliseconds, a burst of clients would fill the queue, and others would wait for
    seconds. A copy is closed by the server that listens on it."""
    if listeners is None:
        return None
    return [*listeners, *(each.dup() for each in listeners for _ in range(ACCEPTS_PER_TURN - 1))]


def collect_rarely(*, has_middlewares: bool = False) -> None:
    """Let the collector pass over all objects that are there, and look at a newer object once at most: only 1,200 chats
    at once make enough objects for a collection, which stops streams for some 70 ms. Requests leave no cycles, refused
    ones neither. A collection of all objects of a thousand streams would stop them all, and each object that lives
    through one costs as much as to make it. Middlewares of users may leave cycles, as Starlette's `BaseHTTPMiddleware`
    does: with them, objects are looked at twice."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*((20_000, 1, 1_000) if has_middlewares else (200_000, 1_000, 1_000)))
    gc.enable()


def follow_parent(lines: queue.SimpleQueue[bytes], at_end: Callable[[], None] = lambda: None) -> None:
    """Run in a thread of a child: pass on the lines that the parent writes to standard input. When standard input
    closes, the parent has ended: call `at_end` and end this process."""
    rest = b""
    while data := os.read(0, 1 << 16):  # sys.stdin has a lock, for which the interpreter's shutdown would not wait
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(line)
    at_end()
    os._exit(0)


def allow_files(wanted: int | None = None) -> None:
    """Raise the limit of open files, which is often 1024, to at least `wanted`; by default to the maximum."""
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
