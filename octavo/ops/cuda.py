"""The CUDA backend: `octavo.ops.DeviceOps` over the Triton kernels of `octavo.ops.triton`, and over torch's own
functions for operations that torch has."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.cuda_collectives import all_gather, all_reduce, from_first
from octavo.ops.torch_arrays import upload
from octavo.ops.torch_ops import (
    add_bias,
    add_chosen,
    add_rows,
    gather_blocks,
    keep_tokens,
    keys_of,
    logprobs,
    logprobs_of,
    normalize,
    process_row,
    replace_rows,
    resolve_step,
    rows_of,
    scatter_blocks,
    top_tokens,
)
from octavo.ops.triton import launch
from octavo.ops.triton import logits as logits_kernels
from octavo.ops.triton.adapter_tables import adapter_table, allocate_arena, experts_adapter_table
from octavo.ops.triton.attention_plan import begin_step
from octavo.ops.triton.cache import allocate_kv_cache, copy_blocks, rotary_and_cache, rotate
from octavo.ops.triton.choose_keys import choose_keys
from octavo.ops.triton.expert_kernels import experts, route, stack_experts
from octavo.ops.triton.lora import rows_by_adapter, shrink
from octavo.ops.triton.mla_attention import latent_attention, linear_by_head
from octavo.ops.triton.norm_kernels import layer_norm, rms_norm
from octavo.ops.triton.pack import pack_linear
from octavo.ops.triton.paged_attention import paged_attention
from octavo.ops.triton.pool_rows import pool
from octavo.ops.triton.products import embedding, linear, linear_activated, linear_add, linear_silu_and_mul, quantize
from octavo.ops.triton.recurrent_kernels import (
    causal_conv,
    gated_delta,
    gated_recurrence,
    multiply,
    num_scan_floats,
    selective_scan,
)
from octavo.ops.triton.rows import activation, add, take_rows
from octavo.ops.triton.sampling import argmax, sample
from octavo.ops.triton.schedule import ROW_CLASSES

__all__ = [
    "activation", "adapter_table", "add", "add_bias", "add_chosen", "add_rows", "all_gather", "all_reduce",
    "allocate_arena", "allocate_kv_cache", "argmax", "begin_step", "causal_conv", "choose_keys", "copy_blocks",
    "embedding", "experts", "experts_adapter_table", "from_first", "gated_delta", "gated_recurrence", "gather_blocks",
    "keep_tokens", "keys_of", "latent_attention", "layer_norm", "linear", "linear_activated", "linear_add",
    "linear_by_head", "linear_silu_and_mul", "logprobs", "logprobs_of", "mask_tokens", "multiply", "normalize",
    "num_scan_floats",
    "pack_linear", "paged_attention", "penalize", "place", "pool", "process_row", "quantize", "replace_rows",
    "resolve_step", "rms_norm", "rotary_and_cache", "rotate", "route", "row_classes", "rows_by_adapter", "rows_of",
    "sample", "scatter_blocks", "selective_scan", "shrink", "stack_experts", "take_rows", "top_tokens",
]  # fmt: skip


def row_classes(max_rows: int, exactly: bool = True) -> list[int]:
    max_rows = max_rows if exactly else min(max_rows, ROW_CLASSES[-1])
    return [size for size in ROW_CLASSES if size < max_rows] + [max_rows]


def place(array: NDArray[Any]) -> Tensor:
    return upload(array, launch.device())


def mask_tokens(logits: Tensor, words: NDArray[Any], samples: NDArray[Any]) -> None:
    device = logits.device
    logits_kernels.apply_masks(logits, upload(words, device), upload(samples.astype(np.int32), device))


def penalize(
    logits: Tensor, samples: NDArray[Any], tokens: NDArray[Any], counts: NDArray[Any], repetition: NDArray[Any],
    frequency: NDArray[Any], presence: NDArray[Any], last_tokens: Tensor | None = None,
) -> None:  # fmt: skip
    device = logits.device
    lists = (
        upload(samples.astype(np.int32), device), upload(tokens.astype(np.int32), device),
        upload(counts.astype(np.int32), device),
    )  # fmt: skip
    penalties = (upload(part.astype(np.float32), device) for part in (repetition, frequency, presence))
    if last_tokens is not None:
        ends = np.flatnonzero(tokens < 0)
        bounds = np.stack([np.searchsorted(samples, samples[ends]), ends], 1)
        logits_kernels.add_last_tokens(*lists, upload(bounds.astype(np.int32), device), last_tokens)
    logits_kernels.penalize(logits, *lists, *penalties)
