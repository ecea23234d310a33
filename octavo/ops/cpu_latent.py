"""Latent attention in the native backend: products by head, attention over the compressed cache that all heads share
(csrc/cpu/latent.h), and the optional index that chooses keys (csrc/cpu/sparse_attention.h)."""

from typing import Any

from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import ConfigError
from octavo.ops import ExpertsWeight, LayerKVCache
from octavo.ops.cpu_arrays import INT32, INT64, code_of, is_dense, require, stride
from octavo.ops.cpu_experts import PackedExperts
from octavo.ops.cpu_program import check_inputs, empty


def linear_by_head(x: NDArray[Any], weight: ExpertsWeight) -> NDArray[Any]:
    assert isinstance(weight, PackedExperts)
    tokens, heads, width = x.shape
    first = weight.weights[0]
    require(heads == weight.num_experts and width == first.in_features and is_dense(x))
    require(all(matrix.bias is None for matrix in weight.weights) and not first.gated)
    check_inputs("linear_by_head", x=x)
    code = code_of("linear_by_head", x)
    if code != {_cpu.WEIGHT_F32: _cpu.F32, _cpu.WEIGHT_BF16: _cpu.BF16}.get(first.format):
        raise TypeError(f"linear_by_head: the input is {x.dtype}, not of the type that the matrices are packed as.")
    out = empty((tokens, heads, first.out_features), x.dtype)
    _cpu.linear_by_head(
        x=x, x_stride=stride(x), x_head_stride=stride(x, 1), x_bytes=x.itemsize, rows=tokens,
        matrices=weight.matrices, heads=heads, out=out, out_stride=heads * first.out_features,
        out_head_stride=first.out_features, out_dtype=code,
    )  # fmt: skip
    return out


def latent_attention(
    query: NDArray[Any], rotated: NDArray[Any], cache: LayerKVCache, block_tables: NDArray[Any],
    query_start_loc: NDArray[Any], seq_lens: NDArray[Any], scale: float, chosen: NDArray[Any] | None = None,
) -> NDArray[Any]:  # fmt: skip
    tokens, heads, size = query.shape
    rotated_size = rotated.shape[2]
    require(rotated.shape[:2] == (tokens, heads) and rotated_size <= _cpu.MAX_ROTATED_SIZE and size % 2 == 0)
    require(is_dense(query) and stride(query, 1) == size and is_dense(rotated))
    require(cache.key.shape[1] == cache.value.shape[1] == 1 and cache.value.shape[3] - _cpu.VALUE_PAD < size)
    index_size = cache.key.shape[2] * cache.key.shape[4] - rotated_size
    require(index_size >= 0 and size <= cache.value.shape[3])
    require(block_tables.dtype == query_start_loc.dtype == seq_lens.dtype == INT32)
    require(is_dense(block_tables) and is_dense(query_start_loc) and is_dense(seq_lens))
    check_inputs(
        "latent_attention", query=query, rotated=rotated, block_tables=block_tables, query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )  # fmt: skip
    if chosen is not None:
        require(chosen.dtype == INT32 and chosen.shape[0] == tokens and chosen.flags.c_contiguous)
        check_inputs("latent_attention", chosen=chosen)
    code = code_of("latent_attention", query, rotated, cache.key, cache.value)
    out = empty((tokens, heads, size), query.dtype)
    _cpu.latent_attention(
        query=query, rows=tokens, query_stride=stride(query), rotated_query=rotated,
        rotated_stride=stride(rotated), rotated_head_stride=stride(rotated, 1), rotated_size=rotated_size,
        key_cache=cache.key, value_cache=cache.value, block_tables=block_tables,
        table_stride=stride(block_tables), max_blocks=block_tables.shape[1], query_start=query_start_loc,
        seq_lens=seq_lens, num_seqs=seq_lens.shape[0], query_heads=heads, kv_heads=1, head_size=size,
        block_size=cache.key.shape[3], scale=scale, dtype=code, cache_dtype=code, out=out, value_size=size,
        index_size=index_size, chosen=chosen, num_chosen=0 if chosen is None else chosen.shape[1],
    )  # fmt: skip
    return out


def choose_keys(
    query: NDArray[Any], weights: NDArray[Any], cache: LayerKVCache, block_tables: NDArray[Any],
    query_start_loc: NDArray[Any], seq_lens: NDArray[Any], num_chosen: int,
) -> NDArray[Any]:  # fmt: skip
    tokens, heads, size = query.shape
    key_size = cache.key.shape[2] * cache.key.shape[4]
    if not 0 < num_chosen <= _cpu.MAX_CHOSEN:
        raise ConfigError(f"an index that chooses {num_chosen} keys is not built: {_cpu.MAX_CHOSEN} are the most.")
    require(weights.shape == (tokens, heads) and is_dense(weights))
    require(is_dense(query) and stride(query, 1) == size and size % 2 == key_size % 2 == 0 and size <= key_size)
    require(cache.key.shape[1] == 1)
    require(block_tables.dtype == query_start_loc.dtype == seq_lens.dtype == INT32)
    require(is_dense(block_tables) and is_dense(query_start_loc) and is_dense(seq_lens))
    check_inputs(
        "choose_keys", query=query, weights=weights, block_tables=block_tables, query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )  # fmt: skip
    out = empty((tokens, num_chosen), INT32)
    scratch = empty((_cpu.choose_scratch_rows(), num_chosen), INT64)
    for merges in (False, True):  # the second call merges the results of threads that shared the keys of a row
        _cpu.choose_keys(
            query=query, query_stride=stride(query), weights=weights, weights_stride=stride(weights),
            rows=tokens, key_cache=cache.key, block_tables=block_tables, table_stride=stride(block_tables),
            max_blocks=block_tables.shape[1], query_start=query_start_loc, seq_lens=seq_lens,
            num_seqs=seq_lens.shape[0], heads=heads, size=size, key_size=key_size,
            block_size=cache.key.shape[3], num_chosen=num_chosen,
            dtype=code_of("choose_keys", query, weights, cache.key), chosen=out, scratch=scratch,
            scratch_rows=len(scratch), merges=merges,
        )  # fmt: skip
    return out
