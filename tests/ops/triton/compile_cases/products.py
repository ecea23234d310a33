"""Matrix products, at the shapes of Llama-3.1-8B: every tile at least once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.ops.triton import products
from octavo.ops.triton.linear_int import workspace_for
from octavo.ops.triton.packed_weights import BLOCK_WORDS, FloatWeight, IntWeight, PackedWeight, ScaledWeight
from tests.ops.triton.compiling import CAPABILITIES, Case

BF16, F32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def floats(n: int, k: int, gated: bool = False, dtype: torch.dtype = BF16) -> FloatWeight:
    return FloatWeight(n, k, gated, empty(n, k, dtype=dtype), empty(n, dtype=F32))


def integers(
    n: int, k: int, bits: int, group: int, minima: bool, gated: bool = False, has_table: bool = False
) -> IntWeight:
    num_blocks = -(-k * bits // (32 * BLOCK_WORDS))
    codes = empty(n, num_blocks * BLOCK_WORDS, dtype=torch.int32)
    scales = empty(k // group // (1 if minima else 2), n, dtype=torch.int32)
    workspace = workspace_for(n, num_blocks, torch.device("cpu"))
    table = empty(4, dtype=torch.int32) if has_table else None
    return IntWeight(n, k, gated, bits, group, minima, 1.0, codes, scales, None, workspace, table=table)


def add_int(rows: int, bits: int, group: int, minima: bool, has_table: bool = False, dtype: torch.dtype = BF16) -> None:
    weight = integers(4096, 4096, bits, group, minima, has_table=has_table)
    products.linear_add(empty(rows, 4096, dtype=dtype), weight, empty(rows, 4096, dtype=dtype))


def gate_int(rows: int, has_table: bool = False) -> None:
    weight = integers(28672, 4096, 4, 32 if has_table else 128, False, gated=True, has_table=has_table)
    products.linear_silu_and_mul(empty(rows, 4096), weight)


def scaled(n: int, k: int, dtype: torch.dtype) -> ScaledWeight:
    return ScaledWeight(n, k, False, empty(n, k, dtype=dtype), empty(n, dtype=F32), None)


def add_scaled(rows: int, dtype: torch.dtype) -> None:
    x = empty(rows, 4096 + 16, dtype=torch.uint8)
    products.linear_add(x, scaled(4096, 4096, dtype), empty(rows, 4096))


def embed(weight: PackedWeight) -> None:
    products.embedding(empty(64, dtype=torch.int32), weight, "bfloat16")


def add(rows: int, dtype: torch.dtype = BF16) -> None:
    products.linear_add(empty(rows, 4096, dtype=dtype), floats(4096, 4096, dtype=dtype), empty(rows, 4096, dtype=dtype))


def gate(rows: int, activation: str = "silu") -> None:
    products.linear_silu_and_mul(empty(rows, 4096), floats(28672, 4096, gated=True), activation=activation)


def logits(rows: int) -> None:
    products.linear(empty(rows, 4096), floats(128256, 4096), "float32")


def case(
    run: Callable[..., None], *args: object, min_warps: int = 4, fp8: bool = False, max_stack_bytes: int = 0
) -> Case:
    capabilities = (90,) if fp8 else CAPABILITIES
    return Case(lambda: run(*args), min_warps, 255, max_stack_bytes, capabilities=capabilities)


# Every tile of floats. One program a multiprocessor is enough: what hides latency is the depth of its pipeline.
CASES = {f"add_{rows}": case(add, rows) for rows in (1, 32, 64, 128, 512, 2048)}
CASES |= {f"gate_{rows}": case(gate, rows) for rows in (1, 2048)}
CASES |= {"gate_gelu": case(gate, 2048, "gelu"), "gate_gelu_tanh": case(gate, 64, "gelu_tanh")}
CASES |= {"logits": case(logits, 32), "float32": case(add, 64, F32)}
CASES |= {"narrow": case(lambda: products.linear(empty(3, 572)[:, 1:571], floats(570, 570)))}
# Q4_1 and Q4_K, the layout that holds all others, AWQ.
# The sum of earlier chunks of k is spilled in part, outside of the loop, where one program computes all of them.
CASES |= {f"add_int4_{rows}": case(add_int, rows, 4, 32, True, max_stack_bytes=48) for rows in (1, 64, 128, 2048)}
CASES |= {"add_int8": case(add_int, 2048, 8, 16, True), "gate_int4": case(gate_int, 2048)}
# MXFP4, NF4 and IQ4_NL; NVFP4.
CASES |= {f"add_table_{rows}": case(add_int, rows, 4, 32, False, True) for rows in (1, 64, 2048)}
CASES |= {"add_table_of_16": case(add_int, 2048, 4, 16, False, True), "gate_table": case(gate_int, 2048, True)}
CASES |= {f"add_w8a8_{rows}": case(add_scaled, rows, INT8) for rows in (1, 2048)}
CASES |= {f"add_fp8_{rows}": case(add_scaled, rows, FP8, fp8=True) for rows in (128, 2048)}
CASES |= {"embed_int4": case(lambda: embed(integers(128256, 4096, 4, 32, True)), min_warps=32)}
CASES |= {"embed_table": case(lambda: embed(integers(128256, 4096, 4, 32, False, has_table=True)), min_warps=32)}
