"""Blocks in a folder: what is found again, what is not served, and how much room they take."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.kv_cache import block_files
from octavo.kv_cache.block_files import BlockFiles, block_file_name
from octavo.kv_cache.block_pool import BlockName

SIZE = 4000  # of a block: with its checksum it takes one page
PAGE = 4096


def name(number: int, pool: int = 0) -> BlockName:
    return pool, number.to_bytes(16, "big")


def contents(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def read(one: BlockFiles, of: BlockName) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    found = np.empty(SIZE, np.uint8)
    return found if one.read(of, found) else None


def files(folder: Path, num_pages: int = 100, fingerprint: bytes = b"f" * 16) -> BlockFiles:
    return BlockFiles(str(folder), fingerprint, num_pages * PAGE)


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_block_is_found_as_it_was_also_by_the_next_server_and_under_no_other_fingerprint(tmp_path: Path) -> None:
    first = files(tmp_path)
    assert first.write(name(1), contents(1)) and first.write(name(1, pool=1), contents(2))
    for one in (first, files(tmp_path)):
        assert np.array_equal(read(one, name(1)), contents(1))  # type: ignore[arg-type]
        assert np.array_equal(read(one, name(1, pool=1)), contents(2))
        assert (one.has(name(1)), one.has(name(2))) == (True, False)
    other = files(tmp_path, fingerprint=b"g" * 16)
    assert not other.has(name(1)) and read(other, name(1)) is None
    assert other.num_bytes == 2 * PAGE, "the bound is of the whole folder"


@pytest.mark.parametrize("damage", ["a bit", "torn", "longer", "empty", "of another name"])
def test_a_damaged_file_is_not_served_and_removed(damage: str, tmp_path: Path) -> None:
    one = files(tmp_path)
    one.write(name(1), contents(1))
    [path] = paths(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[SIZE // 2] ^= 4
    elif damage == "of another name":
        one.write(name(2), contents(2))
        data = bytearray(next(other for other in paths(tmp_path) if other != path).read_bytes())
        one.remove([name(2)])
    else:
        data = {"torn": data[:SIZE], "longer": data + b"x", "empty": bytearray()}[damage]
    path.write_bytes(data)
    for again in (one, files(tmp_path)):
        again.take_num_damaged()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        assert read(again, name(1)) is None
        assert (again.take_num_damaged(), again.has(name(1)), paths(tmp_path), again.num_bytes) == (1, False, [], 0)
    assert one.write(name(1), contents(1)) and read(one, name(1)) is not None


def test_damaged_files_are_counted_under_the_lock(tmp_path: Path) -> None:
    """Several threads read."""
    one, is_locked = files(tmp_path), list[bool]()

    class Count(int):
        def __add__(self, other: int) -> Count:
            is_locked.append(one._lock.locked())
            return Count(int(self) + other)

    for number in range(2):
        one.write(name(number), contents(number))
        one.keep_session(f"session {number}", [name(number)], time.time() + 1000.0)
    for path in paths(tmp_path):
        path.write_bytes(b"x" * path.stat().st_size)
    one.num_damaged = Count()
    for number in range(2):
        assert read(one, name(number)) is None and one.session_names(f"session {number}") == set()
    assert set(is_locked) == {True} and one.take_num_damaged() == 4 and one.take_num_damaged() == 0


def test_an_unreadable_file_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = files(tmp_path)
    one.write(name(1), contents(1))
    with monkeypatch.context() as failing:
        failing.setattr(os, "readv", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        assert read(one, name(1)) is None
    assert (one.knows(name(1)), one.num_bytes, len(paths(tmp_path))) == (False, 0, 1)
    assert one.write(name(1), contents(1)) and read(one, name(1)) is not None


def test_the_blocks_that_were_used_longest_ago_go_first_and_the_bound_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = files(tmp_path, num_pages=4)
    for number in range(4):
        one.write(name(number), contents(number))
    before = one._files.copy()
    for number in range(4):
        one.touch([name(number)])
    assert one._files == before, "they were used a moment ago"
    monkeypatch.setattr(block_files, "_FRESH_NS", 0)
    one.touch([name(0), name(1)])
    one.write(name(4), contents(4))
    assert [number for number in range(5) if one.has(name(number))] == [0, 1, 3, 4]
    one.write(name(5), contents(5))
    assert [number for number in range(6) if one.has(name(number))] == [0, 1, 4, 5]
    assert one.num_bytes == 4 * PAGE == PAGE * len(paths(tmp_path))
    for number, path in (
        (number, path) for number in range(6) for path in paths(tmp_path) if f"{number:032x}" in path.name
    ):
        os.utime(path, (number, number))
    smaller = files(tmp_path, num_pages=2)
    assert [number for number in range(6) if smaller.has(name(number))] == [4, 5], (
        "a smaller bound holds from the start"
    )
    assert not files(tmp_path, num_pages=2).write(name(7), np.zeros(2 * PAGE, np.uint8)), "larger than the bound"


def test_the_beginning_of_a_prompt_goes_last_though_it_was_written_a_moment_ago(tmp_path: Path) -> None:
    one = files(tmp_path, num_pages=4)
    one.write(name(9), contents(9))
    for number in range(3):
        one.write(name(number), contents(number))
    one.touch([name(number) for number in range(3)])
    before = one._files.copy()
    one.touch([name(number) for number in range(3)])
    assert one._files == before, "their order is right already"
    assert files(tmp_path, num_pages=4)._files == before, "the next server has it too"
    one.remove([name(9)])
    for number in range(10, 13):
        one.write(name(number), contents(number))
    assert [number for number in range(3) if one.has(name(number))] == [0]


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    one, other = files(tmp_path, num_pages=32), files(tmp_path, num_pages=32)
    one.write(name(1), contents(1))
    assert not other.knows(name(1)) and other.has(name(1)) and other.knows(name(1))
    assert np.array_equal(read(other, name(1)), contents(1))
    other.write(name(1), contents(1))  # type: ignore[arg-type]
    one.remove([name(1)])
    assert read(other, name(1)) is None and not other.knows(name(1)) and other.num_damaged == 0
    for number in range(2, 40):
        one.write(name(number), contents(number))
        other.write(name(100 + number), contents(number))
    assert len(paths(tmp_path)) <= 32 + 32 // 16 + 1, "each finds the other's blocks as it writes"


def test_a_block_that_another_server_keeps_is_kept_after_it_is_written_again(tmp_path: Path) -> None:
    one, other = files(tmp_path), files(tmp_path)
    end = time.time() + 1000.0
    one.write(name(0), contents(0), end)
    other.write(name(0), contents(0), end - 500.0)
    for each in (other, files(tmp_path)):
        assert each._files[each._own, block_file_name(name(0))].used == int(end * 1e9) and each.num_kept_bytes == PAGE


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    one = files(tmp_path)
    one.write(name(1), contents(1))
    [path] = paths(tmp_path)
    left, written = path.with_name("left.part"), path.with_name("written.part")
    left.write_bytes(b"half")
    written.write_bytes(b"half")
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert files(tmp_path).num_bytes == PAGE
        assert paths(tmp_path) == [path, written]
    files(tmp_path)
    assert paths(tmp_path) == [path]


def test_a_scan_that_finds_a_part_before_it_is_locked_loses_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, lock = files(tmp_path), files(tmp_path), block_files.lock
    scans = [other.scan]

    def lock_late(file: int) -> None:
        if scans:
            scans.pop()()
        lock(file)

    monkeypatch.setattr(block_files, "lock", lock_late)
    assert one.write(name(1), contents(1)) and not scans
    assert np.array_equal(read(other, name(1)), contents(1)) and len(paths(tmp_path)) == 1  # type: ignore[arg-type]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = files(tmp_path)
    real = os.writev

    def half(file: int, parts: list[memoryview]) -> int:
        if len(parts) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, [parts[0][:-10], parts[1][:0]]) + 10

    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(OSError, match="No space"):
        one.write(name(1), contents(1))
    assert (paths(tmp_path), one.num_bytes, one.has(name(1))) == ([], 0, False)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--kv-cache-disk .*file: Not a directory; name a folder"):
        files(tmp_path / "file")


def test_sessions_keep_their_blocks_before_others_and_until_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: now[0] * 1_000_000)
    one = files(tmp_path, num_pages=10)

    def write(number: int) -> None:
        now[0] += 1
        one.write(name(number), contents(number))

    def there() -> list[int]:
        return [number for number in range(30) if one.has(name(number))]

    for number in range(3):
        write(number)
    one.keep_session("aa11", [name(0), name(1), name(7)], now[0] / 1e3 + 60)
    write(7)
    one.keep([name(7)], now[0] / 1e3 + 60)
    for number in range(10, 20):
        write(number)
    assert there() == [0, 1, 7, *range(14, 20)] and one.num_kept_bytes == 4 * PAGE
    one = files(tmp_path, num_pages=10)  # the next server
    assert one.num_kept_bytes == 4 * PAGE and list(one.sessions()) == ["aa11"]
    assert one.session_names("aa11") == {name(0), name(1), name(7)}
    now[0] += 61_000
    for number in range(20, 29):
        write(number)
    assert there() == [7, *range(20, 29)], "their time was over before the new ones came"
    assert one.num_kept_bytes == 0


def test_sessions_keep_no_more_than_their_share(tmp_path: Path) -> None:
    one = files(tmp_path, num_pages=20)
    for number in range(18):
        one.write(name(number), contents(number))
    one.keep_session("aa11", [name(number) for number in range(18)], time.time() + 1000)
    assert one.num_kept_bytes == 10 * PAGE
    one.keep([name(0)], time.time() + 2000)
    assert one.num_kept_bytes == 10 * PAGE


def test_models_in_one_folder_have_sessions_of_the_same_name(tmp_path: Path) -> None:
    files(tmp_path, fingerprint=b"g" * 16).keep_session("aa11", [name(1)], 0)
    one = files(tmp_path, num_pages=3)
    one.keep_session("aa11", [name(0)], time.time() + 1000)
    for number in range(2):
        one.write(name(number), contents(number))  # the other model's session goes, as the oldest file
    assert len([path for path in paths(tmp_path) if path.suffix == ".session"]) == 1
    assert list(one.sessions()) == ["aa11"]


def test_a_dropped_session_takes_only_what_is_its_own(tmp_path: Path) -> None:
    one = files(tmp_path)
    for number in range(4):
        one.write(name(number), contents(number))
    one.keep_session("aa11", [name(0), name(1)], 0)
    one.keep_session("aa11", [name(2)], 0)
    one.keep_session("bb22", [name(0)], 0)
    one.drop_session("aa11")
    assert [one.has(name(number)) for number in range(4)] == [True, False, False, True]
    assert list(files(tmp_path).sessions()) == ["bb22"]
    [path] = [path for path in paths(tmp_path) if path.name == "bb22.session"]
    for number, use in enumerate((one.drop_session, one.session_names), 1):
        path.write_bytes(path.read_bytes().replace(b"00", b"11", 1))
        use("bb22")
        assert one.has(name(0)) and one.num_damaged == number and one.sessions() == {}, "a damaged list names nothing"
        one.keep_session("bb22", [name(0)], 0)
