"""Processes that exchange rows: the same bits for all of them, sums in the order of one tree, and no waiting for the
dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.ops.cpu_collectives import group_bytes
from tests.waiting import within

SIZE, ROWS, WIDTH, CUT = 5, 7, 301, 61
WORKER = f"""
import os, sys
import numpy as np
from octavo.ops import cpu
from octavo.ops.cpu_arrays import BFLOAT16
from octavo.ops.cpu_collectives import group_bytes

rank, memory, end, turns = map(int, sys.argv[1:5])
cpu.use_threads(2, None)
cpu.join_group(rank, {SIZE}, memory, group_bytes({SIZE}, {SIZE * ROWS * WIDTH}), [end])
rng = np.random.default_rng(rank)
found = []
for turn in range(turns):
    rows = 1 + turn % {ROWS}
    x = rng.normal(size=(rows, {WIDTH})).astype(np.float32) * 1000 ** (rank % 3)
    found.append(x.copy())
    cpu.all_reduce(x, np.arange({WIDTH}, dtype=np.float32) if turn % 2 else None)
    found.append(x)
    first, end = rank * {CUT}, min((rank + 1) * {CUT}, {WIDTH})
    found.append(cpu.all_gather(x[:, first:end] * np.float32(1 + turn), first, {WIDTH}))
    halves = np.ascontiguousarray(x).view(BFLOAT16)  # any bits, infinities and what is no number among them
    gathered = cpu.all_gather(halves[:, 2 * first : 2 * end], 2 * first, {2 * WIDTH})
    found.append(gathered.view(np.float32))
    print(turn, flush=True)
np.savez(sys.argv[5], *found)
sys.stdin.read()
"""


def start(turns: int, folder: Path) -> tuple[list[subprocess.Popen[str]], list[socket.socket]]:
    """Workers that are connected to one socket each; without `turns` of their own they do not end."""
    memory = os.memfd_create("test")
    os.ftruncate(memory, group_bytes(SIZE, SIZE * ROWS * WIDTH))
    workers, ends = [], []
    for rank in range(SIZE):
        own, theirs = socket.socketpair()
        ends.append(own)
        arguments = [str(rank), str(memory), str(theirs.fileno()), str(turns), str(folder / f"{rank}.npz")]
        workers.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, pass_fds=[memory, theirs.fileno()],
            )
        )  # fmt: skip
        theirs.close()
    os.close(memory)
    return workers, ends


@pytest.mark.long
def test_sums_and_columns_of_all(tmp_path: Path) -> None:
    turns = 40
    workers, _ends = start(turns, tmp_path)
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    found = [list(np.load(tmp_path / f"{rank}.npz").values()) for rank in range(SIZE)]
    for turn in range(turns):
        given, summed, gathered, halves = ([of_rank[4 * turn + i] for of_rank in found] for i in range(4))
        expected = ((given[0] + given[1]) + (given[2] + given[3])) + given[4]
        expected = expected + np.arange(WIDTH, dtype=np.float32) if turn % 2 else expected
        for rank in range(SIZE):
            np.testing.assert_array_equal(summed[rank], expected)
            np.testing.assert_array_equal(gathered[rank], expected * np.float32(1 + turn))
            np.testing.assert_array_equal(halves[rank], expected)


def test_nobody_waits_for_a_process_that_has_ended(tmp_path: Path) -> None:
    workers, ends = start(1_000_000, tmp_path)
    try:
        assert [worker.stdout.readline() for worker in workers if worker.stdout] == ["0\n"] * SIZE
        workers[1].send_signal(signal.SIGKILL)
        workers[1].wait(within(60))
        for end in (ends[0], *ends[2:]):  # as the other end of their connection to it
            end.close()
        for worker in (workers[0], *workers[2:]):
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 1
            assert "RuntimeError: another worker of this model has ended." in errors
    finally:
        for worker in workers:
            worker.kill()


def test_more_numbers_than_there_is_room_for_are_refused() -> None:
    code = (
        "import os, numpy as np; from octavo.ops import cpu; from octavo.ops.cpu_collectives import group_bytes\n"
        "memory = os.memfd_create('test'); os.ftruncate(memory, group_bytes(1, 8))\n"
        "cpu.join_group(0, 1, memory, group_bytes(1, 8), [])\n"
        "cpu.all_reduce(np.ones((2, 4), np.float32))\n"
        "cpu.all_reduce(np.ones((3, 3), np.float32))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "an exchange of 9 numbers was asked of a group with room for 8." in ended.stderr


def test_columns_that_are_not_pairs_are_refused() -> None:
    code = (
        "import os, numpy as np; from octavo.ops import cpu; from octavo.ops.cpu_arrays import BFLOAT16\n"
        "memory = os.memfd_create('test'); os.ftruncate(memory, 4096)\n"
        "cpu.join_group(0, 1, memory, 4096, [])\n"
        "assert cpu.all_gather(np.ones((2, 4), BFLOAT16), 0, 4).dtype == BFLOAT16\n"
        "cpu.all_gather(np.ones((2, 3), BFLOAT16), 0, 3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "ConfigError: columns 0 to 3 of 3 in bfloat16 are not pairs." in ended.stderr


@pytest.mark.parametrize("arguments", [(0, 0), (2, 2), (-1, 2)])
def test_ranks_that_do_not_exist_are_refused(arguments: tuple[int, int]) -> None:
    import octavo._cpu as _cpu

    with pytest.raises(ValueError, match="no group of"):
        _cpu.Group(*arguments, np.zeros(4096, np.uint8), 4096, [])
