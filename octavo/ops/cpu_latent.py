"""Latent attention in the native backend: products by head, and attention over the compressed cache that heads share
(csrc/cpu/latent.h)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops import ExpertsWeight, LayerKVCache
from octavo.ops.cpu_arrays import INT32, code_of, is_dense, stride
from octavo.ops.cpu_experts import PackedExperts
from octavo.ops.cpu_program import check_inputs, empty


def linear_by_head(x: NDArray[Any], weight: ExpertsWeight) -> NDArray[Any]:
    assert isinstance(weight, PackedExperts)
    tokens, heads, width = x.shape
    first = weight.weights[0]
    assert heads == weight.num_experts and width == first.in_features and is_dense(x)
    assert all(matrix.bias is None for matrix in weight.weights) and not first.gated
    check_inputs("linear_by_head", x=x)
    code = code_of("linear_by_head", x)
    if code != {_cpu.WEIGHT_F32: _cpu.F32, _cpu.WEIGHT_BF16: _cpu.BF16}.get(first.format):
        raise TypeError(f"linear_by_head: the input is {x.dtype}, not of the type that the matrices are packed as.")
    out = empty((tokens, heads, first.out_features), x.dtype)
    _cpu.linear_by_head(
        x, stride(x), stride(x, 1), x.itemsize, tokens, weight.matrices, out, heads * first.out_features,
        first.out_features, code,
    )  # fmt: skip
    return out


def latent_attention(
    query: NDArray[Any], rotated: NDArray[Any], cache: LayerKVCache, block_tables: NDArray[Any],
    query_start_loc: NDArray[Any], seq_lens: NDArray[Any], scale: float,
) -> NDArray[Any]:  # fmt: skip
    tokens, heads, size = query.shape
    rotated_size = rotated.shape[2]
    assert rotated.shape[:2] == (tokens, heads) and rotated_size <= _cpu.MAX_ROTATED_SIZE and size % 2 == 0
    assert is_dense(query) and stride(query, 1) == size and is_dense(rotated)
    assert cache.key.shape[1] == cache.value.shape[1] == 1 and cache.value.shape[3] - _cpu.VALUE_PAD < size
    assert cache.key.shape[2] * cache.key.shape[4] == rotated_size and size <= cache.value.shape[3]
    assert block_tables.dtype == query_start_loc.dtype == seq_lens.dtype == INT32
    assert is_dense(block_tables) and is_dense(query_start_loc) and is_dense(seq_lens)
    check_inputs(
        "latent_attention", query=query, rotated=rotated, block_tables=block_tables, query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )  # fmt: skip
    code = code_of("latent_attention", query, rotated, cache.key, cache.value)
    out = empty((tokens, heads, size), query.dtype)
    _cpu.latent_attention(
        query, tokens, stride(query), rotated, stride(rotated), stride(rotated, 1), rotated_size, cache.key,
        cache.value, block_tables, stride(block_tables), block_tables.shape[1], query_start_loc, seq_lens,
        seq_lens.shape[0], heads, 1, size, cache.key.shape[3], scale,
        code, code, out, size,
    )  # fmt: skip
    return out
