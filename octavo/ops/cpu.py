"""The native backend: `octavo.ops.Ops` over the C++ kernels of `octavo._cpu`, which see addresses and sizes only.

The functions here check dtypes, shapes and strides and allocate outputs, because the kernels check nothing. Arrays are
numpy's. The environment variables OCTAVO_CPU_ISA (instruction set) and OCTAVO_CPU_THREADS (number of threads) are read
at import.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import ConfigError
from octavo.ops import ACTIVATIONS, BIAS_PADDING, PARAMETRIC_ACTIVATIONS, Expand, LayerKVCache, LinearWeight, Lookup
from octavo.ops.cpu_adapters import (
    adapter_table,
    allocate_arena,
    expand_arguments,
    experts_adapter_table,
    lookup_arguments,
    rows_by_adapter,
    shrink,
)
from octavo.ops.cpu_arrays import (
    CACHE_CODES,
    CODES,
    DTYPES,
    FLOAT32,
    INT32,
    INT64,
    UINT8,
    code_of,
    is_dense,
    require,
    stride,
)
from octavo.ops.cpu_cache import (
    allocate_kv_cache,
    cache_code,
    copy_blocks,
    gather_blocks,
    key_size_of,
    keys_of,
    scatter_blocks,
)
from octavo.ops.cpu_collectives import all_gather, all_reduce, join_group
from octavo.ops.cpu_experts import experts, route, stack_experts
from octavo.ops.cpu_latent import choose_keys, latent_attention, linear_by_head
from octavo.ops.cpu_logits import (
    add_bias,
    argmax,
    logprobs,
    logprobs_of,
    mask_tokens,
    normalize,
    penalize,
    process_row,
    rows_of,
    sample,
    top_tokens,
)
from octavo.ops.cpu_pack import PackedStack, PackedWeight, first_part, pack_linear, packed_weight, sum_by_segments
from octavo.ops.cpu_program import Program, check_inputs, empty, recording
from octavo.ops.cpu_quantize import FLOAT_FORMATS, quantize
from octavo.ops.cpu_recurrent import causal_conv, gated_delta, gated_recurrence, num_scan_floats, selective_scan

__all__ = [
    "PackedWeight", "Program", "activation", "adapter_table", "add", "add_bias", "add_chosen", "add_rows", "all_gather",
    "all_reduce", "allocate_arena", "allocate_kv_cache", "argmax", "causal_conv", "choose_keys", "copy_blocks",
    "default_threads", "embedding", "experts", "experts_adapter_table",
    "gated_delta", "gated_recurrence", "gather_blocks", "join_group", "keep_threads_on", "keys_of",
    "latent_attention", "layer_norm",
    "linear", "linear_activated", "linear_add", "linear_by_head", "linear_silu_and_mul", "logprobs", "logprobs_of",
    "mask_tokens", "multiply",
    "normalize", "num_scan_floats", "pack_linear", "packed_weight", "paged_attention", "penalize",
    "place", "pool", "process_row", "quantize", "replace_rows", "rms_norm", "rotary_and_cache", "rotate", "route",
    "rows_by_adapter", "rows_of", "sample", "scatter_blocks", "selective_scan", "shrink", "stack_experts",
    "sum_by_segments", "take_rows", "top_tokens", "use_threads",
]  # fmt: skip

logger = logging.getLogger(__name__)


def _configure() -> None:
    settings: dict[str, Callable[[str], None]] = {
        "OCTAVO_CPU_ISA": _cpu.set_isa, "OCTAVO_CPU_THREADS": lambda threads: _cpu.set_threads(int(threads))
    }  # fmt: skip
    for name, apply in settings.items():
        if value := os.environ.get(name):
            try:
                apply(value)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{name}={value}: {error}") from None


_configure()


def use_threads(num_threads: int | None, cpus: list[int] | None) -> int:
    """Compute on `num_threads` threads (None: the default number); return the number of threads.

    With `cpus`, thread i runs on processor cpus[i] only, and there are as many threads as processors. Raises
    `ConfigError` for a number or a processor that this process cannot have.
    """
    if cpus is not None:
        beyond = [str(cpu) for cpu in cpus if not _cpu.bind_thread([cpu])]
        if beyond:
            named = ", ".join(beyond[:8]) + (", ..." if len(beyond) > 8 else "")
            raise ConfigError(f"--cpu-threads-bind: this process may not run on processor {named}.")
        num_threads = len(cpus)
        _cpu.bind_thread(cpus[:1])
    elif num_threads is not None and num_threads > (usable := _num_usable_processors()):
        logger.warning(
            "--cpu-threads %d on %d processors: each step waits for threads that wait for a processor",
            num_threads,
            usable,
        )
    if num_threads is not None:
        try:
            _cpu.set_threads(num_threads, cpus or [])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--cpu-threads {num_threads}: {error}") from None
    found: int = _cpu.num_threads()
    return found


def default_threads() -> tuple[int, list[int] | None]:
    """Return the default number of threads, and on several NUMA nodes, where threads are bound by default, a processor
    for each. Existing engines of this process do not matter."""
    if asked_for := os.environ.get("OCTAVO_CPU_THREADS"):
        return int(asked_for), None
    count, cpus = _cpu.default_placement()
    return count, cpus if len(cpus) == count else None


def keep_threads_on(cpus: list[int]) -> None:
    """Compute on one thread for each of these processors. The calling thread, which is one of them, is not bound:
    threads that it starts later may run anywhere."""
    _cpu.set_threads(len(cpus), cpus)


def _num_usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def place(array: NDArray[Any]) -> NDArray[Any]:
    return np.array(array, order="C")  # a copy: `array` may alias a file, which may change while the model serves


def _product(
    op: str, x: NDArray[Any], weight: PackedWeight, out: NDArray[Any], epilogue: int, out_code: int | None = None,
    scale: float = 1.0, activation: str = "silu", expand: Expand | None = None, first_output: int = 0,
) -> None:  # fmt: skip
    """Multiply x by `weight` in the native kernel and write the product to `out`; x is quantized first if needed.

    Column 0 of `out` is output `first_output` of `expand`'s table."""
    check_inputs(op, x=x, out=out)
    if out_code is None:
        out_code = CODES.get(out.dtype)
        if out_code is None:
            raise TypeError(f"{op} writes float32 or bfloat16, not {out.dtype}.")
    if weight.is_quantized:
        x = quantize(x, weight)
        is_paired = x.shape[1] == 2 * weight.num_blocks * _cpu.QBLOCK_BYTES
        require(is_paired or x.shape[1] == weight.num_blocks * _cpu.QBLOCK_BYTES, f"{op}: quantized for another matrix")
        x_stride, rest = divmod(x.strides[0], _cpu.QBLOCK_BYTES)
        require(rest == 0)
    else:
        expected = FLOAT_FORMATS[weight.format]
        if x.dtype != expected:
            raise TypeError(f"{op}: the input is {x.dtype} but the matrix is packed as {expected}.")
        require(x.shape[1] == weight.in_features, f"{op}: {x.shape[1]} inputs for a matrix of {weight.in_features}")
        x_stride, is_paired = stride(x), False
    require(is_dense(x))
    out_stride = stride(out) if out_code not in (_cpu.Q8, _cpu.Q16) else stride(out) // _cpu.QBLOCK_BYTES
    _cpu.linear(
        x=x, x_stride=x_stride, x_is_paired=is_paired, rows=x.shape[0], matrix=weight.matrix, out=out,
        out_stride=out_stride, out_dtype=out_code, epilogue=epilogue, scale=scale,
        activation=_cpu.ACTIVATIONS[activation], **expand_arguments(expand, first_output),
    )  # fmt: skip


