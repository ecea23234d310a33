"""Moves of blocks on a device that is short of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from octavo.execution.block_mover import BlockMover
from octavo.execution.cpu_device import CpuDevice
from octavo.ops import LayerKVCache, Ops, cpu_cache
from octavo.step_plan import BlockMoves

NUM_BLOCKS = 16


class ShortDevice(CpuDevice):
    """Has memory for `room` blocks on their way at a time, and for one only after `release_memory`."""

    memory_errors = (MemoryError,)

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.is_released = room, False

    def release_memory(self) -> None:
        self.is_released = True

    def take(self, num_blocks: int) -> None:
        if num_blocks > (self.room or self.is_released):
            raise MemoryError
        self.is_released = False


OUT = [BlockMoves(swap_out=[(i, i + 3) for i in range(7)], copy=[(8, 1), (9, 2), (10, 0)])]
IN = [BlockMoves(swap_in=[(i + 3, 15 - i) for i in range(7)])]


def moved(device: ShortDevice, has_short_start: bool = False, is_read: bool = False) -> list[list[int]]:
    """What two layers and the host hold after moves of all kinds. With a short start the first ones fail at first, and
    are made before the next ones, or before the host's blocks are read."""
    caches = [
        LayerKVCache(
            np.arange(NUM_BLOCKS * 8, dtype=np.uint8).reshape(NUM_BLOCKS, 8) + layer, np.zeros((NUM_BLOCKS, 4))
        )
        for layer in range(2)
    ]

    def gather(blocks: Any, caches: Any) -> Any:
        device.take(len(blocks))
        return cpu_cache.gather_blocks(blocks, caches)

    def scatter(staged: Any, blocks: Any, caches: Any) -> None:
        device.take(len(blocks))
        cpu_cache.scatter_blocks(staged, blocks, caches)

    def copy(pairs: Any, caches: Any) -> None:
        device.take(len(pairs))
        cpu_cache.copy_blocks(pairs, caches)

    ops = SimpleNamespace(gather_blocks=gather, scatter_blocks=scatter, copy_blocks=copy)
    mover = BlockMover(cast(Ops, ops), device, [caches], [NUM_BLOCKS])
    if has_short_start:
        with pytest.raises(MemoryError):
            mover.move(OUT)
        assert not mover.is_settled(0, [3], waits=True)
        device.room = NUM_BLOCKS
        if is_read:
            assert mover.read_host_blocks(0, [3, 4])[:, :8].ravel().tolist() == list(range(16))
            assert mover.is_settled(0, [3], waits=True)
    else:
        mover.move(OUT)
    mover.move(IN)
    return [array.tolist() for cache in caches for array in cache.arrays] + [mover.host_arrays[0].tolist()]


@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_what_there_is_no_memory_for_at_once_is_moved_in_parts(room: int) -> None:
    assert moved(ShortDevice(room)) == moved(ShortDevice(NUM_BLOCKS))


@pytest.mark.parametrize("is_read", [False, True])
def test_what_there_was_no_memory_for_comes_before_the_next_moves(is_read: bool) -> None:
    """Moves that have failed are made later, in their order: other steps count on them."""
    device = ShortDevice(0)
    device.release_memory = lambda: None  # type: ignore[method-assign]
    assert moved(device, has_short_start=True, is_read=is_read) == moved(ShortDevice(NUM_BLOCKS))


def test_a_device_that_has_none_at_all_fails() -> None:
    device = ShortDevice(0)
    device.release_memory = lambda: None  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        moved(device)


def test_consecutive_host_blocks_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some thousand small copies would take the host longer than the bus."""
    device, copied = CpuDevice(), list[int]()
    copy = device.copy
    monkeypatch.setattr(device, "copy", lambda source, target: (copied.append(len(target)), copy(source, target)))
    keys = np.arange(NUM_BLOCKS * 8, dtype=np.uint8).reshape(NUM_BLOCKS, 8)
    cache, before = LayerKVCache(keys, np.zeros((NUM_BLOCKS, 4))), keys.copy()
    mover = BlockMover(cast(Ops, cpu_cache), device, [[cache]], [NUM_BLOCKS])
    host_blocks = [3, 4, 5, 9, 10, 2, 2]
    mover.move([BlockMoves(swap_out=list(enumerate(host_blocks)))])
    assert copied == [7, 3, 2, 1, 1]  # the first one gathers them
    copied.clear()
    mover.move([BlockMoves(swap_in=[(host, 15 - i) for i, host in enumerate(host_blocks)])])
    assert copied == [3, 2, 1, 1]
    expected = [*before[:5], before[6], before[6]]  # what came to block 2 last
    assert (keys[[15 - i for i in range(7)]] == np.array(expected)).all()
