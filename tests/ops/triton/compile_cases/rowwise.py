"""Kernels that do one thing to each row, at the shapes of Llama-3.1-8B and of the default model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.ops import ACTIVATIONS, PARAMETRIC_ACTIVATIONS, POOLINGS
from octavo.ops.triton.logits import add_last_tokens, apply_masks, penalize
from octavo.ops.triton.norm_kernels import layer_norm, rms_norm
from octavo.ops.triton.pool_rows import pool
from octavo.ops.triton.quantize import quantize_rows
from octavo.ops.triton.rows import activation, add, sum_in_tree, take_rows
from octavo.ops.triton.sampling import argmax, sample
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


def centered(width: int, activation_dtype: torch.dtype | None = None) -> None:
    layer_norm(empty(64, width), empty(width), empty(width), 1e-5, Consumer(activation_dtype))


def activate() -> None:
    for kind in ACTIVATIONS:
        activation(empty(64, 14336), kind)
    for kind, count in PARAMETRIC_ACTIVATIONS.items():
        activation(empty(64, 14336), kind, None, (1.0,) * count)


def norm_of_heads(heads: int, all_heads: int, head_size: int) -> None:
    rms_norm(empty(64, all_heads, head_size)[:, :heads], empty(head_size), 1e-6)
    layer_norm(empty(64, all_heads, head_size)[:, :heads], empty(heads, head_size), None, 1e-6)


def draw(vocab: int) -> None:
    rows = 64
    settings = [empty(rows, dtype=dtype) for dtype in (F32, torch.int64, F32, F32, torch.float64)]
    sample(empty(rows, vocab, dtype=F32), *settings)


def pool_rows() -> None:
    places = empty(64, dtype=torch.int64)
    for kind in POOLINGS:
        pool(empty(2048, 1024), places, places, kind, "float32")


def add_up(count: int) -> None:
    for bias in (None, empty(8192, dtype=F32)):
        sum_in_tree(empty(count, 64, 8192, dtype=F32), bias, empty(64, 8192, dtype=F32))


def change_logits() -> None:
    logits, settings, entries = empty(64, 128256, dtype=F32), empty(64, dtype=F32), empty(900, dtype=torch.int32)
    add_last_tokens(entries, entries, entries, empty(8, 2, dtype=torch.int32), empty(64, dtype=torch.int32))
    penalize(logits, entries, entries, entries, settings, settings, settings)
    apply_masks(logits, empty(8, 4008, dtype=torch.int32), empty(8, dtype=torch.int32))


CASES = {
    "logits": Case(change_logits, min_warps=32),
    "norm": Case(lambda: norm(4096), min_warps=32),
    "norm_576": Case(lambda: norm(576), min_warps=32),
    "norm_long": Case(lambda: norm(16384), min_warps=16),
    "norm_longer": Case(lambda: norm(32768), min_warps=16),
    "norm_heads": Case(lambda: norm_of_heads(32, 40, 128), min_warps=32),
    "norm_int8": Case(lambda: norm(4096, INT8), min_warps=32),
    "norm_fp8": Case(lambda: norm(4096, FP8), min_warps=32, capabilities=(90,)),
    "pool": Case(pool_rows, min_warps=32),
    "quantize_int8": Case(lambda: quantize_rows(empty(64, 4096), INT8), min_warps=32),
    "quantize_fp8": Case(lambda: quantize_rows(empty(64, 4096), FP8), min_warps=32, capabilities=(90,)),
    "layer_norm": Case(lambda: centered(4096), min_warps=32),
    "layer_norm_long": Case(lambda: centered(16384), min_warps=16),
    "layer_norm_longer": Case(lambda: centered(32768), min_warps=16),
    "layer_norm_int8": Case(lambda: centered(4096, INT8), min_warps=32),
    "activation": Case(activate, min_warps=32),
    "add": Case(lambda: add(empty(64, 4096), empty(64, 4096, dtype=F32), 0.5), min_warps=32),
    "argmax": Case(lambda: argmax(empty(64, 128256, dtype=F32)), min_warps=16),
    "sample_128256": Case(lambda: draw(128256), min_warps=16),
    "sample_262144": Case(lambda: draw(262144), min_warps=16),
    "sum_of_2": Case(lambda: add_up(2), min_warps=32),
    "sum_of_8": Case(lambda: add_up(8), min_warps=32),
    "take_rows": Case(lambda: take_rows(empty(256, 4096), empty(64, dtype=torch.int64)), min_warps=32),
}
