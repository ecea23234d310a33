"""The identity of a model's weights: a hash of all bytes of its files.

A file is read only once: its hash is kept in the folder of cached blocks, and a file with the same path, size, times
and inode counts as unchanged.
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path


def weight_identity(files: Sequence[str], notes: Path) -> str:
    """Return the hash of the files' contents, in hexadecimal. `notes` is a folder for the hashes of files; it may be
    missing or damaged. Raises `OSError` for a file that cannot be read."""
    return hashlib.sha256("".join(_file_identity(path, notes) for path in files).encode()).hexdigest()


def _file_identity(path: str, notes: Path) -> str:
    found = os.stat(path)
    facts = (
        os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev
    )  # fmt: skip
    of_facts = hashlib.sha256(repr(facts).encode()).hexdigest()
    note = notes / of_facts
    with contextlib.suppress(OSError, ValueError):
        identity, _, check = note.read_text(encoding="ascii").partition(" ")
        if check == _check(of_facts, identity):
            return identity
    with open(path, "rb") as file:  # at 1.6 GB/s with the processor's instructions
        identity = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        notes.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = note.with_name(f"{note.name}-{secrets.token_hex(8)}")
        part.write_text(f"{identity} {_check(of_facts, identity)}", encoding="ascii")
        part.replace(note)
    return identity


def _check(of_facts: str, identity: str) -> str:
    return hashlib.sha256(f"{of_facts} {identity}".encode()).hexdigest()[:16]
