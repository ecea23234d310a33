"""The store: one file for several servers, full disks, kills, and files that are none."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.entrypoints.batch import stored_files
from octavo.entrypoints.http import store as store_module
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.store import Database, Store, StoreError
from octavo.errors import ConfigError
from tests.waiting import within

MANY = 1 << 30
WRITER = """
import sys
from octavo.entrypoints.http.store import Database
database = Database(sys.argv[1], 1 << 30)
for i in range(int(sys.argv[3])):
    with database.transaction():
        database.put("response", f"{sys.argv[2]}-{i}", b"{}" * 500)
        database.add_chunks(f"{sys.argv[2]}-{i}", [(0, b"a"), (1, b"b")])
    print(i, flush=True)
"""


def num_objects(path: Path) -> int:
    database = Database(str(path), MANY)
    with database.transaction():
        page = database.page("response", after=None, limit=10_000, is_ascending=True)
        assert all([data for _, data in database.chunks(one.id, -1, 9)] == [b"a", b"b"] for one in page)
    database.close()
    return len(page)


def start(path: Path, name: str, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(number)], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_write_at_once_and_a_kill_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with start(path, "a", 60) as one, start(path, "b", 60) as other:
        assert one.wait(within(60)) == other.wait(within(60)) == 0
    assert num_objects(path) == 120
    with start(path, "c", 100_000) as process:
        assert process.stdout is not None
        for _ in range(30):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert num_objects(path) >= 150


def copies(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).parents[3] / "deploy" / "backup" / "store.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_copy_is_made_beside_writers_and_put_back_without(tmp_path: Path) -> None:
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"
    with start(path, "a", 100_000) as process:
        assert process.stdout is not None
        for _ in range(30):
            process.stdout.readline()
        done = copies("save", path, copy)
        assert done.returncode == 0, done.stderr
        refused = copies("restore", copy, path)
        assert refused.returncode == 1 and "is in use; stop the servers" in refused.stderr
        process.kill()
    num_copied, num_written = num_objects(copy), num_objects(path)
    assert 30 <= num_copied < num_written, "and none of them by half"
    assert copies("restore", copy, path).returncode == 0
    assert (num_objects(path), num_objects(tmp_path / "store.db.before")) == (num_copied, num_written)
    left = {p.name for p in tmp_path.iterdir() if not p.name.endswith(("-wal", "-shm"))}  # what readers here left
    assert left == {"store.db", "store.db.before", "copy.db"}


def test_what_is_no_store_is_neither_copied_nor_put_back(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all\n" * 100)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE t (x)")
    for source, why in (("text", "not a database"), ("other.db", "no store of Octavo's"), ("none", "unable to open")):
        for command in ("save", "restore"):
            done = copies(command, tmp_path / source, tmp_path / "target")
            assert done.returncode == 1 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"text", "other.db"}


def test_a_full_disk_is_an_error_that_leaves_things_as_they_were(tmp_path: Path) -> None:
    database = Database(str(tmp_path / "store.db"), MANY)
    with database.transaction():
        database.put("response", "a", b"{}")
    database._db.execute("PRAGMA max_page_count = 20")  # what SQLite then says is what it says of a full disk
    with pytest.raises(StoreError, match="full"), database.transaction():  # noqa: PT012
        database.put("response", "b", b"{}")
        database.put("response", "a", b"x" * 200_000)
    with database.transaction():
        found = database.get("response", "a")
        assert found is not None and found.body == b"{}" and database.get("response", "b") is None
        database.put("response", "c", b"{}")
    database.close()


def test_the_oldest_responses_make_room_and_files_do_not() -> None:
    database = Database(None, 300_000)
    with database.transaction():
        database.put("file", "kept", b"x" * 50_000)
    for i in range(20):
        with database.transaction():
            database.put("response", str(i), b"x" * 20_000)
    with database.transaction():
        assert database.get("file", "kept") is not None
        assert database.get("response", "0") is None and database.get("response", "19") is not None
    with pytest.raises(StoreError, match="room"), database.transaction():
        database.put("file", "large", b"x" * 400_000)
    database.close()


def test_tokens_of_answers_make_room_before_responses_do() -> None:
    database = Database(None, 300_000)
    with database.transaction():
        database.put("response", "first", b"x" * 20_000)
    for i in range(100):
        with database.transaction():
            database.put("answer", str(i), b"x" * 20_000)
    with database.transaction():
        assert database.get("response", "first") is not None
        assert database.get("answer", "0") is None and database.get("answer", "99") is not None
    database.close()


def test_what_is_posted_to_a_store_that_is_slow_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MAX_POSTED_BYTES", 10)
    store, gate = Store(None, 300_000), threading.Event()
    store._thread.submit(gate.wait)
    for name in ("first", "second"):
        store.post(lambda database, name=name: database.put("answer", name, b"x" * 8), 8)  # type: ignore[misc]
    gate.set()

    async def found(name: str) -> bool:
        return await store.run(lambda database: database.get("answer", name)) is not None

    assert asyncio.run(found("first")) and not asyncio.run(found("second"))
    store.post(lambda database: database.put("answer", "third", b"x" * 8), 8)
    assert asyncio.run(found("third"))
    store.close()


def test_a_file_that_is_no_store_keeps_the_server_from_starting(tmp_path: Path) -> None:
    text, other, newer = tmp_path / "text", tmp_path / "no" / "folder.db", tmp_path / "newer.db"
    text.write_text("Something else. " * 500)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    for path in (text, other, newer):
        with pytest.raises(ConfigError, match="--response-store"):
            ServerArgs(response_store=str(path)).check()
    assert text.read_text().startswith("Something")


@pytest.mark.parametrize("ends", [True, False])
def test_a_server_waits_while_another_one_makes_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """SQLite refuses a change of the journal at once while another process writes a new file."""
    path, now_s = str(tmp_path / "store.db"), 0.0
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if ends and other.in_transaction:
            other.execute("ROLLBACK")

    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    if ends:
        Database(path, MANY).close()
    else:
        with pytest.raises(ConfigError, match="database is locked"):
            Database(path, MANY)
    assert (now_s > store_module._BUSY_S) is not ends
    other.close()


def test_what_is_kept_is_its_owners_to_read_and_nobody_elses(tmp_path: Path) -> None:
    path, mask = tmp_path / "store.db", os.umask(0)
    try:
        database = Database(str(path), MANY)
        with database.transaction():
            database.put("response", "a", b"{}")
        modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
        assert modes == dict.fromkeys(("store.db", "store.db-wal", "store.db-shm"), "0o600")
        database.close()
        path.chmod(0o640)  # by somebody who wants it
        Database(str(path), MANY).close()
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(mask)


def test_pieces_of_an_upload_that_a_kill_has_cut_off_are_collected(tmp_path: Path) -> None:
    path = str(tmp_path / "store.db")
    file = stored_files.new_file("a", "batch", 9)
    dead, alive, last = (Database(path, MANY) for _ in range(3))
    for database, id in ((dead, "file-dead"), (alive, "file-alive")):
        with database.transaction():
            stored_files.begin_upload(database, {**file, "id": id})
            stored_files.add_piece(database, id, 0, b"x" * 9)
    with dead.transaction():
        dead.leave()
    with last.transaction():
        stored_files.begin_upload(last, {**file, "id": "file-new"})
        assert (last.num_chunk_bytes("file-dead"), last.num_chunk_bytes("file-alive")) == (0, 9)
    with alive.transaction():
        stored_files.end_upload(alive, {**file, "id": "file-alive"})
        assert stored_files.find(alive, "file", "file-alive") and alive.num_chunk_bytes("file-alive") == 9
        assert not alive.under_way("file")
    for database in (dead, alive, last):
        database.close()
