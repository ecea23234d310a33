"""Layers with a state, at the shapes of Mamba 2 2.7B, Mamba 2.8B, Qwen3-Next and RecurrentGemma 2B."""

from __future__ import annotations

import torch

from octavo.ops.triton.recurrent_kernels import causal_conv, gated_delta, gated_recurrence, multiply, selective_scan
from tests.ops.triton.compiling import Case

TOKENS, SEQUENCES = 64, 8


def rows(*shape: int) -> torch.Tensor:
    return torch.empty(TOKENS, *shape, dtype=torch.bfloat16)


def sequences(num_floats: int) -> tuple[torch.Tensor, ...]:
    bounds, lengths = (torch.zeros(n, dtype=torch.int32) for n in (SEQUENCES + 1, SEQUENCES))
    return torch.empty(2, num_floats), torch.zeros(TOKENS, dtype=torch.int64), bounds, lengths


def convolve() -> None:
    causal_conv(rows(5376), torch.empty(4, 5376), torch.empty(5376), "silu", *sequences(3 * 5376))


def scan(channels: int, heads: int, size: int, *rates: int) -> None:
    selective_scan(
        rows(channels), rows(heads), rows(1, size), rows(1, size), torch.empty(*rates), torch.empty(channels),
        torch.empty(heads), (0.0, 1.0), *sequences(channels * size),
    )  # fmt: skip


def delta(num_decays: int = 32, lowest: float = 0.0) -> None:
    gated_delta(
        rows(16, 128), rows(16, 128), rows(32, 128), rows(num_decays), rows(32), torch.empty(32),
        torch.empty(num_decays), 1.0, *sequences(32 * 128 * 128), lowest,
    )  # fmt: skip


def recur() -> None:
    constants = (torch.empty(2560) for _ in range(3))
    gated_recurrence(rows(2560), rows(2560), rows(2560), *constants, *sequences(2560))


CASES = {
    "multiply": Case(lambda: multiply(rows(5120), rows(5120), "silu")),
    "conv": Case(convolve),
    "scan_mamba_2": Case(lambda: scan(5120, 80, 128, 5120)),
    "scan_mamba_1": Case(lambda: scan(5120, 5120, 16, 16, 5120)),
    "multiply_by_head": Case(lambda: multiply(rows(5120), rows(40), "softplus")),
    "gated_delta": Case(delta),
    "gated_delta_by_element": Case(lambda: delta(32 * 128, -5.0)),
    "gated_recurrence": Case(recur),
}
