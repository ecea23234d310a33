"""Operations with a state in the native backend: short convolutions, selective scans, the gated delta rule and gated
recurrences.

A state is stored in tiles of channels, so that a task reads contiguous memory (csrc/cpu/recurrent.h).
"""

from typing import Any

from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import LoadError
from octavo.ops.cpu_arrays import FLOAT32, INT32, INT64, code_of, is_dense, require, stride
from octavo.ops.cpu_program import check_inputs, empty


def num_scan_floats(channels: int, num_groups: int, state_size: int) -> int:
    if state_size > _cpu.MAX_STATE_SIZE:
        raise LoadError(f"states of {state_size} are not built for CPUs; up to {_cpu.MAX_STATE_SIZE} are.")
    return num_groups * _padded(channels // num_groups) * state_size


def _padded(channels: int) -> int:
    tile: int = _cpu.STATE_TILE
    return -(-channels // tile) * tile


def _sequences(
    op: str, num_floats: int, states: NDArray[Any], slot_mapping: NDArray[Any], query_start_loc: NDArray[Any],
    seq_lens: NDArray[Any],
) -> dict[str, Any]:  # fmt: skip
    """Check the sequences and their states; return the arguments that describe them to the kernels."""
    require(states.dtype == FLOAT32 and is_dense(states) and states.shape[1] >= num_floats)
    require(slot_mapping.dtype == INT64 and query_start_loc.dtype == seq_lens.dtype == INT32)
    require(is_dense(slot_mapping) and is_dense(query_start_loc) and is_dense(seq_lens))
    check_inputs(op, slot_mapping=slot_mapping, query_start_loc=query_start_loc, seq_lens=seq_lens)
    return {
        "states": states, "state_stride": stride(states), "num_blocks": len(states), "slots": slot_mapping,
        "query_start": query_start_loc, "seq_lens": seq_lens, "num_seqs": len(seq_lens),
    }  # fmt: skip


def _by_row(**arrays: NDArray[Any]) -> dict[str, Any]:
    """Return rows [T, ...] by name, and their strides in elements as `NAME_stride`. The elements of a row must be
    contiguous."""
    for x in arrays.values():
        require(is_dense(x) and (x.ndim == 2 or x.shape[1] == 1 or x.strides[1] == x.shape[2] * x.itemsize))
    return arrays | {f"{name}_stride": stride(x) for name, x in arrays.items()}


def _is_constant(x: NDArray[Any] | None, *shape: int) -> bool:
    return x is None or (x.shape == shape and x.dtype == FLOAT32 and bool(x.flags.c_contiguous))


def causal_conv(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, activation: str, states: NDArray[Any],
    slot_mapping: NDArray[Any], query_start_loc: NDArray[Any], seq_lens: NDArray[Any],
) -> NDArray[Any]:  # fmt: skip
    (rows, width), kernel = x.shape, weight.shape[0]
    require(_is_constant(weight, kernel, width) and _is_constant(bias, width) and activation in ("identity", "silu"))
    if kernel > _cpu.MAX_CONV_KERNEL:
        raise LoadError(f"convolutions over {kernel} tokens are not built for CPUs; {_cpu.MAX_CONV_KERNEL} are.")
    check_inputs("causal_conv", x=x)
    sequences = _sequences("causal_conv", (kernel - 1) * width, states, slot_mapping, query_start_loc, seq_lens)
    out = empty(x.shape, x.dtype)
    _cpu.causal_conv(
        **sequences, **_by_row(x=x), rows=rows, dtype=code_of("causal_conv", x), out=out, weight=weight, bias=bias,
        width=width, kernel=kernel, kind=_cpu.ACTIVATIONS[activation],
    )  # fmt: skip
    return out


def selective_scan(
    x: NDArray[Any], time: NDArray[Any] | None, b: NDArray[Any], c: NDArray[Any], a: NDArray[Any],
    d: NDArray[Any] | None, time_bias: NDArray[Any] | None, time_limit: tuple[float, float], states: NDArray[Any],
    slot_mapping: NDArray[Any], query_start_loc: NDArray[Any], seq_lens: NDArray[Any],
) -> NDArray[Any]:  # fmt: skip
    (rows, channels), (groups, size) = x.shape, b.shape[1:]
    heads = channels if time is None else time.shape[1]
    require(b.shape == c.shape == (rows, groups, size) and channels % groups == channels % heads == 0)
    require(_is_constant(a, channels) or _is_constant(a, size, channels))
    require(_is_constant(d, channels) and _is_constant(time_bias, heads))
    inputs = {"x": x, "b": b, "c": c} | ({} if time is None else {"time": time})
    check_inputs("selective_scan", **inputs)
    num_floats = num_scan_floats(channels, groups, size)
    sequences = _sequences("selective_scan", num_floats, states, slot_mapping, query_start_loc, seq_lens)
    out = empty(x.shape, x.dtype)
    _cpu.selective_scan(
        **{"time": None, "time_stride": 0} | sequences | _by_row(**inputs), rows=rows,
        dtype=code_of("selective_scan", *inputs.values()), out=out, a=a, wide=a.ndim == 2, d=d, time_bias=time_bias,
        time_min=time_limit[0], time_max=time_limit[1], channels=channels, head_size=channels // heads, groups=groups,
        state_size=size,
    )  # fmt: skip
    return out


def gated_delta(
    query: NDArray[Any], key: NDArray[Any], value: NDArray[Any], decay: NDArray[Any], beta: NDArray[Any],
    a: NDArray[Any], decay_bias: NDArray[Any], beta_scale: float, states: NDArray[Any], slot_mapping: NDArray[Any],
    query_start_loc: NDArray[Any], seq_lens: NDArray[Any], lowest: float = 0.0, alternates: bool = False,
) -> NDArray[Any]:  # fmt: skip
    (rows, heads, width), (key_heads, size) = value.shape, key.shape[1:]
    by_element = decay.shape[1] != heads
    num_decays = heads * size if by_element else heads
    require(query.shape == key.shape and heads % key_heads == 0 and beta.shape == (rows, heads))
    require(decay.shape == (rows, num_decays) and _is_constant(a, heads) and _is_constant(decay_bias, num_decays))
    check_inputs("gated_delta", query=query, key=key, value=value, decay=decay, beta=beta)
    num_floats = num_scan_floats(heads * width, heads, size)
    sequences = _sequences("gated_delta", num_floats, states, slot_mapping, query_start_loc, seq_lens)
    out = empty((rows, heads * width), value.dtype)
    _cpu.gated_delta(
        **sequences, **_by_row(query=query, key=key, value=value, decay=decay, beta=beta), rows=rows,
        dtype=code_of("gated_delta", query, key, value, decay, beta), out=out, a=a, decay_bias=decay_bias,
        beta_scale=beta_scale, key_heads=key_heads, value_heads=heads, key_size=size, value_size=width,
        by_element=by_element, lowest=lowest, alternates=alternates,
    )  # fmt: skip
    return out


def gated_recurrence(
    x: NDArray[Any], input_gate: NDArray[Any], decay_gate: NDArray[Any], a: NDArray[Any], input_bias: NDArray[Any],
    decay_bias: NDArray[Any], states: NDArray[Any], slot_mapping: NDArray[Any], query_start_loc: NDArray[Any],
    seq_lens: NDArray[Any],
) -> NDArray[Any]:  # fmt: skip
    rows, width = x.shape
    require(x.shape == input_gate.shape == decay_gate.shape)
    require(all(_is_constant(constant, width) for constant in (a, input_bias, decay_bias)))
    check_inputs("gated_recurrence", x=x, input_gate=input_gate, decay_gate=decay_gate)
    num_floats = num_scan_floats(width, 1, 1)
    sequences = _sequences("gated_recurrence", num_floats, states, slot_mapping, query_start_loc, seq_lens)
    out = empty(x.shape, x.dtype)
    _cpu.gated_recurrence(
        **sequences, **_by_row(x=x, input=input_gate, decay=decay_gate), rows=rows,
        dtype=code_of("gated_recurrence", x, input_gate, decay_gate), out=out, a=a, input_bias=input_bias,
        decay_bias=decay_bias, width=width,
    )  # fmt: skip
    return out
