"""Layers with a state: short convolutions, selective scans and the gated delta rule, token by token, in float32.

A program has some channels of one sequence, and goes through the sequence's tokens of this step in order, so results do
not depend on how a prompt is cut into steps. States are stored as rows of channels: [K - 1, C], [N, C], [V, Dk, Dv]. A
state is written after the last token that has its block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import LinearWeight
from octavo.ops.triton.launch import by_pieces
from octavo.ops.triton.quantize import quantize_rows

_FACTORS = ("identity", "silu", "sigmoid", "softplus")
_LANES = 32  # channels of a program that keeps several numbers for each
_CONV_LANES = 128


@triton.jit
def _factor(x, KIND: tl.constexpr):
    """Return function number KIND of `_FACTORS` of x, float32."""
    if KIND == 0:
        return x
    elif KIND == 1:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 2:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return _softplus(x)


@triton.jit
def _softplus(x):
    """Return log(1 + e^x) as max(x, 0) + 2 artanh(y / (2 + y)) with y = e^-|x|."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    p = 2.0 / 13 + square * (2.0 / 15)
    p = 2.0 / 9 + square * (2.0 / 11 + square * p)
    p = 2.0 + square * (2.0 / 3 + square * (2.0 / 5 + square * (2.0 / 7 + square * p)))
    return tl.maximum(x, 0.0) + p * s


