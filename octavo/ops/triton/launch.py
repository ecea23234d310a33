"""What kernels are launched with: facts about the device that grids and tiles are chosen by."""

from __future__ import annotations

from functools import cache

import torch

_INTERPRETED_MULTIPROCESSORS = 4  # a small machine, so that tests see programs take several pieces of work each


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device, or a few for the interpreter's."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability, as (9, 0). The interpreter stands for a Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
