"""Tensors of GPTQ and AWQ made by hand, and what they mean."""

from __future__ import annotations

import numpy as np

from octavo.quantization import StoredWeight

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_nibbles(values: np.ndarray, order: list[int]) -> np.ndarray:
    """[R, C] values of four bits -> int32 [R, C / 8], element order[i] of eight in nibble i."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), np.int64)
    for i, element in enumerate(order):
        words += values[:, element::8] * 16**i
    return words.astype(np.uint32).view(np.int32)


def grouped_matrix(
    seed: int, groups: int, bits: int = 4, k: int = 128, n: int = 24
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes [K, N], zeros [groups, N] from 1, scales [groups, N]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (k, n))
    zeros = rng.integers(1, 1 << bits, (groups, n))
    return codes, zeros, rng.random((groups, n)).astype(np.float16)


def expected_of(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [N, K]."""
    repeats = len(codes) // len(zeros)
    return (scales.astype(np.float64).repeat(repeats, 0) * (codes - zeros.repeat(repeats, 0))).T


def awq_matrix(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> StoredWeight:
    qweight, qzeros = pack_nibbles(codes, _AWQ_ORDER), pack_nibbles(zeros, _AWQ_ORDER)
    return StoredWeight("AWQ", {"qweight": qweight, "qzeros": qzeros, "scales": scales}, codes.T.shape)


def gptq_matrix(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, *, bits: int = 4, less_one: bool = True,
    indices: bool = True,
) -> StoredWeight:  # fmt: skip
    stored_zeros = zeros - int(less_one)
    if bits == 4:
        qweight = np.ascontiguousarray(pack_nibbles(codes.T, list(range(8))).T)
        qzeros = pack_nibbles(stored_zeros, list(range(8)))
    else:
        qweight = np.ascontiguousarray(np.ascontiguousarray(codes.T.astype(np.uint8)).view(np.int32).T)
        qzeros = stored_zeros.astype(np.uint8).view(np.int32)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    if indices:
        tensors["g_idx"] = (np.arange(len(codes)) // (len(codes) // len(zeros))).astype(np.int32)
    return StoredWeight("GPTQ" if less_one else "GPTQ_V2", tensors, codes.T.shape)
