"""The reference backend: what each operation of `octavo.ops.Ops` means, in the plainest torch.

Every kernel is tested against it. It makes no promise about speed or about bitwise row independence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import (
    BIAS_PADDING,
    NO_TOKEN,
    AdapterTable,
    Expand,
    ExpandExperts,
    ExpertsWeight,
    LayerKVCache,
    LinearWeight,
    Lookup,
    Routing,
)
from octavo.ops.torch_adapters import (
    TorchAdapterTable,
    TorchExpertsTable,
    adapter_table,
    allocate_arena,
    expand_rows,
    experts_adapter_table,
    looked_up,
    rows_by_adapter,
    shrink_rows,
)
from octavo.ops.torch_arrays import DTYPES, to_torch
from octavo.ops.torch_ops import (
    add_bias,
    add_chosen,
    add_rows,
    gather_blocks,
    keep_tokens,
    keys_of,
    logprobs,
    normalize,
    pool,
    process_row,
    replace_rows,
    resolve_step,
    rows_of,
    scatter_blocks,
    top_tokens,
)
from octavo.quantization import StoredWeight, dequantize

__all__ = [
    "DenseWeight", "activation", "adapter_table", "add", "add_bias", "add_chosen", "add_rows", "allocate_arena",
    "allocate_kv_cache", "argmax", "begin_step", "causal_conv", "copy_blocks", "embedding", "experts",
    "experts_adapter_table", "fake_quantize",
    "gated_delta", "gated_recurrence", "gather_blocks", "keep_tokens", "keys_of", "latent_attention", "layer_norm",
    "linear", "linear_activated", "linear_add", "linear_by_head", "linear_silu_and_mul", "logprobs",
    "mask_tokens", "multiply",
    "normalize", "num_scan_floats", "pack_linear", "paged_attention", "penalize", "place", "pool", "process_row",
    "quantize", "replace_rows", "resolve_step", "rms_norm", "rotary_and_cache", "rotate", "route", "row_classes",
    "rows_by_adapter", "rows_of", "sample", "scatter_blocks", "selective_scan", "shrink", "stack_experts",
    "sum_by_segments", "take_rows", "top_tokens",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """An unpacked matrix [out_features, in_features]; gate lies before up. Of integers it is what they stand for, but
    for the minima [out_features, ceil(in_features / 32)], which multiply sums of activations rounded to bfloat16."""

    weight: Tensor
    bias: Tensor | None = None
    is_quantized: bool = False
    minima: Tensor | None = None
    gated: bool = False

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def takes_float32(self) -> bool:
        return self.is_quantized

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class DenseExperts:
    weights: list[DenseWeight]

    @property
    def num_experts(self) -> int:
        return len(self.weights)

    @property
    def out_features(self) -> int:
        return self.weights[0].out_features

    @property
    def in_features(self) -> int:
        return self.weights[0].in_features

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)


place = to_torch


def pack_linear(parts: Sequence[StoredWeight], bias: NDArray[Any] | None = None, gated: bool = False) -> DenseWeight:
    """Matrices of few bits become what they stand for, in the type of the floats beside them or float32; so this is
    the reference of products with activations that are not quantized."""
    floats = [part.tensors["data"] for part in parts if part.format in ("F32", "F16", "BF16")]
    dtype = floats[0].dtype.name if floats else "float32"
    tensors = [to_torch(dequantize(part, dtype)) for part in parts]
    return DenseWeight(torch.cat(tensors), None if bias is None else to_torch(bias), gated=gated)


def _without_outliers(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., groups, 32] -> x with zeros for outliers, and those: of each 32 the elements, two at most, that exceed
    3 times the next magnitude. Of the two ways to part them the one that takes more, if the largest is finite and at
    least 2^-100."""
    magnitudes = x.abs().nan_to_num(torch.inf)
    largest = magnitudes.amax(-1, keepdim=True)
    second = magnitudes.masked_fill(magnitudes >= largest, 0.0).amax(-1, keepdim=True)
    third = magnitudes.masked_fill(magnitudes >= second, 0.0).amax(-1, keepdim=True)

    def parted(least: Tensor, following: Tensor) -> Tensor:
        taken = magnitudes >= least
        return taken & (least > 3 * following) & (taken.sum(-1, keepdim=True) <= 2)

    of_two = parted(second, third)
    kept_apart = torch.where(of_two.any(-1, keepdim=True), of_two, parted(largest, second))
    kept_apart &= largest.isfinite() & (largest >= 2.0**-100)
    return torch.where(kept_apart, 0.0, x), torch.where(kept_apart, x, 0.0)