def _products(
    op: str, x: NDArray[Any], weight: LinearWeight, out: NDArray[Any], epilogue: int, scale: float = 1.0,
    expand: Expand | None = None,
) -> None:  # fmt: skip
    """Call `_product` for a matrix that is not gated, or for each matrix of a stack, into its columns of `out`."""
    if isinstance(weight, PackedStack):
        x = quantize(x, weight)  # once for all parts
        first = 0
        for part in weight.parts:
            columns = out[:, first : first + part.out_features]
            _product(op, x, part, columns, epilogue, scale=scale, expand=expand, first_output=first)
            first += part.out_features
        return
    assert isinstance(weight, PackedWeight)
    require(not weight.gated)
    _product(op, x, weight, out, epilogue, scale=scale, expand=expand)


def _float_output(x: NDArray[Any], out_dtype: str | None) -> np.dtype[Any]:
    return DTYPES[out_dtype] if out_dtype else FLOAT32 if x.dtype == UINT8 else x.dtype


def _output_for(
    consumer: LinearWeight | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], int | None]:
    """Return an empty output of `shape` [..., K] and the kernels' code of its type.

    It is for quantized elements if the consumer multiplies integers, else for elements of `dtype`. A consumer with an
    `order` gets elements of `dtype`: it quantizes them in its own order."""
    part = None if consumer is None else first_part(consumer)
    if part is not None and part.is_quantized and part.order is None:
        require(part.in_features == shape[-1])
        return empty((*shape[:-1], part.row_bytes), UINT8), part.row_code
    return empty(shape, dtype), CODES.get(dtype)


