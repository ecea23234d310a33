"""What all formats of few bits are once they are unpacked: codes, scales and minima as arrays of their own.

`octavo.quantization.unpack` makes them; backends without a packer of their own for a format pack from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.quantization.arrays import Array, cast, namespace, repeated


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [N, K], of which an element is scale * code + minimum, or without minima scale * (code - 2^(bits-1)).

    `codes` uint8 [N, K]; `scales` and `minima` float32 [N, ceil(K / group)], all exact. numpy's or torch's.
    """

    bits: int
    group: int
    codes: Array
    scales: Array
    minima: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def widened(self, bits: int, group: int, minima: bool) -> Codes:
        """The same matrix with at least as many bits, groups at most as long, and with minima if those are wanted."""
        assert bits >= self.bits and self.group % group == 0 and (minima or self.minima is None)
        codes, repeats = self.codes, self.group // group
        num_groups = -(-codes.shape[1] // group)
        scales = repeated(self.scales, repeats, num_groups)
        if self.minima is not None:
            return Codes(bits, group, codes, scales, repeated(self.minima, repeats, num_groups))
        if minima:
            return Codes(bits, group, codes, scales, scales * -float(1 << self.bits >> 1))
        return Codes(bits, group, codes + ((1 << bits >> 1) - (1 << self.bits >> 1)), scales)

    def dequantize(self) -> Array:
        """float32 [N, K]."""
        num_out, k = self.shape
        scales, minima, group = self.scales, self.minima, self.group
        if k % group:  # the last group is shorter
            scales = repeated(scales, group, k)
            minima = None if minima is None else repeated(minima, group, k)
            group = 1
        values = cast(self.codes, "float32").reshape(num_out, -1, group)
        if minima is None:
            values -= 1 << self.bits >> 1
        values *= scales[:, :, None]
        if minima is not None:
            values += minima[:, :, None]
        return values.reshape(num_out, k)


def grouped(bits: int, codes: Array, scales: Array, zeros: Array) -> Codes:
    """scale * (code - zero), [N, K] with scales and zeros [N, groups], as `Codes`: without minima if all zeros are in
    the middle. One group for all of a row becomes groups of 128."""
    k, num_groups = codes.shape[1], scales.shape[1]
    group = -(-k // num_groups)
    if num_groups == 1:
        group = 128
        scales, zeros = (repeated(x, -(-k // group), -(-k // group)) for x in (scales, zeros))
    scales = cast(scales, "float32")
    if bool(namespace(zeros).all(zeros == 1 << bits >> 1)):
        return Codes(bits, group, codes, scales)
    return Codes(bits, group, codes, scales, -scales * cast(zeros, "float32"))
