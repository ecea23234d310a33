"""Finds out whether a grammar can be followed, in processes of their own that are ended when they take too long, and
may crash without harm. llguidance bounds most of its work on a grammar (`limits`), but not all: intersected regular
expressions may keep it busy for ever, and hundreds of chained references overflow its stack, which ends the process.
`octavo.structured_output.grammar_check` calls this; a grammar that passes is compiled once more where the model runs.
One process starts with the first grammar, loads llguidance and forks for each trial. So trials run concurrently, and
slow ones have a lower priority (`nice`), so that they delay nobody.
"""

import contextlib
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from octavo.processes import child_command

# Processor time, so that the limit is the same on a busy machine. The largest useful grammars take 3 s; a grammar that
# takes this long would take for ever.
TIME_LIMIT_S = 10
_PATIENCE = 6  # the limit by the clock is this multiple, for busy machines
_SLOW_S = 0.1  # of processor time, after which a trial gets a lower priority
_MAX_SLOW = 4  # slow trials at once; a further one is ended
# `grammar_matching` needs more stack than this, so that grammars that pass never overflow it.
STACK_BYTES = 4 << 20
_MEMORY_BYTES = 4 << 30  # limit of address space; the largest of our tests takes 0.3 GB
# Pieces of Lark: strings and regular expressions, which are kept, and special tokens.
_PIECES = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|<[^<>\s]+>')
_HEAD = struct.Struct("<I")


class TrialFailed(Exception):
    """The grammar took too much time or memory, or crashed llguidance."""


class TrialsBusy(TrialFailed):
    """Too many slow grammars were being tried. A later trial of the same grammar may succeed."""


