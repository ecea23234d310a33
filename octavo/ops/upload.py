"""Small lists of the host's on their way to a device that must not be waited for."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.torch_arrays import to_torch


def upload(x: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """`x` on `device`, in the order of the current stream. Out of pageable memory torch would copy it only once the
    device has done all that it was given before; pinned memory is kept until the stream has read it."""
    tensor = x if isinstance(x, Tensor) else to_torch(x)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