def _quantized_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> int8 times a float32 scale in float64, absmax / 127, and outliers: both [..., groups, 32]. A group
    that is not finite is NaN; one below 2^-100 is zero."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 32)).reshape(*x.shape[:-1], -1, 32)
    groups, outliers = _without_outliers(groups)
    absmax = groups.abs().amax(-1, keepdim=True)
    # Two tensors are truly divided; a number over a tensor is a product with the reciprocal.
    largest = torch.full_like(absmax, 127)
    q = (groups * (largest / absmax)).round()
    out = q.double() * (absmax / largest).double()
    out = torch.where(absmax < 2.0**-100, 0.0, out)
    return torch.where(absmax.isfinite(), out, float("nan")), outliers.double()


def fake_quantize(x: Tensor) -> Tensor:
    """x [..., K] as integer matrices see it, in float64."""
    quantized, outliers = _quantized_groups(x)
    return (quantized + outliers).flatten(-2)[..., : x.shape[-1]]


def quantize(x: Tensor, consumer: LinearWeight) -> Tensor:
    assert isinstance(consumer, DenseWeight)
    return fake_quantize(x) if consumer.is_quantized else x


def _product(x: Tensor, weight: LinearWeight, what: Expand | None = None) -> Tensor:
    assert isinstance(weight, DenseWeight)
    dtype = torch.float64 if weight.is_quantized else torch.float32
    out = quantize(x, weight).to(dtype) @ weight.weight.to(dtype).T
    if weight.minima is not None:
        quantized, outliers = _quantized_groups(x)
        sums = quantized.sum(-1).float().bfloat16().to(dtype) + outliers.sum(-1)
        out = out + sums @ weight.minima.to(dtype).T
    if what is not None:
        return expand_rows(out.float(), weight.bias, what)
    return out if weight.bias is None else out + weight.bias.to(dtype)


def _float_output(x: Tensor, out_dtype: str | None) -> torch.dtype:
    return DTYPES[out_dtype] if out_dtype else (torch.float32 if x.dtype is torch.float64 else x.dtype)


def _rounded(out: Tensor, dtype: torch.dtype, consumer: LinearWeight | None) -> Tensor:
    """Outputs as the consumer takes them: in a `dtype`, if not quantized."""
    return fake_quantize(out) if isinstance(consumer, DenseWeight) and consumer.is_quantized else out.to(dtype)


def linear(x: Tensor, weight: LinearWeight, out_dtype: str | None = None, expand: Expand | None = None) -> Tensor:
    return _product(x, weight, expand).to(_float_output(x, out_dtype))


def linear_add(
    x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0, expand: Expand | None = None
) -> None:
    residual.copy_(residual.float() + scale * _product(x, weight, expand))


def linear_silu_and_mul(
    x: Tensor, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
    activation: str = "silu", expand: Expand | None = None,
) -> Tensor:  # fmt: skip
    gate, up = _product(x, gate_up, expand).chunk(2, dim=-1)
    out = _ACTIVATIONS[activation](gate) * up
    return _rounded(out, _float_output(x, out_dtype), consumer)


def linear_activated(
    x: Tensor, weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
    out_dtype: str | None = None, expand: Expand | None = None,
) -> Tensor:  # fmt: skip
    return _rounded(_ACTIVATIONS[activation](_product(x, weight, expand)), _float_output(x, out_dtype), consumer)


def shrink(x: Tensor, table: AdapterTable, slots: Tensor, weight: LinearWeight) -> Tensor:
    assert isinstance(table, TorchAdapterTable) and table.shape.num_in == weight.in_features
    return shrink_rows(x.float(), table, slots)