@triton.jit
def _multiply(
    x, x_stride, y, y_stride, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Program (n, c) computes piece c of row n."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + n * x_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    of_column = tl.load(y + n * y_stride + column // SHARED, mask=column < WIDTH, other=0.0)
    factors = _factor(of_column.to(tl.float32), KIND)
    tl.store(out + n * WIDTH + column, (values * factors).to(out.dtype.element_ty), mask=column < WIDTH)


def multiply(x: Tensor, y: Tensor, activation: str = "identity", consumer: LinearWeight | None = None) -> Tensor:
    """`Ops.multiply`: return x * f(y) of x [T, N] and y [T, N / shared]."""
    rows, width = x.shape
    shared = width // y.shape[1]
    assert len(x) == len(y) and shared * y.shape[1] == width
    assert all(part.shape[1] == 1 or part.stride(1) == 1 for part in (x, y))
    codes_dtype: torch.dtype | None = getattr(consumer, "activation_dtype", None)
    out = torch.empty((rows, width), dtype=torch.float32 if codes_dtype else x.dtype, device=x.device)
    kind = _FACTORS.index(activation)
    by_pieces(_multiply, rows, width, 1024, x, x.stride(0), y, y.stride(0), out, KIND=kind, SHARED=shared)
    return out if codes_dtype is None else quantize_rows(out, codes_dtype)


@triton.jit
def _sequence(query_start_loc, seq_lens):
    """Return, in program (s, ...): first token and end of sequence s in the step, and its number of earlier tokens."""
    s = tl.program_id(0).to(tl.int64)
    begin = tl.load(query_start_loc + s).to(tl.int64)
    end = tl.load(query_start_loc + s + 1).to(tl.int64)
    return begin, end, tl.load(seq_lens + s) - (end - begin)


@triton.jit
def _is_left(slot_mapping, t, end):
    """Return whether token t is the last one of the sequence that writes its state's block."""
    following = tl.load(slot_mapping + t + 1, mask=t + 1 < end, other=-1)
    return following != tl.load(slot_mapping + t)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _conv(
    slot_mapping, query_start_loc, seq_lens, states, state_stride, x, x_stride, weight, bias, out,
    WIDTH: tl.constexpr, KERNEL: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Program (s, c) computes piece c of the channels. ROWS is KERNEL - 1 rounded up to a power of two."""
    begin, end, num_before = _sequence(query_start_loc, seq_lens)
    if begin == end:
        return
    state = states + tl.load(slot_mapping + begin) * state_stride
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < WIDTH
    for t in range(begin, end):
        total = tl.zeros([LANES], tl.float32)
        if HAS_BIAS:
            total = tl.load(bias + lane, mask=inside, other=0.0)
        for j in tl.static_range(KERNEL):
            row = t - (KERNEL - 1) + j + 0 * lane.to(tl.int64)
            new = tl.load(x + row * x_stride + lane, mask=inside & (row >= begin), other=0.0).to(tl.float32)
            is_old = inside & (row < begin) & (num_before + 0 * lane > 0)
            old = tl.load(state + (row - begin + KERNEL - 1) * WIDTH + lane, mask=is_old, other=0.0)
            total = tl.fma(tl.load(weight + j * WIDTH + lane, mask=inside, other=0.0), new + old, total)
        tl.store(out + t * WIDTH + lane, _factor(total, KIND).to(out.dtype.element_ty), mask=inside)
    # Write states from the last token back to the one whose block holds the old state, which all tokens read. All rows
    # of a state are read before any is written, because rows may move within the block.
    kept = tl.arange(0, ROWS)[:, None]
    is_row = inside[None] & (kept < KERNEL - 1)
    first = tl.load(slot_mapping + begin)
    t = end - 1
    while t >= begin:
        slot = tl.load(slot_mapping + t)
        if _is_left(slot_mapping, t, end):
            row = t + 1 - (KERNEL - 1) + kept
            new = tl.load(x + row * x_stride + lane[None], mask=is_row & (row >= begin), other=0.0).to(tl.float32)
            is_old = is_row & (row < begin) & (num_before + 0 * kept > 0)
            old = tl.load(state + (row - begin + KERNEL - 1) * WIDTH + lane[None], mask=is_old, other=0.0)
            tl.debug_barrier()
            tl.store(states + slot * state_stride + kept * WIDTH + lane[None], new + old, mask=is_row)
        t = tl.where(slot == first, begin, t) - 1


def _of_sequences(states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Any, ...]:
    assert states.dtype is torch.float32 and states.stride(1) == 1 and slot_mapping.is_contiguous()
    assert slot_mapping.dtype is torch.int64 and query_start_loc.dtype is seq_lens.dtype is torch.int32
    return slot_mapping, query_start_loc, seq_lens, states, states.stride(0)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, states: Tensor, slot_mapping: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    """`Ops.causal_conv`."""
    kernel, width = weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    # Zeros, because later operations also read the padding rows of a step.
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _conv[(len(seq_lens), triton.cdiv(width, _CONV_LANES))](
        *_of_sequences(states, slot_mapping, query_start_loc, seq_lens), x, x.stride(0), weight, bias, out, WIDTH=width,
        KERNEL=kernel, ROWS=max(triton.next_power_of_2(kernel - 1), 1), HAS_BIAS=bias is not None,
        KIND=_FACTORS.index(activation), LANES=_CONV_LANES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _scan(
    slot_mapping, query_start_loc, seq_lens, states, state_stride, x, x_stride, time, time_stride, b,
    b_stride, c, c_stride, a, d, time_bias, out, time_min, time_max, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, HAS_TIME: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (s, p) computes the p-th piece of channels, group by group. ROWS is SIZE rounded up to a power of two."""
    begin, end, num_before = _sequence(query_start_loc, seq_lens)
    if begin == end:
        return
    state = states + tl.load(slot_mapping + begin) * state_stride
    PIECES: tl.constexpr = (GROUP + LANES - 1) // LANES
    group = tl.program_id(1) // PIECES
    within = tl.program_id(1) % PIECES * LANES + tl.arange(0, LANES)
    lane = group * GROUP + within
    inside = within < GROUP
    row = tl.arange(0, ROWS)
    has = (row < SIZE)[:, None] & inside[None]
    place = row[:, None] * CHANNELS + lane[None]
    h = tl.load(state + place, mask=has & (num_before + 0 * place > 0), other=0.0)
    rates = tl.load(a + (place if WIDE else 0 * row[:, None] + lane[None]), mask=has, other=0.0)
    step = tl.full([LANES], 1.0, tl.float32)
    for t in range(begin, end):
        values = tl.load(x + t * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
        if HAS_TIME:
            step = tl.load(time + t * time_stride + lane // HEAD, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                step += tl.load(time_bias + lane // HEAD, mask=inside, other=0.0)
            step = tl.minimum(tl.maximum(_softplus(step), time_min), time_max)
        write = tl.load(b + t * b_stride + group * SIZE + row, mask=row < SIZE, other=0.0).to(tl.float32)
        read = tl.load(c + t * c_stride + group * SIZE + row, mask=row < SIZE, other=0.0).to(tl.float32)
        h = tl.fma(h, tl.exp(step[None] * rates), write[:, None] * (step * values)[None])
        y = tl.sum(h * read[:, None], 0)
        if HAS_SKIP:
            y = tl.fma(values, tl.load(d + lane, mask=inside, other=0.0), y)
        tl.store(out + t * CHANNELS + lane, y.to(out.dtype.element_ty), mask=inside)
        if _is_left(slot_mapping, t, end):
            tl.store(states + tl.load(slot_mapping + t) * state_stride + place, h, mask=has)


def num_scan_floats(channels: int, num_groups: int, state_size: int) -> int:
    """`Ops.num_scan_floats`."""
    return channels * state_size


def selective_scan(
    x: Tensor, time: Tensor | None, b: Tensor, c: Tensor, a: Tensor, d: Tensor | None, time_bias: Tensor | None,
    time_limit: tuple[float, float], states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    """`Ops.selective_scan`."""
    channels, (groups, size) = x.shape[1], b.shape[1:]
    assert x.stride(1) == b.stride(2) == c.stride(2) == 1 and b.stride(1) == c.stride(1) == size
    assert a.is_contiguous() and (time is None or time.stride(1) == 1)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    group = channels // groups
    _scan[(len(seq_lens), groups * triton.cdiv(group, _LANES))](
        *_of_sequences(states, slot_mapping, query_start_loc, seq_lens), x, x.stride(0), time,
        0 if time is None else time.stride(0), b, b.stride(0), c, c.stride(0), a, d, time_bias, out, *time_limit,
        CHANNELS=channels, GROUP=group, HEAD=1 if time is None else channels // time.shape[1], SIZE=size,
        ROWS=triton.next_power_of_2(size), HAS_TIME=time is not None, HAS_BIAS=time_bias is not None,
        HAS_SKIP=d is not None, WIDE=a.dim() == 2, LANES=_LANES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _delta(
    slot_mapping, query_start_loc, seq_lens, states, state_stride, query, query_stride, key, key_stride,
    value, value_stride, decay, decay_stride, beta, beta_stride, a, decay_bias, beta_scale, lowest, out,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, BY_ELEMENT: tl.constexpr, BOUNDED: tl.constexpr, ALTERNATES: tl.constexpr,
):  # fmt: skip
    """Program (s, p) computes the p-th piece of values, head by head."""
    begin, end, num_before = _sequence(query_start_loc, seq_lens)
    if begin == end:
        return
    state = states + tl.load(slot_mapping + begin) * state_stride
    PIECES: tl.constexpr = (WIDTH + LANES - 1) // LANES
    head = tl.program_id(1) // PIECES
    lane = tl.program_id(1) % PIECES * LANES + tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    has = (row < SIZE)[:, None] & (lane < WIDTH)[None]
    place = (head * SIZE + row[:, None]) * WIDTH + lane[None]
    h = tl.load(state + place, mask=has & (num_before + 0 * place > 0), other=0.0)
    rate = tl.load(a + head)
    if BY_ELEMENT:
        decays, bias = head * SIZE + row, 0.0
    else:
        decays, bias = head, tl.load(decay_bias + head)
    key_head = head % KEY_HEADS if ALTERNATES else head // (HEADS // KEY_HEADS)
    first = key_head * SIZE
    for t in range(begin, end):
        q = tl.load(query + t * query_stride + first + row, mask=row < SIZE, other=0.0).to(tl.float32)
        k = tl.load(key + t * key_stride + first + row, mask=row < SIZE, other=0.0).to(tl.float32)
        v = tl.load(value + t * value_stride + head * WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        if BY_ELEMENT:
            # Biases are loaded again for each token, because they would take registers from the state.
            raw = tl.load(decay + t * decay_stride + decays, mask=row < SIZE, other=0.0).to(tl.float32)
            raw += tl.load(decay_bias + decays, mask=row < SIZE, other=0.0)
        else:
            raw = tl.load(decay + t * decay_stride + decays).to(tl.float32) + bias
        exponent = lowest * _factor(-rate * raw, 2) if BOUNDED else rate * _softplus(raw)
        kept = tl.exp(exponent)[:, None] if BY_ELEMENT else tl.exp(exponent)
        e = beta_scale * _factor(tl.load(beta + t * beta_stride + head).to(tl.float32), 2)
        h = h * kept
        change = e * (v - tl.sum(h * k[:, None], 0))
        h = tl.fma(k[:, None] + tl.zeros_like(h), change[None] + tl.zeros_like(h), h)
        y = tl.sum(h * q[:, None], 0)
        tl.store(out + (t * HEADS + head) * WIDTH + lane, y.to(out.dtype.element_ty), mask=lane < WIDTH)
        if _is_left(slot_mapping, t, end):
            tl.store(states + tl.load(slot_mapping + t) * state_stride + place, h, mask=has)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, a: Tensor, decay_bias: Tensor,
    beta_scale: float, states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    lowest: float = 0.0, alternates: bool = False,
) -> Tensor:  # fmt: skip
    """`Ops.gated_delta`."""
    (rows, heads, width), (key_heads, size) = value.shape, key.shape[1:]
    assert query.stride(1) == key.stride(1) == size and value.stride(1) == width
    assert query.stride(2) == key.stride(2) == value.stride(2) == decay.stride(1) == beta.stride(1) == 1
    out = torch.zeros((rows, heads * width), dtype=value.dtype, device=value.device)
    by_element = decay.shape[1] != heads
    lanes = _LANES // 2 if by_element else _LANES  # decays of all rows take registers
    _delta[(len(seq_lens), heads * triton.cdiv(width, lanes))](
        *_of_sequences(states, slot_mapping, query_start_loc, seq_lens), query, query.stride(0), key, key.stride(0),
        value, value.stride(0), decay, decay.stride(0), beta, beta.stride(0), a, decay_bias, beta_scale, lowest, out,
        HEADS=heads, KEY_HEADS=key_heads, SIZE=size, ROWS=triton.next_power_of_2(size), WIDTH=width, LANES=lanes,
        BY_ELEMENT=by_element, BOUNDED=lowest != 0.0, ALTERNATES=alternates, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _recurrence(
    slot_mapping, query_start_loc, seq_lens, states, state_stride, x, x_stride, input_gate, input_stride,
    decay_gate, decay_stride, a, input_bias, decay_bias, out, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (s, c) computes piece c of the channels."""
    begin, end, num_before = _sequence(query_start_loc, seq_lens)
    if begin == end:
        return
    state = states + tl.load(slot_mapping + begin) * state_stride
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < WIDTH
    rate = tl.load(a + lane, mask=inside, other=0.0)
    of_input = tl.load(input_bias + lane, mask=inside, other=0.0)
    of_decay = tl.load(decay_bias + lane, mask=inside, other=0.0)
    h = tl.load(state + lane, mask=inside & (num_before + 0 * lane > 0), other=0.0)
    for t in range(begin, end):
        row = tl.load(x + t * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
        opened = tl.load(input_gate + t * input_stride + lane, mask=inside, other=0.0).to(tl.float32)
        gated = row * _factor(opened + of_input, 2)
        decay = tl.load(decay_gate + t * decay_stride + lane, mask=inside, other=0.0).to(tl.float32)
        exponent = rate * _factor(decay + of_decay, 2)
        root = tl.sqrt(tl.maximum(1.0 - tl.exp(exponent + exponent), 0.0))
        is_first = (t == begin) & (num_before == 0)
        h = tl.fma(tl.exp(exponent), h, tl.where(is_first, gated, root * gated))
        tl.store(out + t * WIDTH + lane, h.to(out.dtype.element_ty), mask=inside)
        if _is_left(slot_mapping, t, end):
            tl.store(states + tl.load(slot_mapping + t) * state_stride + lane, h, mask=inside)


def gated_recurrence(
    x: Tensor, input_gate: Tensor, decay_gate: Tensor, a: Tensor, input_bias: Tensor, decay_bias: Tensor,
    states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    """`Ops.gated_recurrence`."""
    width = x.shape[1]
    assert x.shape == input_gate.shape == decay_gate.shape
    assert x.stride(1) == input_gate.stride(1) == decay_gate.stride(1) == 1
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _recurrence[(len(seq_lens), triton.cdiv(width, _LANES))](
        *_of_sequences(states, slot_mapping, query_start_loc, seq_lens), x, x.stride(0), input_gate,
        input_gate.stride(0), decay_gate, decay_gate.stride(0), a, input_bias, decay_bias, out, WIDTH=width,
        LANES=_LANES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
