"""A model of the time that a device takes for a launch of equal programs, from the resources that each program takes.

Products choose their tiles by it, and `benchmarks/gpu_limits.py` derives predictions from it. It is pure arithmetic,
without torch or a device. `Machine` lists the assumptions about a device; `scripts/gpu-check` measures the first two,
and a prediction that fails shows which other assumption is wrong.

Programs run side by side on multiprocessors. A program that runs alone is limited by the slowest of: the tensor cores,
its multiprocessor's reads from the L2 cache, and its loads in flight divided by their latency (Little 1961). Running
programs share the bandwidth of memory and cache. Programs that end together make room for the next ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Machine:
    multiprocessors: int
    copy_gbs: float  # GB that a copy reads and writes in a second
    tflops: float  # rate of a large bfloat16 product
    cache_gbs: float  # GB a second from L2 to all multiprocessors
    port_gbs: float  # GB a second from L2 to one: two thirds of its port's 64 bytes a cycle
    latency_s: float  # of a load from memory
    between_s: float  # from the end of a kernel of a graph to the first instruction of the next
    shared_bytes: int  # of a multiprocessor
    is_hopper: bool
    link_gbs: float  # GB a second that it receives from others of its host by NVLink

    @property
    def flops(self) -> float:
        """Operations a second of one multiprocessor."""
        return self.tflops * 1e12 / self.multiprocessors


# Measured rates of such devices. Cache: Chips and Cheese, "Nvidia's H100: Funny L2, and Tons of Bandwidth" (2023), some
# 5.5 TB/s on an H100 with fewer multiprocessors, and less on an A100. Links: four fifths of one direction in NVIDIA's
# data sheets.
MACHINES = {
    "h100": Machine(132, 3000, 790, 6000, 75, 0.9e-6, 1.0e-6, 227 << 10, True, 370),
    "h200": Machine(132, 4300, 790, 6000, 75, 0.9e-6, 1.0e-6, 227 << 10, True, 370),
    "a100": Machine(108, 1700, 270, 4000, 60, 0.8e-6, 1.2e-6, 163 << 10, False, 250),
}


def machine_like(capability: tuple[int, int], multiprocessors: int) -> Machine:
    """Return assumptions about a device to choose tiles for: only the ratios of its rates matter, so they are those of
    a known device."""
    known = MACHINES["h100" if capability[0] in (9, 10) else "a100"]
    share = multiprocessors / known.multiprocessors
    return replace(known, multiprocessors=multiprocessors, tflops=known.tflops * share)


# Seconds that an exchange of rows between devices takes to begin, and bytes that an H100's link carries meanwhile.
EXCHANGE_S = 12e-6
_SECOND_EXCHANGE_BYTES = 4 << 20


def sum_exchanges(num_bytes: int, size: int) -> tuple[int, int]:
    """Return how rows of `num_bytes` of each of `size` devices are summed: the number of exchanges, and the bytes that
    each device receives. One exchange sends whole rows to all; two exchanges, of parts of the rows and then of their
    sums, move fewer bytes.
    """
    one, two = (size - 1) * num_bytes, 2 * (size - 1) * num_bytes // size
    return (1, one) if one - two <= _SECOND_EXCHANGE_BYTES else (2, two)


# Kernels are chosen by the class of a number of rows: the next of these numbers, or the last one. So the start compiles
# all kernels by running one step of each class.
ROW_CLASSES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def row_class(num_rows: int) -> int:
    return next((size for size in ROW_CLASSES if num_rows <= size), ROW_CLASSES[-1])


# --- Products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: `block_n` channels by `block_t` tokens a program, `block_k` bytes of k at a time."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self) -> int:
        return (self.block_n + self.block_t) * self.block_k * self.num_stages


def product_s(machine: Machine, num_rows: int, num_out: int, row_bytes: int, tile: Tile, channels: int) -> float:
    """Return the seconds of a product of `num_rows` tokens with a matrix of `num_out` rows of `row_bytes`, by programs
    that compute `channels` of a tile. Programs are alike, so all that run at a time end together."""
    tiles_t = -(-num_rows // tile.block_t)
    read = channels + num_rows / tiles_t  # rows of the matrix, and of the tokens, that a program reads
    resident = max(1, machine.shared_bytes // (tile.shared_bytes() + 1024))
    slots = machine.multiprocessors * min(resident, 16 // tile.num_warps)
    turns, rest = divmod(-(-num_out // channels) * tiles_t, slots)

    def turn_s(programs: int) -> float:
        beside = -(-programs // machine.multiprocessors)  # programs on one multiprocessor: each first gets one
        streams_s = max(
            beside * tile.block_n * tile.block_t * row_bytes / machine.flops,
            beside * read * row_bytes / (machine.port_gbs * 1e9),
            row_bytes * machine.latency_s / ((tile.num_stages - 1) * tile.block_k),
            programs * read * row_bytes / (machine.cache_gbs * 1e9),
            programs * channels * row_bytes / tiles_t / (machine.copy_gbs * 1e9),
        )
        return streams_s + 2 * machine.latency_s  # the first loads, and the last stores

    return turns * turn_s(slots) + (turn_s(rest) if rest else 0.0)


def choose(
    machine: Machine, num_rows: int, num_out: int, row_bytes: int, unit: int, tiles: tuple[Tile, ...]
) -> tuple[Tile, int]:
    """Return the first of `tiles` that is within 3% of the fastest, and the number of its channels that a program
    computes: all of them, or as many as give each multiprocessor one program."""
    best: list[tuple[float, Tile, int]] = []
    for tile in tiles:
        programs = max(1, machine.multiprocessors // -(-num_rows // tile.block_t))
        dealt = unit * -(-num_out // (unit * programs))
        for channels in (min(tile.block_n, dealt), tile.block_n):
            best.append((product_s(machine, num_rows, num_out, row_bytes, tile, channels), tile, channels))
    fastest = min(seconds for seconds, _, _ in best)
    _, tile, channels = next(each for each in best if each[0] <= 1.03 * fastest)
    return tile, channels


SPLIT_OVERHEAD = 512  # keys that attention could read in the time of writing and merging partial sums
