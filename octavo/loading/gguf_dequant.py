"""GGUF's storage formats unpacked into torch tensors, bit for bit as ggml's own reference does in float32.

A tensor is unpacked 128 KB at a time, so that the float32 values between the packed bytes and the
target type stay in the processor's cache. `weights` calls `dequantize`; the block layouts are those of ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.loading.gguf import GGUFFile, TensorType
from octavo.loading.gguf_config import NamedTensor

# Elements unpacked at once: the most that torch's elementwise kernels do without starting threads (GRAIN_SIZE in
# TensorIterator.h). Threads win little here and lose much where a core is busy, since each of thousands of calls waits
# for the slower one: 135M elements on two cores take 0.3 s, idle or busy; at 2^18, 0.16 s idle and up to 4 s busy.
_CHUNK_ELEMENTS = 1 << 15

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def packed_rows(file: GGUFFile, tensor: NamedTensor) -> Tensor:
    """The tensor's bytes [rows, bytes of a row], uint8, in the order of the model. They alias the mapped file unless
    rows had to be moved."""
    info = tensor.info
    num_rows = info.shape[0] if len(info.shape) > 1 or tensor.rotary_heads else 1
    packed = torch.frombuffer(file.data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)
    packed = packed.view(num_rows, -1)
    return _to_half_rotary(packed, tensor.rotary_heads) if tensor.rotary_heads else packed


def dequantize(file: GGUFFile, tensor: NamedTensor, dtype: torch.dtype) -> Tensor:
    """The tensor's values in `dtype`, in its own shape. Unquantized tensors of that type alias the mapped file."""
    packed = packed_rows(file, tensor)
    if plain := PLAIN_TYPES.get(tensor.info.type.name):
        return packed.view(plain).to(dtype).view(tensor.info.shape)
    return dequantize_rows(tensor.info.type, packed, dtype).view(tensor.info.shape)


def dequantize_rows(tensor_type: TensorType, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of blocks, uint8 [N, bytes of a row], as values [N, K]."""
    unpack = _UNPACKERS[tensor_type.name]
    blocks = packed.reshape(-1, tensor_type.block_bytes)
    num_blocks, block_size = blocks.shape[0], tensor_type.block_size
    out = torch.empty(num_blocks, block_size, dtype=dtype)
    step = min(num_blocks, _CHUNK_ELEMENTS // block_size)
    values = out if dtype == torch.float32 else torch.empty(step, block_size, dtype=torch.float32)
    for start in range(0, num_blocks, step):
        chunk = blocks[start : start + step]
        if dtype == torch.float32:
            unpack(chunk, out[start : start + step])
        else:
            unpack(chunk, values[: chunk.shape[0]])
            out[start : start + step].copy_(values[: chunk.shape[0]])
    return out.view(packed.shape[0], -1)


def _to_half_rotary(rows: Tensor, num_heads: int) -> Tensor:
    """From rows that alternate between the two halves of a head to one half after the other."""
    # By numpy, which copies without starting torch's threads; see _CHUNK_ELEMENTS.
    halves = rows.numpy().reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2)
    return torch.from_numpy(halves.reshape(rows.shape))


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block, as float32 [num_blocks, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _five_bits(blocks[:, 2:], out)
    out.sub_(16.0).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _five_bits(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """[n, 16] bytes: the low halves are elements 0 to 15, the high halves 16 to 31."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _five_bits(packed: Tensor, out: Tensor) -> None:
    """[n, 4 + 16] bytes: a fifth bit for each of 32 elements, then their nibbles."""
    _nibbles(packed[:, 4:], out)
    # fifth: [n, 4 bytes, 8 bits], lowest bit first
    fifth = packed[:, :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    out.add_(fifth.flatten(1), alpha=16)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and eight 6-bit minima of a 256-element block, out of 12 bytes.

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits; the last four have their low nibbles
    in bytes 8-11 (scales low, minima high) and their top two bits in the top bits of bytes 0-7.
    """
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([mid & 63, (high >> 4) | (mid >> 6 << 4)], dim=1)
    return scales, minima  # [n, 8] each


def _scale_k(blocks: Tensor, groups: Tensor) -> None:
    """groups: [n, 8, 32] quants, times their group's scale and less its minimum, in place."""
    scales, minima = _k_scales(blocks[:, 4:16])
    groups.mul_((_half(blocks, 0) * scales)[:, :, None]).sub_((_half(blocks, 2) * minima)[:, :, None])


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    groups = out.view(-1, 4, 2, 32)
    nibbles = blocks[:, 16:].view(-1, 4, 32)
    groups[:, :, 0] = nibbles & 15
    groups[:, :, 1] = nibbles >> 4
    _scale_k(blocks, out.view(-1, 8, 32))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    groups = out.view(-1, 4, 2, 32)
    fifth = blocks[:, 16:48]  # bit g of byte i belongs to element i of group g
    nibbles = blocks[:, 48:].view(-1, 4, 32)
    for pair in range(4):
        groups[:, pair, 0] = (nibbles[:, pair] & 15) | (fifth >> (2 * pair) & 1) << 4
        groups[:, pair, 1] = (nibbles[:, pair] >> 4) | (fifth >> (2 * pair + 1) & 1) << 4
    _scale_k(blocks, out.view(-1, 8, 32))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    # Two halves of 128 elements; in each, four runs of 32 that share 64 bytes of nibbles and 32 bytes of top bits.
    low = blocks[:, :128].view(-1, 2, 2, 32)
    high = blocks[:, 128:192].view(-1, 2, 32)
    runs = out.view(-1, 2, 4, 32)
    for run in range(4):
        nibble = low[:, :, run % 2] & 15 if run < 2 else low[:, :, run % 2] >> 4
        runs[:, :, run] = nibble | (high >> (2 * run) & 3) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)  # [n, 16], one for 16 elements
    out.sub_(32.0).view(-1, 16, 16).mul_(scales[:, :, None])


_UNPACKERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
