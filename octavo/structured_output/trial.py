"""Whether a grammar can be followed, found out where it does no harm: in a process of its own, which is killed when it
takes too long and replaced when it dies.

llguidance bounds most of the work that a grammar may make (`limits`), but not all: intersected regular expressions keep
it busy for ever, and references that follow each other by the hundred overflow its stack, which ends the process.
`octavo.structured_output.grammar` asks here; what passes is compiled once more where the model runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import selectors
import signal
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
# Where the model runs there must be more stack than here (see `masks`), so that what passes never overflows it.
STACK_BYTES = 4 << 20
_MEMORY_BYTES = 4 << 30  # of addresses; the largest of our tests takes 0.3 GB
# In Lark: strings and regular expressions, which are kept, and special tokens.
_PIECES = re.compile(r'("(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/)|<[^<>\s]+>')


class TrialFailed(Exception):
    """A grammar that was too much. Another time it might not be."""


def limits() -> Any:
    """What one grammar may cost. Where llguidance's default is not taken: a state of the lexer is about 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class GrammarTrial:
    """A process that tries grammars out, one after the other. It is started with the first of them, and ends with its
    parent. Calls may come from any thread."""

    def __init__(self, time_limit_s: int = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def problem(self, grammar: str) -> str:
        """Why a grammar cannot be followed, in llguidance's words, or nothing. Raises `TrialFailed`."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = child_command("octavo.structured_output.trial", str(self._time_limit_s))
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(grammar).encode() + b"\n")
                process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                has_come = bool(selector.select(self._time_limit_s * _PATIENCE))
            if line := process.stdout.readline() if has_come else b"":
                problem: str = json.loads(line)
                return problem
            if has_come:  # it ended, and how is what its exit status says
                process.wait()
            self._end(process)
        if has_come and process.returncode != -getattr(signal, "SIGXCPU", 0):
            raise TrialFailed("it is nested too deep, or takes too much memory.")
        raise TrialFailed(f"to compile it takes more than {self._time_limit_s} s.")

    def close(self) -> None:
        """End the process, if there is one. The next grammar starts another."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        self._process = None


def _try(grammar: str) -> str:
    """Do what will be done where the model runs, with a vocabulary of bytes."""
    from llguidance import LLMatcher, LLTokenizer

    if problem := LLMatcher.validate_grammar(grammar, limits=limits()):
        return problem
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits())
    if "token" in matcher.get_error().lower():  # bytes have no special ones: the rest must be tried without them
        matcher = LLMatcher(LLTokenizer("byte"), _without_special_tokens(grammar), log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def _without_special_tokens(grammar: str) -> str:
    whole = json.loads(grammar)
    for part in whole["grammars"]:
        if "lark_grammar" in part:
            part["lark_grammar"] = _PIECES.sub(lambda found: found[1] or '"x"', part["lark_grammar"])
    return json.dumps(whole)


def _follow_parent(time_limit_s: int) -> None:
    for line in sys.stdin.buffer:
        _limit("RLIMIT_CPU", math.ceil(time.process_time()) + time_limit_s)
        sys.stdout.buffer.write(json.dumps(_try(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit(name: str, value: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: the time that the parent waits is then all that bounds it
        return
    kind = getattr(resource, name)
    _, most = resource.getrlimit(kind)
    with contextlib.suppress(ValueError):  # a system that does not have this limit
        resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def main() -> None:
    """Answer until the parent has gone."""
    _limit("RLIMIT_AS", _MEMORY_BYTES)
    _limit("RLIMIT_CORE", 0)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_follow_parent, args=(int(sys.argv[1]),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
