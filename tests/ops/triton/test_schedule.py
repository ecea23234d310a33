"""The model of a device: arithmetic that can be done by hand, and what the kernels take from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_limits import DecodeAttention, Item, attention_s, duration_s, splits_of, wants_split
from octavo.ops.triton import attention_plan, launch, schedule
from octavo.ops.triton.schedule import MACHINES, Machine, Tile
from tests.ops.triton.conftest import DEVICE

# Two multiprocessors that read 10 GB/s each through their ports, and 16 from memory together.
SMALL = Machine(
    2, copy_gbs=16, tflops=2e-3, cache_gbs=100, port_gbs=10, latency_s=1e-6, between_s=0, shared_bytes=1 << 17,
    is_hopper=True, link_gbs=1,
)  # fmt: skip
READS = Item(memory_bytes=8e3, cache_bytes=8e3, in_flight=1e6)


@pytest.mark.parametrize(
    ("dealt", "slots", "expected_us"),
    [
        ([(READS, 1)], 2, 0.8),  # its port is the limit
        ([(READS, 2)], 2, 1.0),  # memory is
        ([(READS, 3)], 2, 1.8),  # the third runs alone
        ([(replace(READS, in_flight=4e3), 1)], 2, 2.0),  # 4 KB each microsecond
        ([(replace(READS, alone_s=3e-6), 2)], 2, 4.0),
        ([(Item(flops=2e3), 1)], 2, 2.0),
        ([(Item(flops=2e3), 4)], 4, 4.0),  # two share their tensor cores
        ([(Item(flops=8e3), 1), (Item(flops=2e3), 4)], 2, 8.0),
        ([(Item(flops=2e3), 4), (Item(flops=8e3), 1)], 2, 12.0),  # the longest last
    ],
)
def test_durations(dealt: list[tuple[Item, int]], slots: int, expected_us: float) -> None:
    assert duration_s(SMALL, dealt, slots) * 1e6 == pytest.approx(expected_us, rel=1e-3)


@pytest.mark.parametrize("tile", [Tile(64, 16, 256, 4, 5), Tile(64, 64, 128, 4, 4), Tile(128, 256, 128, 8, 4)])
@pytest.mark.parametrize("num_rows", [1, 64, 600])
@pytest.mark.parametrize("num_out", [96, 64 * 264, 64 * 264 * 6 + 640])
def test_a_product_takes_what_its_programs_take_one_by_one(tile: Tile, num_rows: int, num_out: int) -> None:
    machine, row_bytes, channels = MACHINES["h100"], 8192, 64
    tiles_t = -(-num_rows // tile.block_t)
    read = channels + num_rows / tiles_t
    item = Item(
        memory_bytes=channels * row_bytes / tiles_t, cache_bytes=read * row_bytes,
        flops=tile.block_n * tile.block_t * row_bytes, in_flight=(tile.num_stages - 1) * tile.block_k * read,
        alone_s=2 * machine.latency_s,
    )  # fmt: skip
    resident = min(max(1, machine.shared_bytes // (tile.shared_bytes() + 1024)), 16 // tile.num_warps)
    programs = -(-num_out // channels) * tiles_t
    followed = duration_s(machine, [(item, programs)], machine.multiprocessors * resident)
    assert schedule.product_s(machine, num_rows, num_out, row_bytes, tile, channels) == pytest.approx(
        followed, rel=1e-9
    )


def test_splits_are_those_of_the_kernel() -> None:
    assert splits_of(600) == [256, 256, 88]
    assert splits_of(4096 + 700) == [256] * 16 + [512, 188]
    assert max(splits_of(1 << 20)) == 4096


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("num_keys", [577, 4096, 32768])
def test_splitting_by_the_rule_is_about_as_good_as_the_better_of_all_and_none(machine: Machine, num_keys: int) -> None:
    shape = DecodeAttention(8, 128)
    lost = []
    for batch in (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 128, 256):
        by_rule, everything, nothing = (attention_s(machine, shape, [num_keys] * batch, s) for s in (None, True, False))
        lost.append(by_rule / min(everything, nothing))
    assert max(lost) < 1.36
    assert sum(lost) / len(lost) < 1.06


@pytest.mark.parametrize("lengths", [[600] * 3, [2000] + [40] * 6, [700], [256] * 5, [5000, 300, 300]])
def test_the_kernel_splits_by_the_rule(lengths: list[int]) -> None:
    num_programs, num_kv_heads, block_n = 8, 2, 16
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = attention_plan.plan_of(starts, lens, 1 << 20, num_programs, num_kv_heads, 16, block_n, 0).tolist()
    costs = [length // block_n + 1 for length in lengths]
    expected = [
        wants_split(
            cost, block_n, len(lengths) * num_kv_heads, sum(costs) * num_kv_heads, num_programs
        ) and length > attention_plan.SPLIT_KEYS
        for cost, length in zip(costs, lengths, strict=True)
    ]  # fmt: skip
    partials = plan[2 + 2 * len(lengths) :]
    assert [place >= 0 for place in partials] == expected
    splits = [len(splits_of(length)) if split else 0 for length, split in zip(lengths, expected, strict=True)]
    assert plan[0] == sum(splits) * num_kv_heads
    assert plan[1] == plan[0] + num_kv_heads * expected.count(False)


def test_unknown_devices_are_like_known_ones() -> None:
    machine = schedule.machine_like((9, 0), 66)
    assert (machine.multiprocessors, machine.flops) == (66, pytest.approx(MACHINES["h100"].flops))
    assert not schedule.machine_like((8, 9), 142).is_hopper
    assert launch.num_multiprocessors(torch.device("cpu")) == 4
