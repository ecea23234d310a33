"""A model of how a device gets through the programs of a launch: which resources each takes, and when all are done.

Products choose their tiles by it, and `benchmarks/gpu_limits.py` derives predictions from it. No torch, no device: it
is arithmetic. `Machine` lists what is assumed of a device; `scripts/gpu-check` measures the first two, and a
prediction that fails says which of the others is wrong.

Programs run side by side on multiprocessors. One that runs alone is as fast as the slowest of: its tensor cores, what
its multiprocessor reads from the L2 cache, and its loads in flight over their latency (Little 1961). All that run share
the memory's and the cache's bandwidth. A program that ends makes room for the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    multiprocessors: int
    copy_gbs: float  # bytes that a copy reads and writes in a second
    tflops: float  # of a large bfloat16 product
    cache_gbs: float  # from L2 to all multiprocessors
    port_gbs: float  # from L2 to one: two thirds of the 64 bytes a cycle that its port has
    latency_s: float  # of a load from memory
    between_s: float  # from the end of a kernel of a graph to the first instruction of the next
    shared_bytes: int  # of a multiprocessor
    is_hopper: bool
    link_gbs: float  # that it receives from others of its host by NVLink

    @property
    def flops(self) -> float:
        """Of one multiprocessor, a second."""
        return self.tflops * 1e12 / self.multiprocessors


# Rates as such devices have measured. The cache's: Chips and Cheese, "Nvidia's H100: Funny L2, and Tons of Bandwidth"
# (2023), some 5.5 TB/s on an H100 with fewer multiprocessors, and less on an A100. Links: four fifths of what NVIDIA's
# data sheets have for one direction.
MACHINES = {
    "h100": Machine(132, 3000, 790, 6000, 75, 0.9e-6, 1.0e-6, 227 << 10, True, 370),
    "h200": Machine(132, 4300, 790, 6000, 75, 0.9e-6, 1.0e-6, 227 << 10, True, 370),
    "a100": Machine(108, 1700, 270, 4000, 60, 0.8e-6, 1.2e-6, 163 << 10, False, 250),
}


def machine_like(capability: tuple[int, int], multiprocessors: int) -> Machine:
    """What is assumed of a device that is chosen for, not predicted: ratios of its rates decide."""
    known = MACHINES["h100" if capability[0] in (9, 10) else "a100"]
    share = multiprocessors / known.multiprocessors
    return replace(known, multiprocessors=multiprocessors, tflops=known.tflops * share)


# What an exchange of rows between devices takes to begin, and bytes that an H100's link carries meanwhile.
EXCHANGE_S = 12e-6
_SECOND_EXCHANGE_BYTES = 4 << 20


def sum_exchanges(num_bytes: int, size: int) -> tuple[int, int]:
    """How `num_bytes` of each of `size` devices are added up: the number of exchanges, and bytes that each receives.

    One exchange brings the rows of all; two, of parts of the rows and of their sums, are less to carry.
    """
    one, two = (size - 1) * num_bytes, 2 * (size - 1) * num_bytes // size
    return (1, one) if one - two <= _SECOND_EXCHANGE_BYTES else (2, two)


@dataclass(frozen=True, slots=True)
class Item:
    """What a program does from when it gets a piece of work until it is free for the next: it waits, then streams."""

    memory_bytes: float = 0.0  # read from memory
    cache_bytes: float = 0.0  # read through the cache, those of memory included
    flops: float = 0.0
    in_flight: float = 64e3  # bytes that it has asked for at a time
    alone_s: float = 0.0  # that overlaps nothing of its own: filling its pipeline, finding its work, writing


def duration_s(machine: Machine, dealt: Iterable[tuple[Item, int]], slots: int) -> float:
    """When all are done, if `slots` programs run at a time and fetch work in this order, some alike at a time."""
    queue: list[list[Any]] = [[item, count] for item, count in dealt if count]
    running: list[_Running] = []
    now, free = 0.0, slots
    while queue or running:
        while free and queue:
            item, count = queue[0]
            taken = min(free, count)
            running.append(_Running(item, taken, item.alone_s, 1.0))
            free -= taken
            queue[0][1] -= taken
            if not queue[0][1]:
                queue.pop(0)
        # Programs on one multiprocessor: they are handed out one to each first.
        beside = -(-sum(each.count for each in running) // machine.multiprocessors)
        working = [each for each in running if each.waits_s <= 0]
        paces = [_stream_s(machine, each.item, beside) for each in working]
        memory = sum(each.count * each.item.memory_bytes / pace for each, pace in zip(working, paces, strict=True))
        cached = sum(each.count * each.item.cache_bytes / pace for each, pace in zip(working, paces, strict=True))
        slower = max(1.0, memory / (machine.copy_gbs * 1e9), cached / (machine.cache_gbs * 1e9))
        waits = [each.waits_s for each in running if each.waits_s > 0]
        passed = min([*waits, *(each.left * pace * slower for each, pace in zip(working, paces, strict=True))])
        now += passed
        for each, pace in zip(working, paces, strict=True):
            each.left -= passed / (pace * slower)
        for each in running:
            each.waits_s -= passed
            free += each.count if each.left <= 1e-9 else 0
        running = [each for each in running if each.left > 1e-9]
    return now


@dataclass(slots=True)
class _Running:
    """Programs that have begun the same at the same time."""

    item: Item
    count: int
    waits_s: float  # before it streams
    left: float  # of that, of 1


def _stream_s(machine: Machine, item: Item, beside: int) -> float:
    """Seconds of an item, if only what is on its multiprocessor were in its way."""
    return max(
        beside * item.flops / machine.flops,
        beside * item.cache_bytes / (machine.port_gbs * 1e9),
        item.cache_bytes / (item.in_flight / machine.latency_s),
        1e-9,
    )


# Kernels are chosen by the class of a number of rows: the next of these, or the last. So what any step launches is what
# one step of each class launches, and all of it is there when the start has run those.
ROW_CLASSES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def row_class(num_rows: int) -> int:
    return next((size for size in ROW_CLASSES if num_rows <= size), ROW_CLASSES[-1])


# --- Products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut up: `block_n` channels by `block_t` tokens a program, `block_k` bytes of k at a time."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self) -> int:
        return (self.block_n + self.block_t) * self.block_k * self.num_stages


_TURNS = 4  # of programs, that are followed one by one


def product_s(machine: Machine, num_rows: int, num_out: int, row_bytes: int, tile: Tile, channels: int) -> float:
    """A product of `num_rows` tokens with a matrix of `num_out` rows of `row_bytes`, by programs that compute
    `channels` of a tile."""
    tiles_t = -(-num_rows // tile.block_t)
    tokens = num_rows / tiles_t
    row_elements = row_bytes / 2
    item = Item(
        memory_bytes=channels * row_bytes / tiles_t,
        cache_bytes=(channels + tokens) * row_bytes,
        flops=2 * tile.block_n * tile.block_t * row_elements,
        in_flight=(tile.num_stages - 1) * tile.block_k * (channels + tokens),
        alone_s=2 * machine.latency_s,  # the first loads, and the last stores
    )
    programs = -(-num_out // channels) * tiles_t
    resident = max(1, machine.shared_bytes // (tile.shared_bytes() + 1024))
    resident = min(resident, 16 // tile.num_warps)
    slots = machine.multiprocessors * resident
    alike = max(0, programs // slots - _TURNS)  # turns that are all the same, once the first are over
    found = duration_s(machine, [(item, programs - alike * slots)], slots)
    if alike:
        turns = [duration_s(machine, [(item, count * slots)], slots) for count in (_TURNS - 1, _TURNS)]
        found += alike * (turns[1] - turns[0])
    return found


def choose(
    machine: Machine, num_rows: int, num_out: int, row_bytes: int, unit: int, tiles: tuple[Tile, ...]
) -> tuple[Tile, int]:
    """The first of `tiles` that is about as fast as the fastest, and how many channels of it a program computes: as
    many as give each multiprocessor one program, or all."""
    best: list[tuple[float, Tile, int]] = []
    for tile in tiles:
        programs = max(1, machine.multiprocessors // -(-num_rows // tile.block_t))
        dealt = unit * -(-num_out // (unit * programs))
        for channels in (min(tile.block_n, dealt), tile.block_n):
            best.append((product_s(machine, num_rows, num_out, row_bytes, tile, channels), tile, channels))
    fastest = min(seconds for seconds, _, _ in best)
    _, tile, channels = next(each for each in best if each[0] <= 1.03 * fastest)
    return tile, channels


SPLIT_OVERHEAD = 512  # keys that a program of attention could look at while partial sums are written and merged
