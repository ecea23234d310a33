"""The reference's operations with a state: convolutions and recurrences, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor

from tests.ops.ref_products import FACTORS


def _over_states(
    size: int, states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield, for each run of a sequence's rows with the same slot, the rows and a view of their state [size].

    The view holds the state before the rows, zeros at the beginning of a sequence. The caller writes the state after
    the rows into it."""
    slots, bounds = slot_mapping.tolist(), query_start_loc.tolist()
    for (begin, end), seq_len in zip(pairwise(bounds), seq_lens.tolist(), strict=True):
        before: Tensor | None = None
        for slot, numbers in groupby(range(begin, end), slots.__getitem__):
            rows, state = list(numbers), states[slot, :size]
            if before is not None:
                state.copy_(before)
            elif seq_len == end - begin:
                state.zero_()
            yield slice(rows[0], rows[-1] + 1), state
            before = state


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, states: Tensor, slot_mapping: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    kernel, width = weight.shape
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for rows, state in _over_states((kernel - 1) * width, states, slot_mapping, query_start_loc, seq_lens):
        seen = torch.cat([state.view(kernel - 1, width), x[rows].float()])
        y = torch.nn.functional.conv1d(seen.T[None], weight.T[:, None], bias, groups=width)[0].T
        out[rows] = FACTORS[activation](y).to(x.dtype)
        state.copy_(seen[len(seen) - kernel + 1 :].flatten())
    return out


def num_scan_floats(channels: int, num_groups: int, state_size: int) -> int:
    return channels * state_size


def selective_scan(
    x: Tensor, time: Tensor | None, b: Tensor, c: Tensor, a: Tensor, d: Tensor | None, time_bias: Tensor | None,
    time_limit: tuple[float, float], states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    (num_tokens, channels), (groups, size) = x.shape, b.shape[1:]
    x32, steps = x.float(), torch.ones(x.shape, device=x.device)
    if time is not None:
        biased = time.float() if time_bias is None else time.float() + time_bias
        steps = torch.nn.functional.softplus(biased).clamp(*time_limit)
        steps = steps.repeat_interleave(channels // time.shape[1], 1)
    b32, c32 = (part.float().repeat_interleave(channels // groups, 1) for part in (b, c))
    rates = a.T if a.dim() == 2 else a[:, None]
    y = torch.zeros(num_tokens, channels, device=x.device) if d is None else d * x32
    for rows, state in _over_states(channels * size, states, slot_mapping, query_start_loc, seq_lens):
        h = state.view(channels, size)
        for t in range(rows.start, rows.stop):
            step = steps[t, :, None]
            h.copy_(torch.exp(step * rates) * h + step * b32[t] * x32[t, :, None])
            y[t] += (h * c32[t]).sum(-1)
    return y.to(x.dtype)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, a: Tensor, decay_bias: Tensor,
    beta_scale: float, states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    lowest: float = 0.0, alternates: bool = False,
) -> Tensor:  # fmt: skip
    (num_tokens, heads, width), size = value.shape, key.shape[2]
    serving = torch.arange(heads, device=key.device)
    serving = serving % key.shape[1] if alternates else serving // (heads // key.shape[1])
    q, k = query.float()[:, serving], key.float()[:, serving]
    v, e = value.float(), beta_scale * beta.float().sigmoid()
    raw, rates = (decay.float() + decay_bias).view(num_tokens, heads, -1), a[:, None]
    g = torch.exp(lowest * (-rates * raw).sigmoid() if lowest else rates * torch.nn.functional.softplus(raw))
    y = torch.zeros(num_tokens, heads, width, device=value.device)
    for rows, state in _over_states(heads * size * width, states, slot_mapping, query_start_loc, seq_lens):
        memory = state.view(heads, size, width)
        for t in range(rows.start, rows.stop):
            memory *= g[t, :, :, None]
            change = e[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
            memory += k[t, :, :, None] * change[:, None]
            y[t] = torch.einsum("hkv,hk->hv", memory, q[t])
    return y.flatten(1).to(value.dtype)


def gated_recurrence(
    x: Tensor, input_gate: Tensor, decay_gate: Tensor, a: Tensor, input_bias: Tensor, decay_bias: Tensor,
    states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    gated = x.float() * (input_gate.float() + input_bias).sigmoid()
    exponents = a * (decay_gate.float() + decay_bias).sigmoid()
    y = torch.zeros_like(gated)
    roots = torch.sqrt(1 - torch.exp(2 * exponents))
    lengths = query_start_loc.diff()
    roots[query_start_loc[:-1][(lengths > 0) & (lengths == seq_lens)].long()] = 1.0
    for rows, state in _over_states(x.shape[1], states, slot_mapping, query_start_loc, seq_lens):
        for t in range(rows.start, rows.stop):
            state.copy_(torch.exp(exponents[t]) * state + roots[t] * gated[t])
            y[t] = state
    return y.to(x.dtype)
