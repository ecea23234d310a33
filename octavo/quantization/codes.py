"""What all formats of few bits are once they are unpacked: codes, scales and minima as tensors of their own.

`gguf_codes`, `gptq` and `awq` unpack; backends without a packer of their own for a format pack from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [N, K], of which an element is scale * code + minimum, or without minima scale * (code - 2^(bits-1)).

    `codes` uint8 [N, K]; `scales` and `minima` float32 [N, ceil(K / group)], all exact.
    """

    bits: int
    group: int
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def widened(self, bits: int, group: int, minima: bool) -> Codes:
        """The same matrix with at least as many bits, groups at most as long, and with minima if those are wanted."""
        assert bits >= self.bits and self.group % group == 0 and (minima or self.minima is None)
        codes, repeats = self.codes, self.group // group
        num_groups = -(-codes.shape[1] // group)
        scales = self.scales.repeat_interleave(repeats, 1)[:, :num_groups]
        if self.minima is not None:
            return Codes(bits, group, codes, scales, self.minima.repeat_interleave(repeats, 1)[:, :num_groups])
        if minima:
            return Codes(bits, group, codes, scales, scales * -float(1 << self.bits >> 1))
        return Codes(bits, group, codes + ((1 << bits >> 1) - (1 << self.bits >> 1)), scales)

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        k = self.codes.shape[1]
        values = self.codes.float()
        if self.minima is None:
            values -= 1 << self.bits >> 1
        values *= self.scales.repeat_interleave(self.group, 1)[:, :k]
        if self.minima is not None:
            values += self.minima.repeat_interleave(self.group, 1)[:, :k]
        return values


def grouped(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> Codes:
    """scale * (code - zero), [N, K] with scales and zeros [N, groups], as `Codes`: without minima if all zeros are in
    the middle. One group for all of a row becomes groups of 128."""
    k, num_groups = codes.shape[1], scales.shape[1]
    group = -(-k // num_groups)
    if num_groups == 1:
        group = 128
        scales, zeros = (x.expand(-1, -(-k // group)) for x in (scales, zeros))
    if torch.all(zeros == 1 << bits >> 1):
        return Codes(bits, group, codes, scales.float())
    return Codes(bits, group, codes, scales.float(), -scales.float() * zeros.float())
