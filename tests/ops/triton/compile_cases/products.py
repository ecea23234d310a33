"""Matrix products, at the shapes of Llama-3.1-8B: every tile at least once."""

from __future__ import annotations

import torch

from octavo.ops.triton import products
from octavo.ops.triton.linear_int import workspace_for
from octavo.ops.triton.weights import BLOCK_WORDS, FloatWeight, IntWeight
from tests.ops.triton.compiling import Case

BF16, F32 = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def floats(n: int, k: int, gated: bool = False, bias: bool = False, dtype: torch.dtype = BF16) -> FloatWeight:
    return FloatWeight(n, k, gated, empty(n, k, dtype=dtype), empty(n, dtype=F32) if bias else None)


def integers(n: int, k: int, bits: int, group: int, minima: bool, gated: bool = False) -> IntWeight:
    num_blocks = -(-k * bits // (32 * BLOCK_WORDS))
    codes = empty(n, num_blocks * BLOCK_WORDS, dtype=torch.int32)
    scales = empty(k // group // (1 if minima else 2), n, dtype=torch.int32)
    workspace = workspace_for(n, num_blocks, torch.device("cpu"))
    return IntWeight(n, k, gated, bits, group, minima, 1.0, codes, scales, None, workspace)


def add_int(rows: int, bits: int, group: int, minima: bool, dtype: torch.dtype = BF16) -> None:
    weight = integers(4096, 4096, bits, group, minima)
    products.linear_add(empty(rows, 4096, dtype=dtype), weight, empty(rows, 4096, dtype=dtype))


def gate_int(rows: int) -> None:
    products.linear_silu_and_mul(empty(rows, 4096), integers(28672, 4096, 4, 128, False, gated=True))


def add(rows: int, dtype: torch.dtype = BF16) -> None:
    products.linear_add(empty(rows, 4096, dtype=dtype), floats(4096, 4096, dtype=dtype), empty(rows, 4096, dtype=dtype))


def gate(rows: int) -> None:
    products.linear_silu_and_mul(empty(rows, 4096), floats(28672, 4096, gated=True))


def bias(rows: int) -> None:
    products.linear(empty(rows, 4096), floats(6144, 4096, bias=True))


def logits(rows: int) -> None:
    products.linear(empty(rows, 4096), floats(128256, 4096), F32)


def case(run: object, *args: object, min_warps: int = 4) -> Case:
    return Case(lambda: run(*args), min_warps)  # type: ignore[operator]


# One program a multiprocessor: what hides latency is the depth of its pipeline.
CASES = {f"add_{rows}": case(add, rows) for rows in (1, 32, 64, 128, 512, 2048)}
CASES |= {f"gate_{rows}": case(gate, rows) for rows in (1, 64, 2048)}
CASES |= {"bias": case(bias, 2048), "logits": case(logits, 32)}
CASES |= {f"float32_{rows}": case(add, rows, F32) for rows in (1, 64)}
CASES |= {"narrow": case(lambda: products.linear(empty(3, 572)[:, 1:571], floats(570, 570)))}
# Q4_1 and Q4_K, by the number of rows; Q8_0; the widest layout; AWQ.
CASES |= {f"add_int4_{rows}": case(add_int, rows, 4, 32, True) for rows in (1, 32, 64, 128, 2048)}
CASES |= {"add_int8": case(add_int, 1, 8, 32, False), "add_int8_16": case(add_int, 2048, 8, 16, True)}
CASES |= {f"gate_int4_{rows}": case(gate_int, rows) for rows in (1, 2048)}
CASES |= {"float32_int4": case(add_int, 1, 4, 32, True, F32)}
