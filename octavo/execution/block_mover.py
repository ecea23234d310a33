"""Moves whole KV blocks on a device, and between it and pinned host memory, in the order that `BlockMoves` asks for.

A block lies in as many pieces as there are layers, twice. To the host it goes through a stage on the device where it is
in one piece: gathering there takes a thousandth of the time of the way over the bus, so that the blocks can be
overwritten at once and the long way is gone beside the steps that follow. Blocks that come back are awaited by the
step that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.execution.device import Device, Event
from octavo.ops import DeviceOps, LayerKVCache
from octavo.ops.upload import upload
from octavo.plan import BlockMoves

_STAGE_BYTES = 64 << 20  # of the device, twice: a millisecond or two of the bus's time

Pairs = list[tuple[int, int]]


class _Stage:
    """Room for some blocks in one piece each: [blocks, 2 * layers, block_size, kv_heads, head_size]."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self.is_free: Event | None = None


class BlockMover:
    """`host_blocks` blocks of pinned memory stand behind `caches`, the layers' caches on the device."""

    def __init__(self, ops: DeviceOps, device: Device, caches: list[LayerKVCache], num_host_blocks: int) -> None:
        self._ops, self._device, self._caches = ops, device, caches
        # As bytes where elements are eight-bit floats, which torch indexes on few devices.
        self._pieces = [
            piece.view(torch.uint8) if piece.itemsize == 1 else piece
            for cache in caches
            for piece in (cache.key, cache.value)
        ]
        self._stages: list[_Stage] = []
        if num_host_blocks:
            piece = self._pieces[0]
            shape = (len(self._pieces), *piece.shape[1:])
            self._host = device.pinned([num_host_blocks, *shape], piece.dtype)
            num_staged = max(1, min(num_host_blocks, _STAGE_BYTES // self._host[0].nbytes))
            self._stages = [
                _Stage(torch.empty(num_staged, *shape, dtype=piece.dtype, device=piece.device)) for _ in range(2)
            ]

    def move(self, moves: BlockMoves) -> None:
        """Have the device move blocks before anything that it is given later."""
        for pairs in self._staged(moves.swap_out):
            self._swap_out(pairs)
        if moves.copy:
            self._device.compute.run(lambda: self._ops.copy_blocks(moves.copy, self._caches))
        for pairs in self._staged(moves.swap_in):
            self._swap_in(pairs)

    def _staged(self, pairs: Pairs) -> Iterator[Pairs]:
        """As many at a time as a stage holds."""
        if pairs:
            size = len(self._stages[0].blocks)
            yield from (pairs[at : at + size] for at in range(0, len(pairs), size))

    def _next_stage(self) -> _Stage:
        stage = self._stages.pop(0)
        self._stages.append(stage)
        return stage

    def _swap_out(self, pairs: Pairs) -> None:
        compute, copies, stage = self._device.compute, self._device.copies, self._next_stage()
        sources = upload(torch.tensor([source for source, _ in pairs]), self._device.torch_device)
        staged = stage.blocks[: len(pairs)]

        def gather() -> None:
            for i, piece in enumerate(self._pieces):
                staged[:, i] = piece[sources]

        def download() -> None:
            for i, (_, destination) in enumerate(pairs):
                self._host[destination].copy_(staged[i], non_blocking=True)

        if stage.is_free is not None:
            compute.wait(stage.is_free)
        compute.run(gather)
        copies.wait(compute.record())
        copies.run(download)
        stage.is_free = copies.record()

    def _swap_in(self, pairs: Pairs) -> None:
        compute, copies, stage = self._device.compute, self._device.copies, self._next_stage()
        destinations = upload(torch.tensor([destination for _, destination in pairs]), self._device.torch_device)
        staged = stage.blocks[: len(pairs)]

        def fill() -> None:
            for i, (source, _) in enumerate(pairs):
                staged[i].copy_(self._host[source], non_blocking=True)

        def scatter() -> None:
            for i, piece in enumerate(self._pieces):
                piece[destinations] = staged[:, i]

        if stage.is_free is not None:
            copies.wait(stage.is_free)
        copies.run(fill)
        compute.wait(copies.record())
        compute.run(scatter)
        stage.is_free = compute.record()
