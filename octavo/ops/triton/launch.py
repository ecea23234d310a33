"""What kernels are launched with: facts about the device that grids and tiles are chosen by.

Every launch says `enable_fp_fusion=False`: sums and products are rounded as they are written, and fused where a kernel
has `tl.fma`. Otherwise the compiler decides, and variants of a kernel that batches choose between (a sum in one piece
or in chunks, whole tiles or masked ones) may be fused in different places; Triton's default also changes with 3.10."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
import triton

_INTERPRETED_MULTIPROCESSORS = 4  # a small machine, so that tests see programs take several pieces of work each


class _Outlines(threading.local):
    """Whether this thread launches nothing: see `octavo.ops.triton.outline`."""

    on_launch: Any = None


outlines = _Outlines()


def device() -> torch.device:
    """Where kernels run: the CUDA device that is current, or the interpreter's memory, or in outlines nowhere."""
    return torch.device("meta") if outlines.on_launch is not None else _device()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device, or a few for the interpreter's."""
    return _num_multiprocessors(_device() if device.type == "meta" else device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability, as (9, 0). The interpreter stands for a Hopper."""
    return _capability(_device() if device.type == "meta" else device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def stream(device: torch.device) -> int:
    """The stream that launches go to; outlines have their own."""
    if device.type == "meta":
        return -1
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def by_pieces(kernel: Any, rows: int, width: int, largest: int, *args: Any, **constants: Any) -> None:
    """Launch a `kernel` whose program (n, c) computes piece c of row n, which has BLOCK of a row's WIDTH elements: no
    more than `largest`."""
    if rows and width:
        block = min(triton.next_power_of_2(width), largest)
        kernel[(rows, triton.cdiv(width, block))](
            *args, WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False, **constants
        )
