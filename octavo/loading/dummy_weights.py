"""Weights without a checkpoint: random ones that depend on the seed only, for tests and benchmarks."""

from __future__ import annotations

import os
import zlib

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loading.weights import QUANTIZED_AT_LOAD, to_be_quantized
from octavo.models.decoder_config import DecoderConfig
from octavo.ops import QuantizedMatrix

_STD = 0.02  # the initializer_range of most configurations
# Numbers that are drawn; primes, so that no two rows of a matrix are the same stretch of them.
_FEW, _MANY = 1_048_583, 16_777_259


class DummyWeights:
    """Each tensor is a stretch of the same random numbers, from a place that its name decides on: a large model is made
    as fast as memory is copied, and is the same on every device. Types differ by rounding only."""

    def __init__(
        self,
        decoder: DecoderConfig,
        dtype: torch.dtype,
        seed: int | None,
        quantization: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._decoder = decoder
        self._dtype = dtype
        self._quantization = quantization
        self._seed = int.from_bytes(os.urandom(4)) if seed is None else seed
        count = _FEW if decoder.num_weight_parameters() < _MANY else _MANY
        # crc32 rather than hash(), which differs between processes. torch's generator takes 32 bits of a seed only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}".encode()))
        numbers = torch.empty(count).normal_(0.0, _STD, generator=generator)
        self._numbers = numbers.to(device=device, dtype=dtype)

    def __contains__(self, name: str) -> bool:
        """Whether a checkpoint of this configuration would have the tensor."""
        decoder, (*_, module, kind) = self._decoder, name.rsplit(".", 2)
        if name == "lm_head.weight":
            return not decoder.tie_word_embeddings
        if module in ("q_norm", "k_norm"):
            return decoder.qk_norm
        if module in ("qkv_proj", "gate_up_proj"):
            present = decoder.fused_projections
        else:
            present = not (
                decoder.fused_projections and module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
            )
        if kind == "bias":
            if module in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
                return present and decoder.qkv_bias
            if module == "o_proj":
                return decoder.output_bias
            return present and decoder.mlp_bias and module in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
        return present

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self:
            raise LoadError(f"dummy weights of this configuration have no tensor {name}.")
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._numbers.device)
        out = self._numbers.new_empty(shape)
        flat, count = out.view(-1), len(self._numbers)
        begin, at = zlib.crc32(name.encode()) % count, 0
        while at < len(flat):
            part = self._numbers[begin : begin + len(flat) - at]
            flat[at : at + len(part)] = part
            begin, at = 0, at + len(part)
        return out

    def take_matrix(self, name: str, shape: tuple[int, int]) -> Tensor | QuantizedMatrix:
        tensor = self.take(name, shape)
        quantization = self._quantization
        return to_be_quantized(tensor, quantization) if quantization in QUANTIZED_AT_LOAD else tensor

    def check_all_taken(self) -> None:
        """There is nothing that could be left."""

    def close(self) -> None:
        """There is nothing open."""