def stack_experts(experts: Iterable[LinearWeight], num_experts: int) -> DenseExperts:
    weights = []
    for weight in experts:
        assert isinstance(weight, DenseWeight)
        weights.append(weight)
    assert len(weights) == num_experts
    return DenseExperts(weights)


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if routing.softcap > 0:
        logits = routing.softcap * torch.tanh(logits / routing.softcap)
    if routing.scoring == "sparsemixer":
        return _sparsemixer(logits, routing)
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if routing.group_by_two else logits
    if bias is not None:
        choice = (logits if routing.bias_logits else scores) + bias
    if routing.kept_groups < routing.num_groups:
        groups = choice.reshape(len(choice), routing.num_groups, -1)
        best = groups.topk(2 if routing.group_by_two else 1, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _largest(best, routing.kept_groups), True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = _largest(choice, routing.top_k)
    weights = scores.gather(-1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    return ids.int(), weights if scales is None else weights * scales[ids]


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest along the last dimension, largest first; of equals the first first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    left, ids, weights = logits, [], []
    for _ in range(routing.top_k):
        largest = left.amax(-1, keepdim=True)
        is_far = (largest - logits) / torch.maximum(logits.abs(), largest) > 2 * routing.jitter
        best = _largest(left, 1)
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, best))
        left = left.scatter(-1, best, float("-inf"))
        ids.append(best)
    return torch.cat(ids, -1).int(), torch.cat(weights, -1)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str = "silu",
    clamp: tuple[float, float] | None = None, scales_inputs: bool = False, first_expert: int = 0, segments: int = 1,
    expand: ExpandExperts | None = None,
) -> Tensor:  # fmt: skip
    def added(table: Any, expert: int, tokens: Tensor, x: Tensor, weight: LinearWeight) -> Expand | None:
        if expand is None or table is None:
            return None
        assert isinstance(table, TorchExpertsTable)
        slots = expand.slots[tokens]
        return Expand(table.experts[expert], slots, shrink(x, table.experts[expert], slots, weight))

    assert isinstance(gate_up, DenseExperts) and isinstance(down, DenseExperts)
    out = torch.zeros(len(x), down.out_features, device=x.device)
    for e, (first, second) in enumerate(zip(gate_up.weights, down.weights, strict=True)):
        tokens, choices = torch.where(ids == first_expert + e)
        if len(tokens) == 0:
            continue
        scales, rows = weights[tokens, choices, None], x[tokens]
        if scales_inputs:
            rows = rows * scales if first.is_quantized else (rows * scales).to(x.dtype)
        what = None if expand is None else added(expand.gate_up, e, tokens, quantize(rows, first), first)
        outputs = _product(rows, first, what).float()
        gate, up = outputs.chunk(2, dim=-1) if first.gated else (outputs, torch.ones_like(outputs))
        if clamp is None:
            inner = _ACTIVATIONS[activation](gate) * up
        else:
            slope, limit = clamp
            gate = gate.clamp(max=limit)
            inner = gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + 1)
        inner = _rounded(inner, second.weight.dtype, second)
        what = None if expand is None else added(expand.down, e, tokens, quantize(inner, second), second)
        y = _product(inner, second, what).float()
        out[tokens] += y if scales_inputs else scales * y
    return out


def sum_by_segments(weight: LinearWeight, segments: int) -> int:
    """Sums have no order here."""
    return 1


def embedding(
    token_ids: Tensor, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0,
    adapted: Lookup | None = None,
) -> Tensor:  # fmt: skip
    assert isinstance(weight, DenseWeight)
    rows = weight.weight[token_ids.long()]
    if weight.minima is not None:
        rows = rows + weight.minima[token_ids.long()].repeat_interleave(32, 1)[:, : rows.shape[1]]
    default = torch.float32 if weight.is_quantized else rows.dtype
    found = rows.float() if adapted is None else looked_up(rows.float(), token_ids, adapted)
    return (found * scale).to(DTYPES[out_dtype] if out_dtype else default)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float, consumer: LinearWeight | None = None) -> Tensor:
    x32 = x.float()
    out = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
    return _rounded(out, x.dtype, consumer)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, consumer: LinearWeight | None = None
) -> Tensor:
    x32 = x.float()
    centered = x32 - x32.mean(-1, keepdim=True)
    out = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        out = out + bias.float()
    return _rounded(out, x.dtype, consumer)


def add(residual: Tensor, x: Tensor, scale: float = 1.0) -> None:
    residual.copy_(residual.float() + scale * x.float())


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "xielu": lambda x, a, c, b, e: torch.where(x > 0, a * x * x, c * (torch.expm1(x.clamp(max=e)) - x)) + b * x,
    "softcap": lambda x, cap: cap * torch.tanh(x / cap),
    "clip": lambda x, limit: x.clamp(-limit, limit),
}


def activation(
    x: Tensor, kind: str, consumer: LinearWeight | None = None, parameters: tuple[float, ...] = ()
) -> Tensor:
    out = _ACTIVATIONS[kind](x.float(), *parameters)
    return _rounded(out, x.dtype, consumer)


_FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
}


