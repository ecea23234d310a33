"""GPTQ's tensors (Frantar et al. 2022) as AutoGPTQ and its successors write them, as codes, scales and minima."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.quantization.codes import Codes, grouped


def unpack(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, zeros_less_one: bool = True
) -> Codes:
    """qweight int32 [K * bits / 32, N], qzeros int32 [groups, N * bits / 32], scales [groups, N], g_idx int32 [K].

    A word of qweight holds consecutive elements of k, one of qzeros consecutive outputs, lowest bits first. Files of
    `checkpoint_format` "gptq" hold zero points less one, those of "gptq_v2" hold them as they are. Raises `ConfigError`
    for matrices whose groups are not runs of k (`desc_act`), and for other bits than 4 and 8.
    """
    if bits not in (4, 8):
        raise ConfigError(f"GPTQ with {bits} bits is not built; 4 and 8 are.")
    codes = unpack_words(qweight.T, bits)
    zeros = unpack_words(qzeros, bits).T.short() + (1 if zeros_less_one else 0)
    k, num_groups = codes.shape[1], scales.shape[0]
    if g_idx is not None and num_groups > 1:
        runs = torch.arange(k, device=g_idx.device) // (k // num_groups)
        if not torch.equal(g_idx.long(), runs):
            raise ConfigError("GPTQ matrices quantized in the order of activations (desc_act) are not built.")
    return grouped(bits, codes, scales.T, zeros[: scales.shape[1]])


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, W * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)
