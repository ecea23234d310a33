"""The reference backend: the definition of each operation of `octavo.ops.Ops`, in the plainest torch.

Every kernel is tested against it. It promises neither speed nor bitwise row independence. Its operations are in the
modules `ref_*`, by kind; operations of no kind are here.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops import LinearWeight
from octavo.ops.torch_arrays import to_torch
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
from tests.ops.ref_attention import (
    allocate_kv_cache,
    choose_keys,
    copy_blocks,
    latent_attention,
    paged_attention,
    rotary_and_cache,
    rotate,
)
from tests.ops.ref_experts import experts, linear_by_head, route, stack_experts
from tests.ops.ref_logits import argmax, exponentials, mask_tokens, penalize, sample
from tests.ops.ref_products import (
    DenseWeight,
    activation,
    add,
    embedding,
    fake_quantize,
    layer_norm,
    linear,
    linear_activated,
    linear_add,
    linear_silu_and_mul,
    multiply,
    pack_linear,
    pool,
    quantize,
    rms_norm,
    shrink,
)
from tests.ops.ref_states import causal_conv, gated_delta, gated_recurrence, num_scan_floats, selective_scan
from tests.ops.torch_adapters import adapter_table, allocate_arena, experts_adapter_table, rows_by_adapter

__all__ = [
    "DenseWeight", "activation", "adapter_table", "add", "add_bias", "add_chosen", "add_rows", "allocate_arena",
    "allocate_kv_cache", "argmax", "begin_step", "causal_conv", "choose_keys", "copy_blocks", "embedding", "experts",
    "experts_adapter_table", "exponentials", "fake_quantize", "gated_delta", "gated_recurrence", "gather_blocks",
    "keep_tokens", "keys_of", "latent_attention", "layer_norm", "linear", "linear_activated", "linear_add",
    "linear_by_head", "linear_silu_and_mul", "logprobs", "logprobs_of", "mask_tokens", "multiply", "normalize",
    "num_scan_floats",
    "pack_linear", "paged_attention", "penalize", "place", "pool", "process_row", "quantize", "replace_rows",
    "resolve_step", "rms_norm", "rotary_and_cache", "rotate", "route", "row_classes", "rows_by_adapter", "rows_of",
    "sample", "scatter_blocks", "selective_scan", "shrink", "stack_experts", "sum_by_segments", "take_rows",
    "top_tokens",
]  # fmt: skip

place = to_torch


def sum_by_segments(weight: LinearWeight, segments: int) -> int:
    """Return 1: the reference does not fix the order of sums, so it ignores segments."""
    return 1


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def row_classes(max_rows: int, exactly: bool = True) -> list[int]:
    """Return `max_rows` only: the same code serves any number of rows."""
    return [max_rows]


def begin_step(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Do nothing: the reference prepares nothing for a step."""
