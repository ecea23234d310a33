"""The reference backend: what each operation of `octavo.ops.Ops` means, in the plainest torch.

Every kernel is tested against it. It makes no promise about speed or about bitwise row independence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import NO_TOKEN, ExpertsWeight, LayerKVCache, LinearWeight, Routing
from octavo.ops.torch_arrays import DTYPES, to_torch
from octavo.ops.torch_ops import (
    add_bias,
    gather_blocks,
    keep_tokens,
    logprobs,
    normalize,
    process_row,
    resolve_step,
    rows_of,
    scatter_blocks,
    top_tokens,
)
from octavo.quantization import StoredWeight, dequantize

__all__ = [
    "DenseWeight", "activation", "add", "add_bias", "allocate_kv_cache", "argmax", "begin_step", "causal_conv",
    "copy_blocks", "embedding", "experts", "fake_quantize", "gated_delta", "gather_blocks", "keep_tokens",
    "layer_norm", "linear", "linear_add", "linear_silu_and_mul", "logprobs", "mask_tokens", "multiply", "normalize",
    "num_scan_floats", "pack_linear", "paged_attention", "penalize", "place", "process_row", "quantize",
    "resolve_step", "rms_norm", "rotary_and_cache", "rotate", "route", "row_classes", "rows_of", "sample",
    "scatter_blocks", "selective_scan", "stack_experts", "take_rows", "top_tokens",
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


def fake_quantize(x: Tensor) -> Tensor:
    """x [..., K] as integer matrices see it, in float64: 32 at a time as int8 times a float32 scale, absmax / 127.
    A block that is not finite is NaN; one below 2^-100 is zero."""
    k = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -k % 32)).reshape(*x.shape[:-1], -1, 32)
    absmax = blocks.abs().amax(-1, keepdim=True)
    # Two tensors are truly divided; a number over a tensor is a product with the reciprocal.
    largest = torch.full_like(absmax, 127)
    q = (blocks * (largest / absmax)).round()
    out = q.double() * (absmax / largest).double()
    out = torch.where(absmax < 2.0**-100, 0.0, out)
    out = torch.where(absmax.isfinite(), out, float("nan"))
    return out.flatten(-2)[..., :k]


def quantize(x: Tensor, consumer: LinearWeight) -> Tensor:
    assert isinstance(consumer, DenseWeight)
    return fake_quantize(x) if consumer.is_quantized else x


def _product(x: Tensor, weight: LinearWeight) -> Tensor:
    assert isinstance(weight, DenseWeight)
    dtype = torch.float64 if weight.is_quantized else torch.float32
    x = quantize(x, weight).to(dtype)
    out = x @ weight.weight.to(dtype).T
    if weight.minima is not None:
        sums = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).reshape(len(x), -1, 32).sum(-1)
        out = out + sums.float().bfloat16().to(dtype) @ weight.minima.to(dtype).T
    return out if weight.bias is None else out + weight.bias.to(dtype)


def _float_output(x: Tensor, out_dtype: str | None) -> torch.dtype:
    return DTYPES[out_dtype] if out_dtype else (torch.float32 if x.dtype is torch.float64 else x.dtype)


def _rounded(out: Tensor, dtype: torch.dtype, consumer: LinearWeight | None) -> Tensor:
    """Outputs as the consumer takes them: in a `dtype`, if not quantized."""
    return fake_quantize(out) if isinstance(consumer, DenseWeight) and consumer.is_quantized else out.to(dtype)


def linear(x: Tensor, weight: LinearWeight, out_dtype: str | None = None) -> Tensor:
    return _product(x, weight).to(_float_output(x, out_dtype))


def linear_add(x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0) -> None:
    residual.copy_(residual.float() + scale * _product(x, weight))


def linear_silu_and_mul(
    x: Tensor, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    gate, up = _product(x, gate_up).chunk(2, dim=-1)
    out = _ACTIVATIONS[activation](gate) * up
    return _rounded(out, _float_output(x, out_dtype), consumer)


def stack_experts(experts: Iterable[LinearWeight], num_experts: int) -> DenseExperts:
    weights = []
    for weight in experts:
        assert isinstance(weight, DenseWeight)
        weights.append(weight)
    assert len(weights) == num_experts
    return DenseExperts(weights)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
    return ids.int(), weights * routing.scale


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
    clamp: tuple[float, float] | None = None, scales_inputs: bool = False,
) -> Tensor:  # fmt: skip
    assert isinstance(gate_up, DenseExperts) and isinstance(down, DenseExperts)
    out = torch.zeros(len(x), down.out_features, device=x.device)
    for e, (first, second) in enumerate(zip(gate_up.weights, down.weights, strict=True)):
        tokens, choices = torch.where(ids == e)
        if len(tokens) == 0:
            continue
        scales, rows = weights[tokens, choices, None], x[tokens]
        if scales_inputs:
            rows = rows * scales if first.is_quantized else (rows * scales).to(x.dtype)
        gate, up = _product(rows, first).float().chunk(2, dim=-1)
        if clamp is None:
            inner = _ACTIVATIONS[activation](gate) * up
        else:
            slope, limit = clamp
            gate = gate.clamp(max=limit)
            inner = gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + 1)
        y = _product(_rounded(inner, second.weight.dtype, second), second).float()
        out[tokens] += y if scales_inputs else scales * y
    return out


def embedding(token_ids: Tensor, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0) -> Tensor:
    assert isinstance(weight, DenseWeight)
    rows = weight.weight[token_ids.long()]
    if weight.minima is not None:
        rows = rows + weight.minima[token_ids.long()].repeat_interleave(32, 1)[:, : rows.shape[1]]
    default = torch.float32 if weight.is_quantized else rows.dtype
    return (rows.float() * scale).to(DTYPES[out_dtype] if out_dtype else default)


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
}


def multiply(x: Tensor, y: Tensor, activation: str = "identity", consumer: LinearWeight | None = None) -> Tensor:
    return _rounded(x.float() * _FACTORS[activation](y.float()), x.dtype, consumer)


def _over_states(
    size: int, states: Tensor, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of each sequence and its state [size], zeroed where it begins; what is written there is kept."""
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(int(query_start_loc[s]), int(query_start_loc[s + 1]))
        if rows.start < rows.stop:
            state = states[int(block_tables[s, 0]), :size]
            if seq_len == rows.stop - rows.start:
                state.zero_()
            yield rows, state


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, states: Tensor, block_tables: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    kernel, width = weight.shape
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for rows, state in _over_states((kernel - 1) * width, states, block_tables, query_start_loc, seq_lens):
        seen = torch.cat([state.view(kernel - 1, width), x[rows].float()])
        y = torch.nn.functional.conv1d(seen.T[None], weight.T[:, None], bias, groups=width)[0].T
        out[rows] = _FACTORS[activation](y).to(x.dtype)
        state.copy_(seen[len(seen) - kernel + 1 :].flatten())
    return out


