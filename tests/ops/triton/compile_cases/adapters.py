"""What adapters add to products, at the shapes of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.ops import Expand, FactorShape, Lookup
from octavo.ops.triton import products
from octavo.ops.triton.adapter_tables import TritonAdapterTable
from octavo.ops.triton.lora import added, rows_by_adapter, shrink
from octavo.ops.triton.packed_weights import PackedWeight
from tests.ops.triton.compile_cases.products import BF16, F32, FP8, INT8, empty, floats, integers, scaled
from tests.ops.triton.compiling import Case


def expand_of(x: torch.Tensor, weight: PackedWeight, widths: tuple[int, ...], rank: int, **more: bool) -> Expand:
    dtype = "float32" if x.dtype is F32 else "bfloat16"
    shape = FactorShape(weight.in_features, widths, weight.gated, rank, **more)
    table, rows = TritonAdapterTable(shape, 4, dtype), rows_by_adapter(torch.full((len(x),), -1, dtype=torch.int32))
    return Expand(table, rows, shrink(x, table, rows, weight))


def qkv(rows: int, rank: int = 16, dtype: torch.dtype = BF16) -> None:
    weight = floats(6144, 4096, dtype=dtype)
    x = empty(rows, 4096, dtype=dtype)
    products.linear(x, weight, expand=expand_of(x, weight, (4096, 1024, 1024), rank))


def add(rows: int) -> None:
    weight, x = floats(4096, 14336), empty(rows, 14336)
    products.linear_add(x, weight, empty(rows, 4096), expand=expand_of(x, weight, (4096,), 16))


def gate(rows: int) -> None:
    weight, x = floats(28672, 4096, gated=True), empty(rows, 4096)
    products.linear_silu_and_mul(x, weight, expand=expand_of(x, weight, (14336, 14336), 16))


def add_int(rows: int) -> None:
    weight, x = integers(4096, 4096, 4, 32, True), empty(rows, 4096)
    products.linear_add(x, weight, empty(rows, 4096), expand=expand_of(x, weight, (4096,), 16))


def gate_int(rows: int) -> None:
    weight, x = integers(28672, 4096, 4, 32, True, gated=True), empty(rows, 4096)
    products.linear_silu_and_mul(x, weight, expand=expand_of(x, weight, (14336, 14336), 16))


def add_scaled(rows: int, dtype: torch.dtype) -> None:
    weight, x = scaled(4096, 4096, dtype), empty(rows, 4096 + 16, dtype=torch.uint8)
    products.linear_add(x, weight, empty(rows, 4096), expand=expand_of(x, weight, (4096,), 16))


def logits(rows: int) -> None:
    """Of an output matrix that adapters may replace."""
    weight, x = floats(128256, 4096), empty(rows, 4096)
    products.linear(x, weight, "float32", expand_of(x, weight, (128256,), 16, replaceable=True))


def shrink_and_expand(rows: int, rank: int) -> None:
    weight, x = floats(28672, 4096, gated=True), empty(rows, 4096)
    added(expand_of(x, weight, (14336, 14336), rank))


def embed() -> None:
    table = TritonAdapterTable(FactorShape(4096, (128256,), False, 16, True, True), 4, "bfloat16")
    rows = rows_by_adapter(torch.full((64,), -1, dtype=torch.int32))
    weight = integers(128256, 4096, 4, 32, True)
    products.embedding(empty(64, dtype=torch.int32), weight, "bfloat16", adapted=Lookup(table, rows))


def case(run: Callable[..., None], *args: object, max_stack_bytes: int = 0, **more: Any) -> Case:
    return Case(lambda: run(*args), 4, 255, max_stack_bytes, **more)


# What the largest tiles' epilogues add to a product is spilled in part, once a tile.
CASES = {f"qkv_{rows}": case(qkv, rows, max_stack_bytes=112) for rows in (1, 64, 256, 2048)}
CASES |= {f"add_{rows}": case(add, rows, max_stack_bytes=112) for rows in (32, 512)}
CASES |= {f"gate_{rows}": case(gate, rows, max_stack_bytes=128) for rows in (1, 128, 2048)}
CASES |= {f"add_int4_{rows}": case(add_int, rows, max_stack_bytes=48) for rows in (1, 128, 2048)}
CASES |= {
    "gate_int4": case(gate_int, 2048, max_stack_bytes=48),
    "add_w8a8": case(add_scaled, 2048, INT8, max_stack_bytes=112),
    "add_fp8": case(add_scaled, 2048, FP8, capabilities=(90,)),
    "logits": case(logits, 32),
    "float32": case(qkv, 64, 16, F32),
    "rank_64": case(shrink_and_expand, 64, 64),
    "rank_512": case(shrink_and_expand, 2048, 512),
    "embed": case(embed),
}
