"""Rows of several workers: the tree of their sums, to the bit, whichever way rows take; and columns side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.ops import cuda_collectives
from octavo.ops.triton.rows import MAX_PARTS, sum_in_tree
from tests.ops.triton.conftest import DEVICE

SIZE, WIDTH, COLUMNS = 3, 37, 8
WORKER = f"""
import sys
import numpy as np, torch
from octavo.ops import cuda, cuda_collectives
from octavo.ops.triton import schedule

rank, file = map(int, sys.argv[1:3])
cuda_collectives.join_group(rank, {SIZE}, file, [])
rng = np.random.default_rng(rank)
x = torch.from_numpy(rng.normal(size=(5, {WIDTH})).astype(np.float32) * 1000 ** rank)
bias = torch.arange({WIDTH}, dtype=torch.float32)
found = [x.clone()]
for rows in (x, x[:1], x[:3]):
    for limit in (1 << 20, -1):  # in one exchange, and in two
        schedule._SECOND_EXCHANGE_BYTES = limit
        summed = rows.clone()
        cuda.all_reduce(summed, bias)
        found.append(summed)
first, end = min(rank * 3, {COLUMNS}), min(rank * 3 + 3, {COLUMNS})
found.append(cuda.all_gather(x[:, first:end], first, {COLUMNS}))
found.append(cuda.all_gather(x[:, first:end].bfloat16(), first, {COLUMNS}).float())
tokens = torch.arange(4) + 10 * rank
cuda.from_first(tokens)
np.savez(sys.argv[3], *found, tokens)
"""


def in_tree(parts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Neighbours first, then the sums of neighbours; what is left over from the last to the first."""
    sums = list(parts)
    while len(sums) > 1:
        pairs = [sums[i] + sums[i + 1] for i in range(0, len(sums) - 1, 2)]
        sums = pairs + sums[len(pairs) * 2 :]
    return sums[0]


@pytest.mark.parametrize("count", range(1, MAX_PARTS + 1))
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_are_those_of_the_tree(count: int, has_bias: bool) -> None:
    rng = np.random.default_rng(count)
    scales = (1000.0 ** (np.arange(count) % 3)).astype(np.float32)[:, None, None]
    parts = rng.normal(size=(count, 3, 2000)).astype(np.float32) * scales
    bias = rng.normal(size=2000).astype(np.float32)
    out = torch.empty(3, 2000, device=DEVICE)
    sum_in_tree(torch.from_numpy(parts).to(DEVICE), torch.from_numpy(bias).to(DEVICE) if has_bias else None, out)
    np.testing.assert_array_equal(out.cpu().numpy(), in_tree(parts) + bias if has_bias else in_tree(parts))


@pytest.mark.long
@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs a device for each process: scripts/gpu-check parallel")
def test_all_have_the_same_bits_whichever_way_rows_take(tmp_path: Path) -> None:
    """A row's are the same alone and among others, too."""
    file = os.memfd_create("test")
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER, str(rank), str(file), str(tmp_path / f"{rank}.npz")],
            stderr=subprocess.PIPE, text=True, pass_fds=[file],
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    os.close(file)
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    found = [list(np.load(tmp_path / f"{rank}.npz").values()) for rank in range(SIZE)]
    given = np.stack([of_rank[0] for of_rank in found])
    expected = in_tree(given) + np.arange(WIDTH, dtype=np.float32)
    columns = np.concatenate([given[rank][:, 3 * rank : min(3 * rank + 3, COLUMNS)] for rank in range(SIZE)], 1)
    rounded = torch.from_numpy(columns).bfloat16().float().numpy()
    for _, *summed, gathered, halves, tokens in found:
        for rows in summed:
            np.testing.assert_array_equal(rows, expected[: len(rows)])
        assert [len(rows) for rows in summed] == [5, 5, 1, 1, 3, 3]
        np.testing.assert_array_equal(gathered, columns)
        np.testing.assert_array_equal(halves, rounded)
        assert tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="with NCCL there is nobody to ask")
def test_who_waits_for_others_in_vain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_collectives, "_JOIN_S", 0.2)
    file = os.memfd_create("test")
    with pytest.raises(ConfigError, match="worker 0 of 2 has not found the others: "):
        cuda_collectives.join_group(0, 2, file, [])
    os.close(file)
    cuda_collectives.check_is_in_no_group()


@pytest.mark.long
@pytest.mark.skipif(DEVICE.type == "cuda", reason="needs a device for each process: scripts/gpu-check parallel")
def test_a_group_that_was_left_lets_its_file_be_another(tmp_path: Path) -> None:
    """Torch's store opens its file by name when it is destroyed, which was once after the descriptor had become a
    socket: the process ended there. The thread that watches the others is gone as well."""
    program = f"""
import os, socket, sys, threading
import torch.distributed as dist
from octavo.ops import cuda_collectives

file = os.memfd_create("test")
end, other = socket.socketpair()
cuda_collectives.join_group(0, 1, file, [end.fileno()])
group = dist.group.WORLD
cuda_collectives.leave_group()
assert not [thread for thread in threading.enumerate() if thread.name == "group"]
os.close(file)
os.dup2(other.fileno(), file)
del group
cuda_collectives.join_group(0, 1, os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT), [end.fileno()])
"""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
