"""Sums of workers that share a model on CPUs: what one takes, and what a step of two workers takes beside one's.

    python benchmarks/collectives.py [--size 2] [--width 2048]
    python benchmarks/collectives.py --step MODEL [--size 2] [--batch 1,16] [--rounds 3]

The first prints microseconds of an `all_reduce` of some numbers of rows by `--size` processes of one thread each, the
least of many, and GB/s of all workers' reads and writes beside those of plain copies, which they make at the same time.
The second prints milliseconds of a decode step: of one worker with `--size` threads, and of as many workers with one
each, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

ROWS = (1, 16, 64, 512)
_REPEATS, _COPIED_BYTES = 200, 64 << 20


def measured(size: int, width: int) -> tuple[list[float], float]:
    """Seconds of a sum of each number of rows, and GB/s of the copies of all workers."""
    memory = os.memfd_create("exchange")
    command = [sys.executable, __file__, "--width", str(width), "--size", str(size), "--memory", str(memory)]
    workers = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, pass_fds=[memory], text=True)
        for rank in range(size)
    ]
    os.close(memory)
    lines = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a worker has failed")
    times, copies = json.loads(lines[0])
    return times, copies


def work(rank: int, size: int, memory: int, width: int) -> None:
    """Be one of the workers, on a processor of its own if there are enough."""
    from octavo.ops import cpu
    from octavo.ops.cpu_collectives import group_bytes

    cpus = sorted(os.sched_getaffinity(0))
    cpu.use_threads(1, [cpus[rank % len(cpus)]])
    num_bytes = group_bytes(size, size * max(ROWS) * width)
    os.ftruncate(memory, num_bytes)
    cpu.join_group(rank, size, memory, num_bytes, [])
    together = np.zeros((1, width), np.float32)

    def least(call: Callable[[], object], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            cpu.all_reduce(together)  # so that all begin at once
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    sums = []
    for rows in ROWS:
        x = np.zeros((rows, width), np.float32)
        sums.append(least(lambda x=x: cpu.all_reduce(x), _REPEATS))  # type: ignore[misc]
    source = np.ones(_COPIED_BYTES // 4, np.float32)
    copy = np.empty_like(source)
    copied = least(lambda: np.copyto(copy, source), 10)
    if rank == 0:
        print(json.dumps((sums, size * 2 * _COPIED_BYTES / copied / 1e9)))


def print_sums(size: int, width: int) -> None:
    times, copies = measured(size, width)
    print(f"{size} workers, rows of {width}; copies move {copies:.1f} GB/s")
    for rows, seconds in zip(ROWS, times, strict=True):
        # Each writes its rows, reads those of all, and writes the sum.
        moved = size * (2 + size) * rows * width * 4
        print(f"{rows:5} rows {seconds * 1e6:9.1f} us {moved / seconds / 1e9:8.1f} GB/s")


def print_steps(model: str, size: int, batches: list[int], rounds: int) -> None:
    from octavo import LLM, SamplingParams

    common = {"model": model, "max_model_len": 1024, "max_num_seqs": max(batches), "cpu_threads": size}
    common |= {"num_gpu_blocks_override": 64 * (1 + max(batches)), "disable_log_stats": True}

    def step_ms(llm: LLM, batch: int) -> float:
        """Of steps between the first token and the last."""
        prompts = [{"prompt_token_ids": [100 + i] * 32} for i in range(batch)]
        took = []
        for num_tokens in (2, 34):
            params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            took.append(time.perf_counter() - begin)
        return (took[1] - took[0]) / 32 * 1e3

    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(rounds):
        for workers in (1, size):
            with LLM(tensor_parallel_size=workers, **common) as llm:
                for batch in batches:
                    step_ms(llm, batch)
                    found.setdefault((workers, batch), []).append(min(step_ms(llm, batch) for _ in range(3)))
    for batch in batches:
        one, several = (statistics.median(found[workers, batch]) for workers in (1, size))
        print(f"{batch:4} at once: {one:8.2f} ms by one worker, {several:8.2f} by {size}: {several / one:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--step", metavar="MODEL", help="a file or folder that workers can share")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.size, args.memory, args.width)
    elif args.step is not None:
        print_steps(args.step, args.size, [int(batch) for batch in args.batch.split(",")], args.rounds)
    else:
        print_sums(args.size, args.width)


if __name__ == "__main__":
    main()