def num_scan_floats(channels: int, num_groups: int, state_size: int) -> int:
    return channels * state_size


def selective_scan(
    x: Tensor, time: Tensor | None, b: Tensor, c: Tensor, a: Tensor, d: Tensor | None, time_bias: Tensor | None,
    time_limit: tuple[float, float], states: Tensor, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
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
    for rows, state in _over_states(channels * size, states, block_tables, query_start_loc, seq_lens):
        h = state.view(channels, size)
        for t in range(rows.start, rows.stop):
            step = steps[t, :, None]
            h.copy_(torch.exp(step * rates) * h + step * b32[t] * x32[t, :, None])
            y[t] += (h * c32[t]).sum(-1)
    return y.to(x.dtype)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, a: Tensor, decay_bias: Tensor,
    beta_scale: float, states: Tensor, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
) -> Tensor:  # fmt: skip
    (num_tokens, heads, width), size = value.shape, key.shape[2]
    q, k = (part.float().repeat_interleave(heads // key.shape[1], 1) for part in (query, key))
    v, e = value.float(), beta_scale * beta.float().sigmoid()
    g = torch.exp(a * torch.nn.functional.softplus(decay.float() + decay_bias))
    y = torch.zeros(num_tokens, heads, width, device=value.device)
    for rows, state in _over_states(heads * size * width, states, block_tables, query_start_loc, seq_lens):
        memory = state.view(heads, size, width)
        for t in range(rows.start, rows.stop):
            memory *= g[t, :, None, None]
            change = e[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
            memory += k[t, :, :, None] * change[:, None]
            y[t] = torch.einsum("hkv,hk->hv", memory, q[t])
    return y.flatten(1).to(value.dtype)


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
    slot_mapping: Tensor, query_scales: Tensor | None = None,
) -> None:  # fmt: skip
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    rotate(query, positions, cos_sin)
    if query_scales is not None:
        query.copy_(query.float() * query_scales[positions][:, None, None])
    block_size = cache.key.shape[1]
    has_slot = slot_mapping >= 0
    block, offset = slot_mapping[has_slot] // block_size, slot_mapping[has_slot] % block_size
    rotated = _rotate(key, cos, sin)
    for part, rows, scale in ((cache.key, rotated, cache.key_scale), (cache.value, value, cache.value_scale)):
        _bytes_of(part)[block, offset] = _bytes_of(_to_cache(rows[has_slot], part.dtype, scale))


def _bytes_of(x: Tensor) -> Tensor:
    """Eight-bit floats as bytes: not every device copies them by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _to_cache(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max  # beyond it conversion would give NaN
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def row_classes(max_rows: int) -> list[int]:
    """One function serves all."""
    return [max_rows]


def begin_step(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Nothing is worked out beforehand."""


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    num_tokens, num_heads, head_size = query.shape
    group = num_heads // cache.key.shape[2]
    out = torch.zeros_like(query)
    for s, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        blocks = block_tables[s, : -(-seq_len // cache.key.shape[1])].long()
        keys, values = (
            _bytes_of(part)[blocks].view(part.dtype).flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
            for part in (cache.key, cache.value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys * cache.key_scale) * scale
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        positions = torch.arange(seq_len, device=query.device)
        distance = positions[seq_len - (end - start) :, None] - positions[None, :]
        if slopes is not None:
            scores = scores - slopes[:, None, None] * distance
        hidden = distance < 0
        if sliding_window > 0:
            hidden |= distance >= sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - start, 1)], -1)
        weights = scores.softmax(-1)[..., :seq_len]
        attended = torch.einsum("hqk,khd->qhd", weights, values) * cache.value_scale
        out[start:end] = attended.to(query.dtype)
    return out.view(num_tokens, num_heads * head_size)


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
        cumulative = probs.cumsum(-1)
        tokens.append(int((cumulative <= uniforms[r] * cumulative[-1]).sum()))
    return torch.tensor(tokens, device=logits.device).clamp(max=logits.shape[1] - 1)


def copy_blocks(pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
    for source, destination in pairs:
        for cache in caches:
            cache.key[destination] = cache.key[source]
            cache.value[destination] = cache.value[source]


def allocate_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str) -> LayerKVCache:
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return LayerKVCache(torch.empty(shape, dtype=DTYPES[dtype]), torch.empty(shape, dtype=DTYPES[dtype]))
