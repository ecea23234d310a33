"""Latency and bandwidth of what workers with a GPU each exchange: `octavo.ops.cuda_collectives` over NCCL.

    python benchmarks/gpu_collectives.py [--size 2] [--width 8192]

A line for sums of some numbers of rows: microseconds each way that rows may take, by themselves and out of a captured
graph, and GB/s that a worker receives. Without GPUs, with TRITON_INTERPRET=1, it shows that it works, over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

ROWS = (1, 16, 64, 256, 2048, 8192)
_REPEATS = 20


def times_us(size: int, width: int, rows: tuple[int, ...] = ROWS) -> list[dict[str, float]]:
    """Of each number of rows: "one" and "two" exchanges, and "graph", the way that is chosen, captured."""
    file = os.memfd_create("exchange")
    command = [sys.executable, "-W", "ignore", __file__, "--width", str(width), "--size", str(size)]
    command += ["--rows", ",".join(map(str, rows)), "--file", str(file)]
    workers = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file], text=True
        )
        for rank in range(size)
    ]
    os.close(file)
    assert workers[0].stdout is not None
    line = workers[0].stdout.readline()
    for worker in workers:
        worker.communicate(timeout=60)
    if not line:
        raise RuntimeError("a worker has failed")
    found: list[dict[str, float]] = json.loads(line)
    return found


def received_bytes(size: int, rows: int, width: int, exchanges: str) -> float:
    """By a worker, for one sum."""
    own = rows * width * 4
    return (size - 1) * own if exchanges == "one" else 2 * (size - 1) / size * own


def work(rank: int, size: int, file: int, width: int, rows: list[int]) -> None:
    from octavo.ops import cuda_collectives

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
        torch.cuda.set_stream(torch.cuda.Stream())
    cuda_collectives.join_group(rank, size, file, [])

    def us(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        if has_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(_REPEATS):
            work()
        if has_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / _REPEATS * 1e6

    found = []
    for count in rows:
        x = torch.zeros(count, width, device="cuda" if has_gpu else "cpu")
        times = {
            name: us(lambda x=x, way=way: cuda_collectives._add_up(x, None, way))  # type: ignore[misc]
            for name, way in (("one", True), ("two", False))
        }
        if has_gpu:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(10):
                cuda_collectives.all_reduce(x)
            graph.capture_end()
            times["graph"] = us(graph.replay) / 10
        found.append({"rows": count} | times)
    if rank == 0:
        print(json.dumps(found), flush=True)
    sys.stdin.read()  # until all are done
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--file", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = [int(count) for count in args.rows.split(",")]
    if args.rank is not None:
        work(args.rank, args.size, args.file, args.width, rows)
    print("| rows | one exchange, us | two, us | in a graph, us | received GB/s, one | two |")
    print("|---|---|---|---|---|---|")
    for times in times_us(args.size, args.width, tuple(rows)):
        rates = [
            received_bytes(args.size, int(times["rows"]), args.width, way) / times[way] / 1e3 for way in ("one", "two")
        ]
        graph = f"{times['graph']:.1f}" if "graph" in times else ""
        print(
            f"| {times['rows']} | {times['one']:.1f} | {times['two']:.1f} | {graph} | {rates[0]:.1f} | {rates[1]:.1f} |"
        )


if __name__ == "__main__":
    main()
