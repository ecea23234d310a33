"""Integer matrices for the kernel tests: drawn at random, packed by plain indexing as docs/kernels.md describes the
layout (an oracle that shares nothing with the native packer), and as the reference backend sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import _cpu
from tests.ops.tensors import cpu, torch_ref

PANEL, BLOCK = 32, 64
# (bits, group, minima)
FORMATS = [(4, 32, False), (4, 32, True), (8, 32, False), (8, 32, True), (8, 16, False), (8, 16, True)]
Format = tuple[int, int, bool]


@dataclass(frozen=True)
class IntMatrix:
    """Codes [N, K] less their zero point, scales [N, K / group] f16, minima [N, K / 32] bf16 or None."""

    bits: int
    group: int
    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    factor: float

    def products(self) -> Tensor:
        scales = self.scales.double().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return self.codes.double() * scales * self.factor

    def scaled_minima(self) -> Tensor | None:
        return None if self.minima is None else self.minima.double() * self.factor


def random_matrix(seed: int, n: int, k: int, form: Format, factor: float = 1.0) -> IntMatrix:
    bits, group, minima = form
    generator = torch.Generator().manual_seed(seed)
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (n, k), generator=generator)
    scales = (torch.randn(n, -(-k // group), generator=generator) / high).half()
    added = torch.randn(n, -(-k // 32), generator=generator).bfloat16() if minima else None
    return IntMatrix(bits, group, codes, scales, added, factor)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _pack_panels(m: IntMatrix) -> Tensor:
    """-> bytes [panels, bytes of a panel]."""
    n, k = m.codes.shape
    panels, blocks = -(-n // PANEL), -(-k // BLOCK)
    codes = torch.zeros(panels * PANEL, blocks * BLOCK, dtype=torch.int64)
    codes[:n, :k] = m.codes
    codes += 8 if m.bits == 4 else 128
    scales = torch.zeros(panels * PANEL, blocks * BLOCK // m.group, dtype=torch.float16)
    scales[:n, : m.scales.shape[1]] = m.scales
    # [panel, output, block, step, 4] -> [panel, block, step, output, 4]
    steps = codes.view(panels, PANEL, blocks, BLOCK // 4, 4).permute(0, 2, 3, 1, 4)
    if m.bits == 4:
        steps = steps[:, :, 0::2] | steps[:, :, 1::2] << 4
    parts = [steps.to(torch.uint8).reshape(panels, blocks, -1)]
    groups = scales.view(panels, PANEL, blocks, -1).permute(0, 2, 3, 1)
    parts.append(_bytes(groups).reshape(panels, blocks, -1))
    if m.minima is not None:
        minima = torch.zeros(panels * PANEL, blocks * 2, dtype=torch.bfloat16)
        minima[:n, : m.minima.shape[1]] = m.minima
        parts.append(_bytes(minima.view(panels, PANEL, blocks, 2).permute(0, 2, 1, 3)).reshape(panels, blocks, -1))
    return torch.cat(parts, dim=2).reshape(panels, -1)


def pack(m: IntMatrix, bias: Tensor | None = None, up: IntMatrix | None = None) -> cpu.PackedWeight:
    """The native weight of a matrix, or of gate and `up`."""
    panels = _pack_panels(m)
    n, k = m.codes.shape
    if up is not None:
        panels = torch.stack([panels, _pack_panels(up)], dim=1)
        n *= 2
    form = _cpu.WEIGHT_INT4 if m.bits == 4 else _cpu.WEIGHT_INT8
    return cpu.packed_weight(
        panels.flatten(), (n, k), form, bias, up is not None, m.group, m.minima is not None, m.factor
    )


def reference(m: IntMatrix, bias: Tensor | None = None, up: IntMatrix | None = None) -> torch_ref.DenseWeight:
    matrices = [m] if up is None else [m, up]
    minima = None if m.minima is None else torch.cat([x.scaled_minima() for x in matrices])
    weight = torch.cat([x.products() for x in matrices])
    return torch_ref.DenseWeight(weight, bias, is_quantized=True, minima=minima, gated=up is not None)
