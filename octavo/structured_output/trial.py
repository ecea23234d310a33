"""Whether a grammar can be followed, found out where it does no harm: in processes of their own, which end when they
take too long or die.

llguidance bounds most of the work that a grammar may make (`limits`), but not all: intersected regular expressions keep
it busy for ever, and references that follow each other by the hundred overflow its stack, which ends the process.
`octavo.structured_output.grammar_builder` asks here; what passes is compiled once more where the model runs.

One process is started with the first grammar, loads llguidance and forks for each trial. So trials run beside each
other, and one that is slow, which gives way to all others (`nice`), holds nobody up.
"""

from __future__ import annotations

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

# Of the processor's time, so that it is the same on a busy machine. The largest that are of use take 3 s; what takes as
# long as this would take for ever.
TIME_LIMIT_S = 10
_PATIENCE = 6  # times as long by the clock, on a machine that gives the process no time
_SLOW_S = 0.1  # of processor time: from then on a trial gives way to others
_MAX_SLOW = 4  # slow trials at once; another one ends
# Where the model runs there must be more stack than here (`grammar_matching`), so that what passes never overflows it.
STACK_BYTES = 4 << 20
_MEMORY_BYTES = 4 << 30  # of addresses; the largest of our tests takes 0.3 GB
# In Lark: strings and regular expressions, which are kept, and special tokens.
_PIECES = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|<[^<>\s]+>')
_HEAD = struct.Struct("<I")


class TrialFailed(Exception):
    """A grammar that was too much."""


class TrialsBusy(TrialFailed):
    """A slow grammar among too many of them. Another time it may be tried to its end."""


def limits() -> Any:
    """What one grammar may cost. Where llguidance's default is not taken: a state of the lexer is about 2 kB."""
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
        """Why a grammar cannot be followed, in llguidance's words, or nothing. Raises `TrialFailed`."""
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
        """On Windows: each trial starts a process, which costs a fifth of a second."""
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
        """A connection to a process that tries `grammar`, and ends when the connection does."""
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
        with contextlib.suppress(OSError):  # it ended before it had read everything
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
        """End the process, if there is one, and the trials under way. The next grammar starts another."""
        with self._lock:
            running, self._running = self._running, set()  # before they hear of it
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
    """The next message, or None if the other side has gone."""
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
    """Do what will be done where the model runs, with a vocabulary of bytes."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    if "token" in matcher.get_error().lower():  # bytes have no special ones: the rest must be tried without them
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
    """In a process of its own: try one grammar, watched by this thread."""
    _limit("RLIMIT_CPU", time_limit_s + 2)  # for what holds the interpreter's lock
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
        # The other side says nothing more: what can be read is its end.
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
    with contextlib.suppress(ValueError):  # a system that does not have this limit
        resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main() -> None:
    """Fork for each trial until the parent has gone."""
    if sys.argv[1] == "alone":
        print(json.dumps(_try(sys.stdin.read())))
        return
    import signal

    _limit("RLIMIT_CORE", 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children are nobody's to wait for
    _try(json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]}))  # load everything once
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
