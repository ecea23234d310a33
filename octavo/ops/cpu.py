"""The native backend: `octavo.ops.Ops` over the C++ kernels of `octavo._cpu`, which see addresses and sizes only.

Here lives what the kernels take for granted: dtypes, shapes and strides are checked and outputs are allocated. The
environment chooses the instruction set (OCTAVO_CPU_ISA) and the number of threads (OCTAVO_CPU_THREADS) at import.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo import _cpu
from octavo.errors import ConfigError
from octavo.ops import LayerKVCache, LinearWeight, QuantizedMatrix
from octavo.ops.cpu_memory import zeros
from octavo.ops.cpu_pack import pack_quantized
from octavo.ops.cpu_program import Program, empty, is_recording
from octavo.quantization import dequantize

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
    found: int = _cpu.num_threads()
    return found


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
    """A matrix in panels of 32 output channels (docs/kernels.md); a bias is kept in float32, padded as the panels are.

    `matrix` is all that as the kernels take it; it points into `data` and `bias`.
    """

    out_features: int
    in_features: int
    gated: bool
    format: int
    data: Tensor
    bias: Tensor | None
    matrix: _cpu.Matrix = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def is_quantized(self) -> bool:
        return self.format in (_cpu.WEIGHT_INT4, _cpu.WEIGHT_INT8)

    @property
    def num_blocks(self) -> int:
        """Blocks of a quantized row of inputs."""
        return int(-(-self.in_features // _cpu.QBLOCK))


def packed_weight(
    data: Tensor, shape: tuple[int, int], format: int, bias: Tensor | None = None, gated: bool = False,
    group: int = 0, minima: bool = False, factor: float = 1.0,
) -> PackedWeight:  # fmt: skip
    """Wrap a packed matrix of `shape` [N, K]. The bias [N] is not packed yet; with `gated` N counts gate and up."""
    n, k = shape
    if bias is not None:
        assert bias.shape == (n,), f"bias {tuple(bias.shape)} of a matrix with {n} outputs"
        # A row of panels for a plain matrix, two that alternate for a gated one.
        sides = 2 if gated else 1
        padded = torch.zeros(sides, _num_panels(n // sides) * _cpu.PANEL, dtype=torch.float32)
        padded[:, : n // sides] = bias.view(sides, -1)
        bias = padded.view(sides, -1, _cpu.PANEL).transpose(0, 1).contiguous()
    bias_address = 0 if bias is None else bias.data_ptr()
    matrix = _cpu.Matrix(data.data_ptr(), bias_address, n, k, factor, format, group, minima, gated)
    return PackedWeight(n, k, gated, format, data, bias, matrix)


def _num_panels(n: int) -> int:
    return int(-(-n // _cpu.PANEL))


def pack_linear(
    parts: Sequence[Tensor | QuantizedMatrix], bias: Tensor | None = None, gated: bool = False
) -> PackedWeight:
    assert not gated or (len(parts) == 2 and parts[0].shape == parts[1].shape), "gated parts are gate and up"
    tensors = [part for part in parts if isinstance(part, Tensor)]
    matrices = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if not tensors:
        return _pack_integers(matrices, bias, gated)
    if matrices:  # some of a file's matrices were not worth fewer bits: those next to them follow
        tensors = [dequantize(p, tensors[0].dtype) if isinstance(p, QuantizedMatrix) else p for p in parts]
    return _pack_floats(tensors, bias, gated)


def _pack_integers(parts: list[QuantizedMatrix], bias: Tensor | None, gated: bool) -> PackedWeight:
    packed = pack_quantized(parts, gated)
    layout, shape = packed.layout, (packed.num_out, packed.num_in)
    format = _cpu.WEIGHT_INT4 if layout.bits == 4 else _cpu.WEIGHT_INT8
    return packed_weight(packed.data, shape, format, bias, gated, layout.group, layout.minima, packed.factor)


def _pack_floats(parts: list[Tensor], bias: Tensor | None, gated: bool) -> PackedWeight:
    code = _code("pack_linear", *parts)
    if not gated and any(part.shape[0] % _cpu.PANEL for part in parts[:-1]):
        parts = [torch.cat(parts)]
    k = parts[0].shape[1]
    words = k if code == _cpu.F32 else -(-k // 2)  # of 32 bits, in a row
    panels = [_num_panels(part.shape[0]) for part in parts]
    panel_bytes = words * _cpu.PANEL * 4
    data = zeros(sum(panels) * panel_bytes)
    first_panel = 0
    for part, num_panels in zip(parts, panels, strict=True):
        assert part.shape[1] == k, f"parts of {k} and {part.shape[1]} inputs"
        if part.stride(1) != 1:
            part = part.contiguous()
        _cpu.pack_linear(
            part.data_ptr(), part.stride(0), part.shape[0], k, code, data.data_ptr() + first_panel * panel_bytes,
            data.nbytes - first_panel * panel_bytes, 2 if gated else 1,
        )  # fmt: skip
        first_panel += 1 if gated else num_panels
    format = _cpu.WEIGHT_F32 if code == _cpu.F32 else _cpu.WEIGHT_BF16
    return packed_weight(data, (sum(part.shape[0] for part in parts), k), format, bias, gated)


def quantize(x: Tensor, consumer: LinearWeight) -> Tensor:
    assert isinstance(consumer, PackedWeight)
    if not consumer.is_quantized or x.dtype is torch.uint8:
        return x
    rows, width = x.shape
    assert width == consumer.in_features, f"quantize: {width} elements for a matrix of {consumer.in_features}"
    assert x.stride(1) == 1 or width == 1
    out = empty((rows, consumer.num_blocks * _cpu.QBLOCK_BYTES), torch.uint8)
    _cpu.quantize(x.data_ptr(), x.stride(0), rows, width, _code("quantize", x), out.data_ptr())
    return out


_FLOAT_FORMATS = {_cpu.WEIGHT_F32: torch.float32, _cpu.WEIGHT_BF16: torch.bfloat16}


def _product(
    op: str, x: Tensor, weight: PackedWeight, out: Tensor, epilogue: int, out_code: int | None = None,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """Call the kernel: x, as `weight` wants it, into the rows of `out`."""
    if out_code is None:
        out_code = _CODES.get(out.dtype)
        if out_code is None:
            raise TypeError(f"{op} writes float32 or bfloat16, not {out.dtype}.")
    if weight.is_quantized:
        x = quantize(x, weight)
        assert x.shape[1] == weight.num_blocks * _cpu.QBLOCK_BYTES, f"{op}: quantized for another matrix"
        x_stride, rest = divmod(x.stride(0), _cpu.QBLOCK_BYTES)
        assert rest == 0
    else:
        expected = _FLOAT_FORMATS[weight.format]
        if x.dtype is not expected:
            raise TypeError(f"{op}: the input is {x.dtype} but the matrix is packed as {expected}.")
        assert x.shape[1] == weight.in_features, f"{op}: {x.shape[1]} inputs for a matrix of {weight.in_features}"
        x_stride = x.stride(0)
    assert x.stride(1) == 1 or x.shape[1] == 1
    out_stride = out.stride(0) if out_code != _cpu.Q8 else out.stride(0) // _cpu.QBLOCK_BYTES
    _cpu.linear(
        x.data_ptr(), x_stride, x.shape[0], weight.matrix, out.data_ptr(), out_stride, out_code, epilogue, scale
    )


def _float_output(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.float32 if x.dtype is torch.uint8 else x.dtype)


def linear(x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    assert isinstance(weight, PackedWeight)
    assert not weight.gated
    out = empty((x.shape[0], weight.out_features), _float_output(x, out_dtype))
    _product("linear", x, weight, out, _cpu.STORE)
    return out


def linear_add(x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0) -> None:
    assert isinstance(weight, PackedWeight)
    assert not weight.gated
    assert residual.shape == (x.shape[0], weight.out_features)
    assert residual.stride(1) == 1 or weight.out_features == 1
    _product("linear_add", x, weight, residual, _cpu.ADD, scale=scale)


def linear_silu_and_mul(
    x: Tensor, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    assert isinstance(gate_up, PackedWeight)
    assert gate_up.gated
    width = gate_up.out_features // 2
    if isinstance(consumer, PackedWeight) and consumer.is_quantized:
        assert consumer.in_features == width
        out = empty((x.shape[0], consumer.num_blocks * _cpu.QBLOCK_BYTES), torch.uint8)
        _product("linear_silu_and_mul", x, gate_up, out, _cpu.GATED, _cpu.Q8)
    else:
        out = empty((x.shape[0], width), _float_output(x, out_dtype))
        _product("linear_silu_and_mul", x, gate_up, out, _cpu.GATED)
    return out


def embedding(
    token_ids: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None, scale: float = 1.0
) -> Tensor:
    assert isinstance(weight, PackedWeight)
    assert not weight.gated
    assert token_ids.dtype is torch.int32
    assert token_ids.is_contiguous()
    out_dtype = out_dtype or _FLOAT_FORMATS.get(weight.format, torch.float32)
    out = empty((token_ids.shape[0], weight.in_features), out_dtype)
    code = _code("embedding", out)
    _cpu.embedding(token_ids.data_ptr(), token_ids.shape[0], weight.matrix, out.data_ptr(), code, scale)
    return out


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    assert rows.dtype is torch.int64
    assert rows.is_contiguous()
    count, width = x.shape
    assert x.stride(1) == 1 or width == 1
    out = empty((rows.shape[0], width), x.dtype)
    size = x.element_size()
    _cpu.take_rows(
        x.data_ptr(), count, width * size, x.stride(0) * size, rows.data_ptr(), rows.shape[0], out.data_ptr()
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, consumer: LinearWeight | None = None) -> Tensor:
    hidden = x.shape[-1]
    assert weight.shape == (hidden,) and weight.is_contiguous()
    code = _code("rms_norm", x)
    if isinstance(consumer, PackedWeight) and consumer.is_quantized:
        assert consumer.in_features == hidden
        out = empty((*x.shape[:-1], consumer.num_blocks * _cpu.QBLOCK_BYTES), torch.uint8)
        out_code = _cpu.Q8
    else:
        out = empty(tuple(x.shape), x.dtype)
        out_code = code
    if x.stride(-1) != 1 or x.dim() > 3:
        assert not is_recording(), "a copy would not be part of the program"
        x = x.reshape(-1, hidden).contiguous()
    if x.dim() == 2:
        outer, inner, outer_stride, inner_stride = x.shape[0], 1, x.stride(0), 0
    elif x.dim() == 3:
        (outer, inner), (outer_stride, inner_stride) = x.shape[:2], x.stride()[:2]
    else:
        outer, inner, outer_stride, inner_stride = 1, 1, 0, 0
    _cpu.norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, hidden, outer_stride, inner_stride, eps, code,
        _code("rms_norm", weight), out_code,
    )  # fmt: skip
    return out


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
    scale: float, sliding_window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    if softcap:
        raise ConfigError("soft-capped attention is not built for CPUs.")
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


def argmax(logits: Tensor) -> Tensor:
    if logits.dtype is not torch.float32:
        raise TypeError(f"argmax reads float32, not {logits.dtype}.")
    rows, width = logits.shape
    assert logits.stride(1) == 1
    assert 0 < width < 1 << 24
    out = empty((rows,), torch.int64)
    _cpu.argmax(logits.data_ptr(), logits.stride(0), rows, width, out.data_ptr())
    return out


def penalize(
    logits: Tensor, samples: Tensor, tokens: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor,
    presence: Tensor,
) -> None:  # fmt: skip
    rows, places, of = logits.numpy(), (samples.numpy(), tokens.numpy()), samples.numpy()
    values, penalty, count = rows[places], repetition.numpy()[of], counts.numpy()
    values = np.where(values > 0, values / penalty, values * penalty)
    rows[places] = values - (frequency.numpy()[of] * count + presence.numpy()[of] * (count > 0))


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
    1 in float32 and 2 in bfloat16. Values lie as [block, kv_head, block_size / step, D rounded up to 16, step]."""
    if dtype not in _CODES:
        raise TypeError(f"the KV cache holds float32 or bfloat16, not {dtype}.")
    if block_size not in (8, 16, 32):
        raise ConfigError(f"block size {block_size} is not supported by the CPU kernels; use 8, 16 or 32.")
    if not 0 < head_size <= _cpu.MAX_HEAD_SIZE or head_size % 2:
        raise ConfigError(f"head size {head_size} is not supported; it must be even and at most {_cpu.MAX_HEAD_SIZE}.")
    padded = -(-head_size // _cpu.VALUE_PAD) * _cpu.VALUE_PAD
    step = 1 if dtype is torch.float32 else 2
    key = torch.empty((num_blocks, num_kv_heads, head_size // step, block_size, step), dtype=dtype, device=device)
    value = torch.empty((num_blocks, num_kv_heads, block_size // step, padded, step), dtype=dtype, device=device)
    for tensor in (key, value):
        _cpu.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return LayerKVCache(key, value)
