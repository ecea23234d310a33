"""Facts about the device by which grids and tiles are chosen, and the launch of kernels over pieces of rows.

Every launch passes `enable_fp_fusion=False`: sums and products are rounded as written, and fused only by `tl.fma`.
Otherwise the compiler decides, and may fuse at different places in variants of a kernel that depend on the batch (a sum
in one piece or in chunks, whole tiles or masked tiles). Triton's default also changes with 3.10."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch
import triton

_INTERPRETED_MULTIPROCESSORS = 4  # a small number, so that in tests a program takes several pieces of work


class _Outlines(threading.local):
    """Thread-local state: with `on_launch` set, this thread launches nothing (see `octavo.ops.triton.outline`)."""

    on_launch: Any = None


outlines = _Outlines()


def device() -> torch.device:
    """Return the device of kernels: the current CUDA device; "cpu" in the interpreter; "meta" in outlines."""
    return torch.device("meta") if outlines.on_launch is not None else _device()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a CUDA device; a small number in the interpreter."""
    return _num_multiprocessors(_device() if device.type == "meta" else device)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, such as (9, 0), which is also the interpreter's (Hopper)."""
    return _capability(_device() if device.type == "meta" else device)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def stream(device: torch.device) -> int:
    """Return the stream that launches go to; outlines have a number of their own."""
    if device.type == "meta":
        return -1
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def by_pieces(kernel: Any, rows: int, width: int, largest: int, *args: Any, **constants: Any) -> None:
    """Launch a `kernel` whose program (n, c) computes piece c of row n: BLOCK of the row's WIDTH elements, at most
    `largest`."""
    if rows and width:
        block = min(triton.next_power_of_2(width), largest)
        kernel[(rows, triton.cdiv(width, block))](
            *args, WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False, **constants
        )