def limits() -> Any:
    """Return the limits of one grammar. The number of lexer states differs from llguidance's default; a state takes
    about 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class GrammarTrial:
    """Tries grammars out. Calls may come from any thread, and do not wait for each other."""

    def __init__(self, time_limit_s: int = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._num_slow = 0
        self._running: set[socket.socket] = set()

    def problem(self, grammar: str) -> str:
        """Return why a grammar cannot be followed, in llguidance's words, or "". Raises `TrialFailed`."""
        if not hasattr(os, "fork"):
            return self._tried_alone(grammar)
        with self._started(grammar) as connection:
            is_slow, deadline = False, time.monotonic() + self._time_limit_s * _PATIENCE
            with self._lock:
                self._running.add(connection)
            try:
                while True:
                    message = _receive(connection, deadline)
                    if message is None and connection not in self._running:
                        raise TrialsBusy("the server ends.")
                    if message is None:
                        raise TrialFailed("it is nested too deep, or takes too much memory.")
                    if message == b"slow":
                        with self._lock:
                            if self._num_slow >= _MAX_SLOW:
                                raise TrialsBusy(
                                    f"{_MAX_SLOW} grammars that take long are being tried: send it again later."
                                )
                            self._num_slow += 1
                        is_slow = True
                    elif message == b"late":
                        raise TrialFailed(f"to compile it takes more than {self._time_limit_s} s.")
                    else:
                        problem: str = json.loads(message)
                        return problem
            except TimeoutError:
                raise TrialFailed(f"to compile it takes more than {self._time_limit_s} s.") from None
            finally:
                with self._lock:
                    self._num_slow -= is_slow
                    self._running.discard(connection)

    def _tried_alone(self, grammar: str) -> str:
        """Try a grammar on Windows: each trial starts a process, which takes a fifth of a second."""
        command = child_command("octavo.structured_output.trial", "alone")
        try:
            done = subprocess.run(command, input=grammar.encode(), stdout=subprocess.PIPE, timeout=self._time_limit_s)
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"to compile it takes more than {self._time_limit_s} s.") from None
        if done.returncode:
            raise TrialFailed("it is nested too deep, or takes too much memory.")
        problem: str = json.loads(done.stdout)
        return problem

    def _started(self, grammar: str) -> socket.socket:
        """Return a connection to a process that tries `grammar`; the process ends with the connection."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):
                control = self._control()
                try:
                    socket.send_fds(control, [_HEAD.pack(self._time_limit_s)], [theirs.fileno()])
                    break
                except OSError:  # the process has gone
                    self._end()
        data = grammar.encode()
        with contextlib.suppress(OSError):  # the process ended before it had read everything
            ours.sendall(_HEAD.pack(len(data)) + data)
        return ours

    def _control(self) -> socket.socket:
        if self._socket is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._socket, theirs = socket.socketpair()
            with theirs:
                command = child_command("octavo.structured_output.trial", str(theirs.fileno()))
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        return self._socket

    def close(self) -> None:
        """End the process, if there is one, and all running trials. The next grammar starts another process."""
        with self._lock:
            running, self._running = self._running, set()  # cleared first: their threads then see that they were closed
            for connection in running:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
        self._socket = self._process = None


def _receive(connection: socket.socket, deadline: float | None = None) -> bytes | None:
    """Return the next message, or None if the other side has closed the connection."""
    data = b""
    size = _HEAD.size
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            more = connection.recv(size - len(data))
        except ConnectionError:
            return None
        if not more:
            return None
        data += more
        if size == _HEAD.size == len(data):
            size += _HEAD.unpack(data)[0]
    return data[_HEAD.size :]


def _send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(_HEAD.pack(len(message)) + message)


def _try(grammar: str) -> str:
    """Do the work that will be done where the model runs, with a vocabulary of bytes. Returns the error, or ""."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    if "token" in matcher.get_error().lower():  # bytes have no special tokens: the rest must be tried without them
        if problem := LLMatcher.validate_grammar(grammar, limits=limits()):
            return problem
        matcher = LLMatcher(_bytes(), _without_special_tokens(grammar), log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


_made: list[Any] = []


def _bytes() -> Any:
    if not _made:
        from llguidance import LLTokenizer

        _made.append(LLTokenizer("byte"))
    return _made[0]


def _without_special_tokens(grammar: str) -> str:
    whole = json.loads(grammar)
    for part in whole["grammars"]:
        if "lark_grammar" in part:
            part["lark_grammar"] = _PIECES.sub(lambda found: found[1] or '"x"', part["lark_grammar"])
    return json.dumps(whole)


def _serve_one(connection: socket.socket, time_limit_s: int) -> None:
    """In a process of its own: try one grammar in another thread, watched by this one."""
    _limit("RLIMIT_CPU", time_limit_s + 2)  # in case the trial holds the interpreter's lock
    _limit("RLIMIT_AS", _MEMORY_BYTES)
    data = _receive(connection)
    if data is None:
        return
    grammar = data.decode()

    def work() -> None:
        _send(connection, json.dumps(_try(grammar)).encode())
        os._exit(0)

    threading.stack_size(STACK_BYTES)
    started = time.process_time()
    threading.Thread(target=work, daemon=True).start()
    is_slow = False
    while True:
        # The other side sends nothing more, so a readable connection is a closed one.
        if select.select([connection], [], [], 0.02)[0] and not connection.recv(1):
            return
        used_s = time.process_time() - started
        if used_s >= time_limit_s:
            _send(connection, b"late")
            return
        if used_s >= _SLOW_S and not is_slow:
            is_slow = True
            os.nice(19)
            _send(connection, b"slow")


def _limit(name: str, value: int) -> None:
    import resource

    kind = getattr(resource, name)
    _, most = resource.getrlimit(kind)
    with contextlib.suppress(ValueError):  # some systems lack this limit
        resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main() -> None:
    """Fork for each trial until the parent has ended."""
    if sys.argv[1] == "alone":
        print(json.dumps(_try(sys.stdin.read())))
        return
    import signal

    _limit("RLIMIT_CORE", 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    _try(json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]}))  # a first trial loads everything once
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        limit, fds, _, _ = socket.recv_fds(control, _HEAD.size, 1)
        if not fds:
            return
        if os.fork() == 0:
            control.close()
            try:
                _serve_one(socket.socket(fileno=fds[0]), _HEAD.unpack(limit)[0])
            finally:
                os._exit(0)
        os.close(fds[0])


if __name__ == "__main__":
    main()