def multiply(x: Tensor, y: Tensor, activation: str = "identity", consumer: LinearWeight | None = None) -> Tensor:
    factors = _FACTORS[activation](y.float()).repeat_interleave(x.shape[1] // y.shape[1], 1)
    return _rounded(x.float() * factors, x.dtype, consumer)


def _over_states(
    size: int, states: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of each sequence that leave one state, and that state [size] as it is before them, zeroed where the sequence
    begins; what is written there is kept."""
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
        out[rows] = _FACTORS[activation](y).to(x.dtype)
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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]; cos, sin [T, 1, R/2]: rotate the first R elements of each head as two halves."""
    half = cos.shape[-1]
    x32 = x.float()
    a, b, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    x.copy_(_rotate(x, *cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)))


def rotary_and_cache(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, cos_sin: Tensor, cache: LayerKVCache,
    slot_mapping: Tensor, query_scales: Tensor | None = None, axes: Tensor | None = None,
) -> None:  # fmt: skip
    rows = cos_sin[positions]
    if axes is not None:  # [3, T, R] -> [T, R]
        pairs = torch.cat([axes, axes]).long()
        rows = rows.gather(0, pairs.expand(1, rows.shape[1], -1))[0]
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    query.copy_(_rotate(query, cos, sin))
    if query_scales is not None:
        query.copy_(query.float() * query_scales[positions][:, None, None])
    block_size = cache.key.shape[1]
    has_slot = slot_mapping >= 0
    block, offset = slot_mapping[has_slot] // block_size, slot_mapping[has_slot] % block_size
    rotated = _rotate(key, cos, sin)
    for i, (part, rows) in enumerate(((cache.key, rotated), (cache.value, value))):
        elements, scales = _to_cache(rows[has_slot], part.dtype)
        _bytes_of(part)[block, offset] = _bytes_of(elements)
        if cache.scales is not None:
            cache.scales[block, offset, :, i] = scales.to(cache.scales.dtype)


def _bytes_of(x: Tensor) -> Tensor:
    """Eight-bit floats as bytes: not every device copies them by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _to_cache(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows x [..., D] as the cache holds them, and their scales [...] (`LayerKVCache`). Rows that are not finite have
    the scale NaN."""
    largest = x.float().abs().amax(-1, keepdim=True)
    if dtype.itemsize > 1:
        return x.to(dtype), largest[..., 0]
    if dtype is torch.int8:
        bits = (largest / 127).view(torch.int32)
        scale = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    else:
        bits = (largest / torch.finfo(dtype).max).view(torch.int32)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    # Quotients of the smallest numbers are not finite.
    is_zero = largest < 2.0**-100
    scale = torch.where(is_zero, 0.0, torch.where(largest.isfinite(), scale, float("nan")))
    quotients = torch.where(is_zero | ~largest.isfinite(), 0.0, x.float() / scale)
    return (quotients.round() if dtype is torch.int8 else quotients).to(dtype), scale[..., 0]


def row_classes(max_rows: int) -> list[int]:
    """One function serves all."""
    return [max_rows]


def begin_step(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Nothing is worked out beforehand."""


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
    bidirectional: bool = False, distance_biases: Tensor | None = None, key_ends: Tensor | None = None,
    value_size: int | None = None,
) -> Tensor:  # fmt: skip
    num_tokens, num_heads, head_size = query.shape
    assert cache.value.shape[3] == (value_size or head_size)
    group = num_heads // cache.key.shape[2]
    out = query.new_zeros(num_tokens, num_heads, cache.value.shape[3])
    for s, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        blocks = block_tables[s, : -(-seq_len // cache.key.shape[1])].long()
        keys, values = (
            _bytes_of(part)[blocks].view(part.dtype).flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
            for part in (cache.key, cache.value)
        )
        if cache.scales is not None:
            scales = cache.scales[blocks].flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
            keys, values = keys * scales[..., :1], values * scales[..., 1:]
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        positions = torch.arange(seq_len, device=query.device)
        own = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        distance = own[:, None] - positions[None, :]
        if slopes is not None:
            scores = scores - slopes[:, None, None] * distance
        if distance_biases is not None:
            reach = (distance_biases.shape[1] - BIAS_PADDING) // 2
            scores = scores + distance_biases[:, reach - distance]
        hidden = distance < 0 if not bidirectional else torch.zeros_like(distance, dtype=torch.bool)
        if key_ends is not None:
            hidden &= positions[None, :] >= key_ends[start:end, None]
        if sliding_window > 0:
            hidden |= (distance.abs() if bidirectional else distance) >= sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - start, 1)], -1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out.view(num_tokens, -1)


def linear_by_head(x: Tensor, weight: ExpertsWeight) -> Tensor:
    assert isinstance(weight, DenseExperts)
    return torch.stack([linear(x[:, head], matrix) for head, matrix in enumerate(weight.weights)], 1)


def latent_attention(
    query: Tensor, rotated: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    (num_tokens, num_heads, size), rotated_size = query.shape, rotated.shape[2]
    key, value = cache.key.float(), cache.value.float()
    if cache.scales is not None:
        scales = cache.scales.float()
        key, value = key * scales[..., :1], value * scales[..., 1:]
    joint = LayerKVCache(torch.cat([key, value], -1), torch.cat([key * 0, value], -1))
    both = torch.cat([rotated, query], -1)
    attended = paged_attention(both, joint, block_tables, query_start_loc, seq_lens, scale)
    return attended.view(num_tokens, num_heads, rotated_size + size)[..., rotated_size:]


def argmax(logits: Tensor) -> Tensor:
    # NaN is the largest of all where there is one.
    return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), NO_TOKEN)


def penalize(
    logits: Tensor, samples: NDArray[Any], tokens: NDArray[Any], counts: NDArray[Any], repetition: NDArray[Any],
    frequency: NDArray[Any], presence: NDArray[Any],
) -> None:  # fmt: skip
    for s, t, count in zip(samples.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        logit = logits[s, t]
        logits[s, t] = logit / repetition[s] if logit > 0 else logit * repetition[s]
        logits[s, t] -= frequency[s] * count + presence[s] * (count > 0)


def mask_tokens(logits: Tensor, words: NDArray[Any], samples: NDArray[Any]) -> None:
    bits = (to_torch(words)[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    is_allowed = torch.zeros(len(samples), logits.shape[1], dtype=torch.bool)
    known = bits.flatten(1)[:, : logits.shape[1]].bool()
    is_allowed[:, : known.shape[1]] = known
    rows = to_torch(samples)
    logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    best = argmax(logits).tolist()
    tokens = []
    for r in range(len(logits)):
        if temperature[r] == 0 or best[r] == NO_TOKEN:
            tokens.append(best[r])
            continue
        probs = ((logits[r] - logits[r].max()) / temperature[r]).double().softmax(-1)
        probs[probs < min_p[r] * probs.max()] = 0
        if 0 < top_k[r] < len(probs):
            probs[probs < probs.topk(int(top_k[r])).values[-1]] = 0
        if top_p[r] < 1:
            ranked = probs.sort(descending=True).values
            last = int((ranked.cumsum(-1) < top_p[r] * probs.sum()).sum())
            probs[probs < ranked[min(last, len(ranked) - 1)]] = 0
        times = exponentials(float(uniforms[r]), len(probs)) / probs.cpu()
        tokens.append(int(times.nan_to_num(torch.inf).argmin()))
    return torch.tensor(tokens, device=logits.device)


def exponentials(uniform: float, count: int) -> Tensor:
    """[count] float64: the exponential number of each token, as `Ops.sample` has them."""
    bits = int(uniform * 2**53)
    low, high = bits & 0xFFFFFFFF, (bits >> 32) * 0x27D4EB2F
    tokens = np.arange(count, dtype=np.uint32)

    def mixed(x: NDArray[np.uint32], *steps: int) -> NDArray[np.uint32]:
        for shift, factor in zip(steps[::2], (*steps[1::2], 1), strict=True):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x

    x = mixed(tokens * np.uint32(0x9E3779B1) + np.uint32(low), 16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
    parts = [
        mixed(x + np.uint32((high + more) & 0xFFFFFFFF), 16, 0x7FEB352D, 15, 0x846CA68B, 16) for more in (0, 0x165667B1)
    ]
    coarse, rest = (torch.from_numpy(part.astype(np.float64)) for part in parts)
    return -torch.log1p(-(coarse + (rest + 0.5) * 2**-32) * 2**-32)


def copy_blocks(pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
    for source, destination in pairs:
        for cache in caches:
            for part in cache.arrays:
                part[destination] = part[source]


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str, value_size: int | None = None
) -> LayerKVCache:
    shape, element = (num_blocks, block_size, num_kv_heads), DTYPES[dtype]
    key, value = (torch.empty(*shape, size, dtype=element) for size in (head_size, value_size or head_size))
    scales = torch.empty((*shape, 2), dtype=torch.bfloat16) if element.itemsize == 1 else None
    return LayerKVCache(key, value, scales)
