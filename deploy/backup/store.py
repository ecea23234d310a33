"""Copies of what servers keep (`--response-store FILE`: responses, chats, files, batches), and the way back.

    python deploy/backup/store.py save FILE COPY       # while servers use FILE
    python deploy/backup/store.py restore COPY FILE    # when none does; what was at FILE is then at FILE.before

A copy is one moment of the store, whole and checked, or it is not there. It needs nothing but Python. What was under
way at that moment is known by its silence when a server has the copy: background responses have then failed, and
batches go on where they were.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy the store of a server's responses, or put a copy in its place.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help, first, second in (
        ("save", "copy a store, which servers may be using", "FILE", "COPY"),
        ("restore", "put a copy in the place of a store that no server is using", "COPY", "FILE"),
    ):
        command = commands.add_parser(name, help=help)
        command.add_argument("source", type=Path, metavar=first)
        command.add_argument("target", type=Path, metavar=second)
    args = parser.parse_args()
    try:
        {"save": save, "restore": restore}[args.command](args.source, args.target)
    except (OSError, ValueError, sqlite3.Error) as error:
        sys.exit(f"{parser.prog}: {error}")


def save(store: Path, copy: Path) -> None:
    """Replaces `copy` when all of it is there. Raises `ValueError` for a file that is no store."""
    with scratch_beside(copy) as scratch:
        write_moment(store, scratch)
        os.replace(scratch, copy)
    print(f"{copy}: {copy.stat().st_size:,} bytes")


def restore(copy: Path, store: Path) -> None:
    """Raises `ValueError` for a copy that is none and a store that is in use."""
    with scratch_beside(store) as scratch:
        write_moment(copy, scratch)
        if store.exists():
            with contextlib.closing(sqlite3.connect(store, timeout=0)) as db:
                try:
                    # Only who has it alone may leave the journal that servers write; that also puts it into the file.
                    db.execute("PRAGMA journal_mode = DELETE")
                except sqlite3.OperationalError:
                    raise ValueError(f"{store} is in use; stop the servers that have it") from None
            os.replace(store, store.with_name(store.name + ".before"))
        os.replace(scratch, store)
    print(f"{store}: {store.stat().st_size:,} bytes")


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """A path in the same file system that only this user can read, which is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=".store-") as folder:
        yield Path(folder) / "copy"


def write_moment(source: Path, target: Path) -> None:
    """Write what is in `source` now to `target`, whatever others write to it meanwhile."""
    with contextlib.closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as db:
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if not {"objects", "chunks", "owners"} <= tables:
            raise ValueError(f"{source} is no store of Octavo's")
        db.execute("VACUUM INTO ?", (str(target),))
    with contextlib.closing(sqlite3.connect(target)) as db:
        found = [row[0] for row in db.execute("PRAGMA integrity_check")]
        if found != ["ok"]:
            raise ValueError(f"{source} is damaged: {found[0]}")


if __name__ == "__main__":
    main()
