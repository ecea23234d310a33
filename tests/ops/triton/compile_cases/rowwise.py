"""Kernels that do one thing to each row, at the shapes of Llama-3.1-8B and of the default model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.ops.triton.activation import silu_and_mul
from octavo.ops.triton.norm import rms_norm
from octavo.ops.triton.quantize import quantize_rows
from octavo.ops.triton.rows import take_rows
from tests.ops.triton.compiling import Case

BF16, F32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Consumer:
    """A quantized matrix, as far as `rms_norm` asks."""

    activation_dtype: torch.dtype | None
    in_features: int = 0
    out_features: int = 0
    num_bytes: int = 0


def norm(width: int, activation_dtype: torch.dtype | None = None) -> None:
    rms_norm(empty(64, width), empty(width), 1e-5, Consumer(activation_dtype))


def norm_of_heads(heads: int, all_heads: int, head_size: int) -> None:
    rms_norm(empty(64, all_heads, head_size)[:, :heads], empty(head_size), 1e-6)


CASES = {
    "norm": Case(lambda: norm(4096), min_warps=32),
    "norm_576": Case(lambda: norm(576), min_warps=32),
    "norm_long": Case(lambda: norm(16384), min_warps=16),
    "norm_longer": Case(lambda: norm(32768), min_warps=16),
    "norm_heads": Case(lambda: norm_of_heads(32, 40, 128), min_warps=32),
    "norm_int8": Case(lambda: norm(4096, INT8), min_warps=32),
    "norm_fp8": Case(lambda: norm(4096, FP8), min_warps=32, capabilities=(90,)),
    "quantize_int8": Case(lambda: quantize_rows(empty(64, 4096), INT8), min_warps=32),
    "quantize_fp8": Case(lambda: quantize_rows(empty(64, 4096), FP8), min_warps=32, capabilities=(90,)),
    "silu_and_mul": Case(lambda: silu_and_mul(empty(64, 28672)), min_warps=32),
    "silu_and_mul_int8": Case(lambda: silu_and_mul(empty(64, 28672), INT8), min_warps=32),
    "silu_and_mul_fp8": Case(lambda: silu_and_mul(empty(64, 28672), FP8), min_warps=32, capabilities=(90,)),
    "take_rows": Case(lambda: take_rows(empty(256, 4096), empty(64, dtype=torch.int64)), min_warps=32),
}
