"""Reads lines that are typed at a prompt or come from a pipe, and keeps the typed lines for later runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

NUM_KEPT_LINES = 1000


def history_path() -> Path:
    """Return the file of typed lines: $XDG_STATE_HOME/octavo/history, else ~/.local/state/octavo/history."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "octavo" / "history"


def typed_lines(*, keeps_history: bool) -> Iterator[str]:
    """Yield lines that are not blank, until end of file. On a terminal there are a prompt, editing and a history, and
    Ctrl-C drops the typed text; a pipe has none of these. With `keeps_history` the history is kept across runs."""
    is_typed = sys.stdin.isatty()
    history = history_path() if is_typed and keeps_history else None
    if is_typed:
        _start_editing(history)
    while True:
        try:
            line = input("> " if is_typed else "")
        except EOFError:
            if is_typed:
                print()
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print()
            continue
        if line.strip():
            if history is not None:
                _keep(history, line)
            yield line


def _start_editing(history: Path | None) -> None:
    """Let `input` edit lines, and recall those of the history file."""
    try:
        import readline
    except ImportError:
        return
    if history is None:
        return
    with contextlib.suppress(OSError):
        lines = history.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines[-NUM_KEPT_LINES:]:
            readline.add_history(line)
        if len(lines) > 2 * NUM_KEPT_LINES:
            shorter = history.with_suffix(f".{os.getpid()}")
            _append(shorter, lines[-NUM_KEPT_LINES:])
            shorter.replace(history)


def _keep(history: Path, line: str) -> None:
    """Append a line at once: a killed run keeps its lines, and two runs at a time keep both theirs. Without a file
    that can be written (a full disk, a read-only home) the line is not kept."""
    with contextlib.suppress(OSError):
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _append(history, [line])


def _append(path: Path, lines: list[str]) -> None:
    """Append lines to a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "a", encoding="utf-8", errors="replace") as file:
        file.writelines(f"{line}\n" for line in lines)
