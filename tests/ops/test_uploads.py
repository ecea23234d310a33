"""Arrays that go to a device in pieces arrive whole, and few pieces are in pinned memory at a time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.ops import torch_arrays


class _Event:
    """One that the device reaches when it is waited for."""

    waiting: int = 0

    def record(self) -> None:
        _Event.waiting += 1

    def synchronize(self) -> None:
        _Event.waiting -= 1


@pytest.mark.parametrize("rows", [1, 5, 7, 64])
def test_a_large_array_arrives_in_pieces(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    values = np.random.default_rng(rows).standard_normal((rows, 24)).astype(ml_dtypes.bfloat16)
    most: list[int] = []
    allocate: Any = torch.empty

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        most.append(_Event.waiting)
        assert tensor.is_contiguous()
        return tensor.clone()

    monkeypatch.setattr(torch_arrays, "_PIECE_BYTES", 3 * 24 * 2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: allocate(shape, dtype=dtype))
    for array in (values, values.T):
        _Event.waiting = 0
        found = torch_arrays.upload(array, torch.device("cuda"))
        assert torch.equal(found.float(), torch.from_numpy(array.astype(np.float32)))
    assert max(most) <= 1, "beside the next piece one is still read"
    assert len(most) > 30 or rows < 64
