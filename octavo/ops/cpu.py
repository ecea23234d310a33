"""The native backend: `octavo.ops.Ops` over the C++ kernels of `octavo._cpu`, which see addresses and sizes only.

Here lives what the kernels take for granted: dtypes, shapes and strides are checked and outputs are allocated. The
environment chooses the instruction set (OCTAVO_CPU_ISA) and the number of threads (OCTAVO_CPU_THREADS) at import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo import _cpu
from octavo.errors import ConfigError
from octavo.ops import LayerKVCache, LinearWeight
from octavo.ops.cpu_program import Program, empty

_CODES: dict[torch.dtype, int] = {torch.float32: _cpu.F32, torch.bfloat16: _cpu.BF16}


def _configure() -> None:
    if isa := os.environ.get("OCTAVO_CPU_ISA"):
        try:
            _cpu.set_isa(isa)
        except ValueError as error:
            raise ConfigError(f"OCTAVO_CPU_ISA={isa}: {error}") from None
    if threads := os.environ.get("OCTAVO_CPU_THREADS"):
        try:
            _cpu.set_threads(int(threads))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"OCTAVO_CPU_THREADS={threads}: {error}") from None


_configure()


def use_threads(num_threads: int | None, cpus: list[int] | None) -> int:
    """Compute on that many threads (None: the default number), each kept on the processor of `cpus` at its place.

    Returns the number of threads. Raises `ConfigError` for a number or a processor that this process cannot have.
    """
    if cpus is not None:
        if not _cpu.bind_thread(cpus):
            raise ConfigError(f"--cpu-threads-bind {','.join(map(str, cpus))}: this process may not run there.")
        num_threads = len(cpus)
        _cpu.bind_thread(cpus[:1])
    if num_threads is not None:
        try:
            _cpu.set_threads(num_threads, cpus or [])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--cpu-threads {num_threads}: {error}") from None
    return _cpu.num_threads()


def _code(op: str, *tensors: Tensor) -> int:
    """The one element type of `tensors`, as the kernels name it."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:
            found = ", ".join(str(t.dtype) for t in tensors)
            raise TypeError(f"{op} wants tensors of one dtype, not {found}.")
    code = _CODES.get(dtype)
    if code is None:
        raise TypeError(f"{op} computes on float32 or bfloat16, not {dtype}.")
    return code


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix in panels of 32 output channels (csrc/cpu/kernels.h: LinearArgs); a bias is kept in float32."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    data: Tensor
    bias: Tensor | None
    code: int = field(repr=False)
    data_address: int = field(repr=False)
    bias_address: int = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    code = _code("pack_linear", weight)
    n, k = weight.shape
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    padded_n = -(-n // _cpu.PANEL) * _cpu.PANEL
    padded_k = k if code == _cpu.F32 else -(-k // 2) * 2
    data = torch.empty(padded_n * padded_k, dtype=weight.dtype)
    _cpu.pack_linear(weight.data_ptr(), weight.stride(0), n, k, code, data.data_ptr(), data.nbytes)
    padded_bias = None
    if bias is not None:
        assert bias.shape == (n,), f"bias {tuple(bias.shape)} of a matrix with {n} outputs"
        padded_bias = torch.zeros(padded_n, dtype=torch.float32)
        padded_bias[:n] = bias
    bias_address = 0 if padded_bias is None else padded_bias.data_ptr()
    return PackedWeight(n, k, weight.dtype, data, padded_bias, code, data.data_ptr(), bias_address)


def linear(x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    assert isinstance(weight, PackedWeight)
    dtype = x.dtype
    if dtype is not weight.dtype:
        raise TypeError(f"linear: the input is {dtype} but the matrix is packed as {weight.dtype}.")
    rows, k = x.shape
    assert k == weight.in_features, f"linear: {k} inputs for a matrix of {weight.in_features}"
    assert x.stride(1) == 1 or k == 1
    out_dtype = out_dtype or dtype
    out_code = _CODES.get(out_dtype)
    if out_code is None:
        raise TypeError(f"linear writes float32 or bfloat16, not {out_dtype}.")
    n = weight.out_features
    out = empty((rows, n), out_dtype)
    _cpu.linear(
        x.data_ptr(), x.stride(0), rows, weight.data_address, weight.bias_address, k, n, weight.code,
        out.data_ptr(), out_code,
    )  # fmt: skip
    return out


def embedding(token_ids: Tensor, weight: LinearWeight) -> Tensor:
    assert isinstance(weight, PackedWeight)
    assert token_ids.dtype is torch.int32
    assert token_ids.is_contiguous()
    (tokens,) = token_ids.shape
    out = empty((tokens, weight.in_features), weight.dtype)
    _cpu.embedding(
        token_ids.data_ptr(), tokens, weight.data_address, weight.out_features, weight.in_features, weight.code,
        out.data_ptr(),
    )  # fmt: skip
    return out


def _weight_code(weight: Tensor, hidden: int) -> int:
    assert weight.shape == (hidden,) and weight.is_contiguous()
    return _code("rms_norm", weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    hidden = x.shape[-1]
    out = empty(tuple(x.shape), x.dtype)
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.reshape(-1, hidden).contiguous()
    if x.dim() == 2:
        outer, inner, outer_stride, inner_stride = x.shape[0], 1, x.stride(0), 0
    elif x.dim() == 3:
        (outer, inner), (outer_stride, inner_stride) = x.shape[:2], x.stride()[:2]
    else:
        outer, inner, outer_stride, inner_stride = 1, 1, 0, 0
    _cpu.norm(
        x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), outer, inner, hidden, outer_stride, inner_stride, 0, eps,
        _code("rms_norm", x), _weight_code(weight, hidden),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.dim() == 2
    assert x.shape == residual.shape
    assert x.stride(1) == residual.stride(1) == 1
    rows, hidden = x.shape
    out = empty(tuple(x.shape), x.dtype)
    _cpu.norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, 1, hidden, x.stride(0), 0,
        residual.stride(0), eps, _code("add_rms_norm", x, residual), _weight_code(weight, hidden),
    )  # fmt: skip
    return out, residual


def rotary_and_cache(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, cos_sin: Tensor, cache: LayerKVCache,
    slot_mapping: Tensor,
) -> None:  # fmt: skip
    tokens, query_heads, head_size = query.shape
    kv_heads = key.shape[1]
    rotary_size = cos_sin.shape[1]
    for x in (query, key, value):
        assert x.shape[0] == tokens
        assert x.stride()[1:] == (head_size, 1), "the heads of a token must be contiguous"
    assert key.shape == value.shape == (tokens, kv_heads, head_size)
    assert cache.key.shape[1] == kv_heads
    assert rotary_size <= head_size
    assert rotary_size % 2 == 0
    assert positions.dtype is torch.int64
    assert slot_mapping.dtype is torch.int64
    assert positions.is_contiguous()
    assert slot_mapping.is_contiguous()
    assert cos_sin.dtype is torch.float32
    assert cos_sin.is_contiguous()
    _cpu.rotary_and_cache(
        query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
        positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[0], rotary_size, cache.key.data_ptr(),
        cache.value.data_ptr(), cache.key.shape[0], slot_mapping.data_ptr(), tokens, query_heads, kv_heads, head_size,
        cache.key.shape[3], _code("rotary_and_cache", query, key, value, cache.key, cache.value),
    )  # fmt: skip


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    scale: float, sliding_window: int = 0,
) -> Tensor:  # fmt: skip
    tokens, query_heads, head_size = query.shape
    kv_heads = cache.key.shape[1]
    assert query_heads % kv_heads == 0
    assert query.stride()[1:] == (head_size, 1)
    assert block_tables.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32
    assert block_tables.stride(1) == 1
    assert query_start_loc.is_contiguous()
    assert seq_lens.is_contiguous()
    out = empty((tokens, query_heads * head_size), query.dtype)
    _cpu.paged_attention(
        query.data_ptr(), query.stride(0), cache.key.data_ptr(), cache.value.data_ptr(), block_tables.data_ptr(),
        block_tables.stride(0), block_tables.shape[1], query_start_loc.data_ptr(), seq_lens.data_ptr(),
        seq_lens.shape[0], query_heads, kv_heads, head_size, cache.key.shape[3], sliding_window, scale,
        _code("paged_attention", query, cache.key, cache.value), out.data_ptr(),
    )  # fmt: skip
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    rows, both = gate_up.shape
    assert both % 2 == 0
    assert gate_up.stride(1) == 1
    out = empty((rows, both // 2), gate_up.dtype)
    _cpu.silu_and_mul(
        gate_up.data_ptr(), gate_up.stride(0), rows, both // 2, _code("silu_and_mul", gate_up), out.data_ptr()
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    if logits.dtype is not torch.float32:
        raise TypeError(f"argmax reads float32, not {logits.dtype}.")
    rows, width = logits.shape
    assert logits.stride(1) == 1
    assert 0 < width < 1 << 24
    out = empty((rows,), torch.int64)
    _cpu.argmax(logits.data_ptr(), logits.stride(0), rows, width, out.data_ptr())
    return out


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, dice: Tensor) -> Tensor:
    rows, width = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    for tensor, dtype in (
        (temperature, torch.float32),
        (top_k, torch.int64),
        (top_p, torch.float32),
        (min_p, torch.float32),
        (dice, torch.float64),
    ):
        assert tensor.dtype is dtype and tensor.shape == (rows,) and tensor.is_contiguous()
    out = torch.empty(rows, dtype=torch.int64)
    _cpu.sample(
        logits.data_ptr(), logits.stride(0), rows, width, temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), dice.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def new_program() -> Program:
    return Program()


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> LayerKVCache:
    """Keys lie as [block, kv_head, D / step, block_size, step] so that keys are the lanes of a score vector; `step` is
    1 in float32 and 2 in bfloat16. Values lie as [block, kv_head, block_size, D rounded up to 16]."""
    if dtype not in _CODES:
        raise TypeError(f"the KV cache holds float32 or bfloat16, not {dtype}.")
    if block_size not in (8, 16, 32):
        raise ConfigError(f"block size {block_size} is not supported by the CPU kernels; use 8, 16 or 32.")
    if not 0 < head_size <= _cpu.MAX_HEAD_SIZE or head_size % 2:
        raise ConfigError(f"head size {head_size} is not supported; it must be even and at most {_cpu.MAX_HEAD_SIZE}.")
    padded = -(-head_size // _cpu.VALUE_PAD) * _cpu.VALUE_PAD
    step = 1 if dtype is torch.float32 else 2
    key = torch.empty((num_blocks, num_kv_heads, head_size // step, block_size, step), dtype=dtype, device=device)
    value = torch.empty((num_blocks, num_kv_heads, block_size, padded), dtype=dtype, device=device)
    for tensor in (key, value):
        _cpu.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return LayerKVCache(key, value)
