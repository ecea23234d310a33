"""Kernels that do one thing to each row, at the shapes of Llama-3.1-8B and of the default model."""

from __future__ import annotations

import torch

from octavo.ops.triton.rows import take_rows
from tests.ops.triton.compiling import Case

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


CASES = {"take_rows": Case(lambda: take_rows(empty(256, 4096), empty(64, dtype=torch.int64)), min_warps=32)}
