"""Collectives of the CUDA backend, for processes of one host that share a model, each with a device.

NCCL moves rows between devices but adds nothing: the order of its sums would depend on the size of the message. A
Triton kernel adds in the tree of `SegmentOps`, so sums have the same bits for small and large messages. All work is on
the current stream and can be captured. With Triton's interpreter, gloo moves the rows instead of NCCL.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.triton import launch
from octavo.ops.triton.rows import MAX_PARTS, sum_in_tree
from octavo.ops.triton.schedule import sum_exchanges

_JOIN_S = 10.0  # time for all workers to join; they have opened their devices before
_HUNG_UP = getattr(select, "POLLRDHUP", 0)
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renames it

_size = 0  # number of workers in the group; 0: no group
_watch: _Watch | None = None  # watches the group's other workers


def check_is_in_no_group() -> None:
    """Raise `ConfigError` if this process has joined a group and not left it."""
    if dist.is_initialized():
        raise ConfigError(
            "this process has a model that several workers share already, or another group of torch.distributed; "
            "close that first."
        )


def join_group(rank: int, size: int, file: int, connections: list[int]) -> None:
    """Join a group of `size` workers as worker `rank`.

    The workers find each other through `file`, the descriptor of a file that is empty at first and that nobody else
    uses. If the other end of one of `connections` hangs up, the group is aborted, so that no kernel waits for it.
    Raises `ConfigError` if the other workers do not join in time."""
    global _size, _watch
    check_is_in_no_group()
    device = launch.device()
    is_cuda = device.type == "cuda"
    for library in ("NCCL", "GLOO"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # all workers are on this host
    # The store opens its file by name again when it is destroyed, at a time that torch chooses. By then the caller's
    # descriptor may belong to another file, so a duplicate stays open until the process ends.
    store = dist.FileStore(f"/proc/self/fd/{os.dup(file)}", size)  # type: ignore[attr-defined]
    try:
        store.set(f"worker {rank}", "")
        store.wait([f"worker {other}" for other in range(size)], timedelta(seconds=_JOIN_S))
        dist.init_process_group(
            "nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=size,
            device_id=device if is_cuda else None,
        )  # fmt: skip
    except RuntimeError as e:
        raise ConfigError(f"worker {rank} of {size} has not found the others: {str(e).splitlines()[0]}") from None
    _size = size
    _exchange_once(device)
    if is_cuda:
        torch.cuda.synchronize(device)
    assert dist.group.WORLD is not None
    _watch = _Watch(dist.group.WORLD, connections)


@contextmanager
def absent_group(size: int) -> Iterator[None]:
    """Inside this context, this process counts as the first of `size` workers, whose exchanges are outlined only. The
    first ones are those of `join_group`."""
    global _size
    _size = size
    try:
        if size > 1:
            _exchange_once(launch.device())
        yield
    finally:
        _size = 0


def _exchange_once(device: torch.device) -> None:
    """Exchange rows in each way: NCCL allocates for all kinds of exchange now, before memory is divided."""
    x = torch.zeros((_size, 1), device=device)
    for is_small in (True, False):
        _add_up(x, None, is_small)
    from_first(x[:, 0].contiguous())


@atexit.register  # threads of torch that still run at exit may end the process with an error
def leave_group() -> None:
    """Leave the group without waiting for the other workers."""
    global _size, _watch
    _size, watch, _watch = 0, _watch, None
    if watch is not None:
        watch.stop()
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


class _Watch:
    """Aborts the group when another worker's process ends. NCCL does not notice: its kernels would wait forever."""

    def __init__(self, group: dist.ProcessGroup, connections: list[int]) -> None:
        """`connections` stay open until `stop`."""
        self._stopped, self._stop = os.pipe()
        args = group, connections
        self._thread = threading.Thread(target=self._run, args=args, name="group", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.close(self._stop)
        if threading.current_thread() is not self._thread:  # garbage collection may call `stop` in this thread
            self._thread.join()
        os.close(self._stopped)

    def _run(self, group: dist.ProcessGroup, connections: list[int]) -> None:
        poll = select.poll()
        for connection in connections:
            poll.register(connection, _HUNG_UP)
        poll.register(self._stopped)
        if self._stopped not in dict(poll.poll()):
            group.abort()


def all_reduce(x: Tensor, bias: Tensor | None = None) -> None:
    """`ParallelOps.all_reduce`."""
    num_exchanges, _ = sum_exchanges(x.nbytes, _size)
    _add_up(x, bias, num_exchanges == 1)


def _add_up(x: Tensor, bias: Tensor | None, is_small: bool) -> None:
    assert 0 < _size <= MAX_PARTS, "this process has no others to exchange rows with, or too many"
    rows, width = x.shape
    if is_small:
        parts = x.new_empty((_size, rows, width))
        _exchange(_gather, parts, x)
        sum_in_tree(parts, bias, x)
        return
    each = -(-rows // _size)
    padded = x if rows == each * _size else torch.nn.functional.pad(x, (0, 0, 0, each * _size - rows))
    parts, own = x.new_empty((_size, each, width)), x.new_empty((each, width))
    _exchange(dist.all_to_all_single, parts, padded)
    sum_in_tree(parts, bias, own)
    _exchange(_gather, padded, own)
    if padded is not x:
        x.copy_(padded[:rows])


def all_gather(x: Tensor, begin: int, width: int) -> Tensor:
    """`ParallelOps.all_gather`. All workers have the same number of columns; the last workers may have fewer."""
    each = -(-width // _size)
    widths = [min(each, max(0, width - rank * each)) for rank in range(_size)]
    assert x.shape[1] == each or begin + x.shape[1] == width or x.shape[1] == 0
    own = x.contiguous() if x.shape[1] == each else torch.nn.functional.pad(x, (0, each - x.shape[1]))
    parts = x.new_empty((_size, x.shape[0], each))
    _exchange(_gather, parts, own)
    return torch.cat([part[:, :count] for part, count in zip(parts, widths, strict=True)], 1)


def from_first(x: Tensor) -> None:
    """`ParallelDeviceOps.from_first`."""
    if x.device.type != "meta":
        dist.broadcast(x, 0)


def _exchange(collective: Callable[..., Any], out: Tensor, x: Tensor) -> None:
    if x.device.type != "meta":  # outlines run on meta tensors, which have no data
        collective(out.view(-1), x.view(-1))