def linear(
    x: NDArray[Any], weight: LinearWeight, out_dtype: str | None = None, expand: Expand | None = None
) -> NDArray[Any]:
    out = empty((x.shape[0], weight.out_features), _float_output(x, out_dtype))
    _products("linear", x, weight, out, _cpu.STORE, expand=expand)
    return out


def linear_add(
    x: NDArray[Any], weight: LinearWeight, residual: NDArray[Any], scale: float = 1.0, expand: Expand | None = None
) -> None:
    require(residual.shape == (x.shape[0], weight.out_features))
    require(is_dense(residual))
    _products("linear_add", x, weight, residual, _cpu.ADD, scale, expand)


def linear_silu_and_mul(
    x: NDArray[Any], gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
    activation: str = "silu", expand: Expand | None = None,
) -> NDArray[Any]:  # fmt: skip
    assert isinstance(gate_up, PackedWeight)
    require(gate_up.gated)
    shape = (x.shape[0], gate_up.out_features // 2)
    out, out_code = _output_for(consumer, shape, _float_output(x, out_dtype))
    require(activation in ACTIVATIONS)
    _product("linear_silu_and_mul", x, gate_up, out, _cpu.GATED, out_code, activation=activation, expand=expand)
    return out


def linear_activated(
    x: NDArray[Any], weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
    out_dtype: str | None = None, expand: Expand | None = None,
) -> NDArray[Any]:  # fmt: skip
    assert isinstance(weight, PackedWeight)
    require(not weight.gated)
    out, out_code = _output_for(consumer, (x.shape[0], weight.out_features), _float_output(x, out_dtype))
    require(activation in ACTIVATIONS)
    _product("linear_activated", x, weight, out, _cpu.ACTIVATED, out_code, activation=activation, expand=expand)
    return out


def add(residual: NDArray[Any], x: NDArray[Any], scale: float = 1.0) -> None:
    require(residual.shape == x.shape)
    rows, width = x.shape
    require(is_dense(x) and is_dense(residual))
    check_inputs("add", residual=residual, x=x)
    codes = code_of("add", x), code_of("add", residual)
    _cpu.add(
        x=x, x_stride=stride(x), dtype=codes[0], out=residual, out_stride=stride(residual), out_dtype=codes[1],
        rows=rows, width=width, scale=scale,
    )  # fmt: skip


def add_chosen(
    residual: NDArray[Any], x: NDArray[Any], ids: NDArray[Any], weights: NDArray[Any], first_id: int
) -> None:
    (rows, width), top_k = x.shape, ids.shape[1]
    require(residual.shape == x.shape and is_dense(x) and is_dense(residual))
    require(ids.shape == weights.shape == (rows, top_k) and ids.flags.c_contiguous and weights.flags.c_contiguous)
    require(ids.dtype == INT32 and weights.dtype == FLOAT32)
    check_inputs("add_chosen", residual=residual, x=x, ids=ids, weights=weights)
    codes = code_of("add_chosen", x), code_of("add_chosen", residual)
    _cpu.add_chosen(
        x=x, x_stride=stride(x), dtype=codes[0], out=residual, out_stride=stride(residual), out_dtype=codes[1],
        rows=rows, width=width, ids=ids, weights=weights, top_k=top_k, first_id=first_id,
    )  # fmt: skip


def activation(
    x: NDArray[Any], kind: str, consumer: LinearWeight | None = None, parameters: tuple[float, ...] = ()
) -> NDArray[Any]:
    rows, width = x.shape
    require(is_dense(x))
    check_inputs("activation", x=x)
    code = code_of("activation", x)
    out, out_code = _output_for(consumer, x.shape, x.dtype)
    require(len(parameters) == PARAMETRIC_ACTIVATIONS.get(kind, 0))
    padded = (*parameters, 0.0, 0.0, 0.0, 0.0)
    _cpu.activation(
        x=x, x_stride=stride(x), rows=rows, width=width, dtype=code, out=out, out_dtype=out_code,
        kind=_cpu.ACTIVATIONS[kind], order=None, **{f"parameter{i}": padded[i] for i in range(4)},
    )  # fmt: skip
    return out


def multiply(
    x: NDArray[Any], y: NDArray[Any], activation: str = "identity", consumer: LinearWeight | None = None
) -> NDArray[Any]:
    require(len(x) == len(y) and x.shape[1] % y.shape[1] == 0 and is_dense(x) and is_dense(y))
    require(activation in ("identity", "silu", "sigmoid", "softplus"))
    check_inputs("multiply", x=x, y=y)
    code = code_of("multiply", x, y)
    out, out_code = _output_for(consumer, x.shape, x.dtype)
    rows, width = x.shape
    kind, shared = _cpu.ACTIVATIONS[activation], width // y.shape[1]
    _cpu.multiply(
        x=x, x_stride=stride(x), y=y, y_stride=stride(y), rows=rows, width=width, dtype=code, out=out,
        out_dtype=out_code, kind=kind, shared=shared,
    )  # fmt: skip
    return out


def embedding(
    token_ids: NDArray[Any], weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0,
    adapted: Lookup | None = None,
) -> NDArray[Any]:  # fmt: skip
    assert isinstance(weight, PackedWeight)
    require(not weight.gated)
    if weight.order is not None:
        raise ConfigError("embeddings that were quantized in the order of activations (desc_act) are not built.")
    require(token_ids.dtype == INT32 and is_dense(token_ids))
    check_inputs("embedding", token_ids=token_ids)
    dtype = DTYPES[out_dtype] if out_dtype else FLOAT_FORMATS.get(weight.format, FLOAT32)
    out = empty((token_ids.shape[0], weight.in_features), dtype)
    _cpu.embedding(
        token_ids=token_ids, rows=token_ids.shape[0], matrix=weight.matrix, out=out,
        out_dtype=code_of("embedding", out), scale=scale, **lookup_arguments(adapted),
    )  # fmt: skip
    return out


def take_rows(x: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    require(rows.dtype == INT64 and is_dense(rows) and is_dense(x))
    check_inputs("take_rows", rows=rows)
    count, width = x.shape
    out = empty((rows.shape[0], width), x.dtype)
    _cpu.take_rows(
        x=x, x_rows=count, row_bytes=width * x.itemsize, x_stride_bytes=x.strides[0], indices=rows,
        rows=rows.shape[0], out=out,
    )  # fmt: skip
    return out


def replace_rows(x: NDArray[Any], replacements: NDArray[Any], indices: NDArray[Any]) -> None:
    _put_rows("replace_rows", x, replacements, indices, False)


def add_rows(x: NDArray[Any], summands: NDArray[Any], indices: NDArray[Any]) -> None:
    _put_rows("add_rows", x, summands, indices, True)


def _put_rows(op: str, x: NDArray[Any], replacements: NDArray[Any], indices: NDArray[Any], adds: bool) -> None:
    require(indices.dtype == INT32 and is_dense(indices) and replacements.dtype == FLOAT32 and is_dense(replacements))
    require(x.shape == (indices.shape[0], replacements.shape[1]))
    check_inputs(op, x=x, indices=indices)
    count, width = replacements.shape
    _cpu.replace_rows(
        replacements=replacements, num_replacements=count, width=width, indices=indices, rows=indices.shape[0],
        out=x, out_stride=stride(x), out_dtype=code_of(op, x), adds=adds,
    )  # fmt: skip


def pool(
    x: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any], kind: str, out_dtype: str | None = None
) -> NDArray[Any]:
    require(starts.dtype == ends.dtype == INT64 and is_dense(starts) and is_dense(ends) and is_dense(x))
    require(starts.shape == ends.shape)
    check_inputs("pool", x=x, starts=starts, ends=ends)
    out = empty((starts.shape[0], x.shape[1]), _float_output(x, out_dtype))
    _cpu.pool(
        x=x, x_rows=x.shape[0], x_stride=stride(x), starts=starts, ends=ends, rows=starts.shape[0],
        width=x.shape[1], dtype=code_of("pool", x), out=out, out_dtype=code_of("pool", out),
        kind=_cpu.POOLINGS[kind],
    )  # fmt: skip
    return out


def rms_norm(x: NDArray[Any], weight: NDArray[Any], eps: float, consumer: LinearWeight | None = None) -> NDArray[Any]:
    return _norm("rms_norm", x, weight, None, eps, consumer)


def layer_norm(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, eps: float, consumer: LinearWeight | None = None
) -> NDArray[Any]:
    require(bias is None or (bias.shape == weight.shape and bias.dtype == weight.dtype and is_dense(bias)))
    return _norm("layer_norm", x, weight, bias, eps, consumer)


def _norm(
    op: str, x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, eps: float, consumer: LinearWeight | None
) -> NDArray[Any]:
    hidden = x.shape[-1]
    require(weight.shape in ((hidden,), x.shape[1:]) and weight.flags.c_contiguous)
    check_inputs(op, x=x)
    code = code_of(op, x)
    out, out_code = _output_for(consumer, x.shape, x.dtype)
    weight_stride = hidden if weight.ndim == 2 else 0
    if not is_dense(x) or x.ndim > 3:
        require(recording() is None and weight.ndim == 1, "a copy would not be part of the program")
        x = np.ascontiguousarray(x).reshape(-1, hidden)
    if x.ndim == 2:
        outer, inner, outer_stride, inner_stride = x.shape[0], 1, stride(x), 0
    elif x.ndim == 3:
        (outer, inner), outer_stride, inner_stride = x.shape[:2], stride(x), stride(x, 1)
    else:
        outer, inner, outer_stride, inner_stride = 1, 1, 0, 0
    _cpu.norm(
        x=x, weight=weight, bias=bias, out=out, rows=outer, inner=inner, hidden=hidden, x_stride=outer_stride,
        x_inner_stride=inner_stride, eps=eps, dtype=code, weight_dtype=code_of(op, weight), out_dtype=out_code,
        centered=op == "layer_norm", weight_stride=weight_stride,
    )  # fmt: skip
    return out


def _has_dense_heads(x: NDArray[Any]) -> bool:
    """Return whether the heads of a token lie side by side."""
    heads, head_size = x.shape[1:]
    return is_dense(x) and (heads == 1 or x.strides[1] == head_size * x.itemsize)


def rotate(x: NDArray[Any], positions: NDArray[Any], cos_sin: NDArray[Any]) -> None:
    tokens, heads, head_size = x.shape
    rotary_size = cos_sin.shape[1]
    require(_has_dense_heads(x) and rotary_size <= head_size and rotary_size % 2 == 0)
    require(positions.dtype == INT64 and is_dense(positions))
    require(cos_sin.dtype == FLOAT32 and cos_sin.flags.c_contiguous)
    check_inputs("rotate", x=x, positions=positions)
    _cpu.rotary_and_cache(
        query=x, query_stride=stride(x), key=0, key_stride=0, value=0, value_stride=0, positions=positions,
        cos_sin=cos_sin, max_positions=cos_sin.shape[0], rotary_size=rotary_size, key_cache=0, value_cache=0,
        num_slots=0, slots=0, rows=tokens, query_heads=heads, kv_heads=0, head_size=head_size, key_size=0,
        value_size=0, block_size=0, dtype=code_of("rotate", x), cache_dtype=0, query_scales=0, axes=0,
        positions_stride=0, index_key=0, index_stride=0, index_size=0,
    )  # fmt: skip


def rotary_and_cache(
    query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], positions: NDArray[Any], cos_sin: NDArray[Any],
    cache: LayerKVCache, slot_mapping: NDArray[Any], query_scales: NDArray[Any] | None = None,
    axes: NDArray[Any] | None = None, index_key: NDArray[Any] | None = None,
) -> None:  # fmt: skip
    tokens, query_heads, head_size = query.shape
    kv_heads = key.shape[1]
    rotary_size, block_size = cos_sin.shape[1], cache.key.shape[3]
    for x in (query, key, value):
        require(x.shape[0] == tokens)
        require(_has_dense_heads(x), "the heads of a token must be contiguous")
    key_size, value_size, index_size = key.shape[2], value.shape[2], 0
    if index_key is not None:
        index_size = index_key.shape[2]
        require(index_key.shape == (tokens, 1, index_size) and kv_heads == 1 and index_key.dtype == key.dtype)
        require(is_dense(index_key) and cache.key.dtype not in CACHE_CODES and key_size % 2 == index_size % 2 == 0)
        check_inputs("rotary_and_cache", index_key=index_key)
    require(key.shape[:2] == value.shape[:2] == (tokens, kv_heads))
    require(cache.key.shape[1] == kv_heads and key_size_of(cache) == key_size + index_size)
    require(cache.value.shape[3] - _cpu.VALUE_PAD < value_size <= cache.value.shape[3])
    require(rotary_size <= min(head_size, key_size) and rotary_size % 2 == 0)
    require(positions.dtype == slot_mapping.dtype == INT64 and is_dense(positions) and is_dense(slot_mapping))
    require(cos_sin.dtype == FLOAT32 and cos_sin.flags.c_contiguous)
    if query_scales is not None:
        require(query_scales.dtype == FLOAT32 and query_scales.shape == cos_sin.shape[:1] and is_dense(query_scales))
    require(positions.shape == ((tokens,) if axes is None else (_cpu.POSITION_AXES, tokens)))
    if axes is not None:
        require(axes.dtype == INT32 and axes.shape == (rotary_size // 2,) and is_dense(axes) and query_scales is None)
        require(axes.min() >= 0 and axes.max() < _cpu.POSITION_AXES)
    check_inputs("rotary_and_cache", query=query, key=key, value=value, positions=positions, slot_mapping=slot_mapping)
    _cpu.rotary_and_cache(
        query=query, query_stride=stride(query), key=key, key_stride=stride(key), value=value,
        value_stride=stride(value), positions=positions, cos_sin=cos_sin, max_positions=cos_sin.shape[0],
        rotary_size=rotary_size, key_cache=cache.key, value_cache=cache.value,
        num_slots=cache.num_blocks * block_size, slots=slot_mapping, rows=tokens, query_heads=query_heads,
        kv_heads=kv_heads, head_size=head_size, key_size=key_size, value_size=value_size, block_size=block_size,
        dtype=code_of("rotary_and_cache", query, key, value),
        cache_dtype=cache_code("rotary_and_cache", cache, query), query_scales=query_scales, axes=axes,
        positions_stride=0 if axes is None else stride(positions), index_key=index_key,
        index_stride=0 if index_key is None else stride(index_key), index_size=index_size,
    )  # fmt: skip


def paged_attention(
    query: NDArray[Any], cache: LayerKVCache, block_tables: NDArray[Any], query_start_loc: NDArray[Any],
    seq_lens: NDArray[Any], scale: float, sliding_window: int = 0, softcap: float = 0.0,
    slopes: NDArray[Any] | None = None, sinks: NDArray[Any] | None = None, bidirectional: bool = False,
    distance_biases: NDArray[Any] | None = None, key_ends: NDArray[Any] | None = None, value_size: int | None = None,
) -> NDArray[Any]:  # fmt: skip
    tokens, query_heads, head_size = query.shape
    value_size = head_size if value_size is None else value_size
    require(cache.value.shape[3] - _cpu.VALUE_PAD < value_size <= cache.value.shape[3])
    kv_heads, num_seqs = cache.key.shape[1], seq_lens.shape[0]
    require(query_heads % kv_heads == 0 and key_size_of(cache) == head_size)
    require(block_tables.shape[0] >= num_seqs and query_start_loc.shape[0] > num_seqs)
    require(_has_dense_heads(query))
    require(block_tables.dtype == query_start_loc.dtype == seq_lens.dtype == INT32)
    require(is_dense(block_tables) and is_dense(query_start_loc) and is_dense(seq_lens))
    for by_head in (slopes, sinks):
        require(by_head is None or (by_head.dtype == FLOAT32 and by_head.shape == (query_heads,) and is_dense(by_head)))
    check_inputs(
        "paged_attention", query=query, block_tables=block_tables, query_start_loc=query_start_loc, seq_lens=seq_lens
    )
    require(not bidirectional or slopes is None)
    if key_ends is not None:
        require(key_ends.dtype == INT32 and key_ends.shape == (tokens,) and is_dense(key_ends))
        require(not bidirectional and slopes is None)
        check_inputs("paged_attention", key_ends=key_ends)
    reach = 0
    if distance_biases is not None:
        reach = (distance_biases.shape[1] - BIAS_PADDING) // 2
        require(bidirectional and distance_biases.dtype == FLOAT32 and distance_biases.flags.c_contiguous)
        require(distance_biases.shape == (query_heads, 2 * reach + BIAS_PADDING))
    out = empty((tokens, query_heads * value_size), query.dtype)
    _cpu.paged_attention(
        query=query, rows=tokens, query_stride=stride(query), key_cache=cache.key, value_cache=cache.value,
        block_tables=block_tables, table_stride=stride(block_tables), max_blocks=block_tables.shape[1],
        query_start=query_start_loc, seq_lens=seq_lens, num_seqs=num_seqs, query_heads=query_heads,
        kv_heads=kv_heads, head_size=head_size, block_size=cache.key.shape[3], window=sliding_window,
        scale=scale, dtype=code_of("paged_attention", query),
        cache_dtype=cache_code("paged_attention", cache, query), out=out, softcap=softcap, slopes=slopes,
        sinks=sinks, bidirectional=bidirectional, biases=distance_biases, bias_reach=reach, key_ends=key_ends,
        value_size=value_size,
    )  # fmt: skip
    return out
