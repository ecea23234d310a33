"""The CUDA backend: `octavo.ops.DeviceOps` over the Triton kernels of `octavo.ops.triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.triton import logits as logits_kernels
from octavo.ops.triton.attention import paged_attention
from octavo.ops.triton.cache import allocate_kv_cache, copy_blocks, rotary_and_cache
from octavo.ops.triton.norm import rms_norm
from octavo.ops.triton.products import embedding, linear, linear_add, linear_silu_and_mul, pack_linear, quantize
from octavo.ops.triton.rows import take_rows
from octavo.ops.triton.sampling import argmax, sample
from octavo.ops.upload import upload

__all__ = [
    "allocate_kv_cache", "argmax", "copy_blocks", "embedding", "linear", "linear_add", "linear_silu_and_mul",
    "mask_tokens", "pack_linear", "paged_attention", "penalize", "quantize", "rms_norm", "rotary_and_cache", "sample",
    "take_rows",
]  # fmt: skip


def penalize(
    logits: Tensor, samples: Tensor, tokens: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor,
    presence: Tensor,
) -> None:  # fmt: skip
    """`Ops.penalize`: the lists come from the host, and are uploaded."""
    device = logits.device
    lists = (upload(part.to(torch.int32), device) for part in (samples, tokens, counts))
    penalties = (upload(part.to(torch.float32), device) for part in (repetition, frequency, presence))
    logits_kernels.penalize(logits, *lists, *penalties)


def mask_tokens(logits: Tensor, words: Tensor, samples: Tensor) -> None:
    """`DeviceOps.mask_tokens`."""
    logits_kernels.apply_masks(logits, words, samples.to(torch.int32))
