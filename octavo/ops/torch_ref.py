"""The reference backend: what each operation of `octavo.ops.Ops` means, in the plainest torch.

Every kernel is tested against it. It makes no promise about speed or about bitwise row independence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops import LayerKVCache, LinearWeight, QuantizedMatrix


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


def pack_linear(
    parts: Sequence[Tensor | QuantizedMatrix], bias: Tensor | None = None, gated: bool = False
) -> DenseWeight:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < len(parts):
        raise NotImplementedError("integer matrices are packed by octavo.quantization.")
    return DenseWeight(torch.cat(tensors), bias, gated=gated)


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


def _float_output(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.float32 if x.dtype is torch.float64 else x.dtype)


def linear(x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    return _product(x, weight).to(_float_output(x, out_dtype))


def linear_add(x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0) -> None:
    residual.copy_(residual.float() + scale * _product(x, weight))


def linear_silu_and_mul(
    x: Tensor, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    gate, up = _product(x, gate_up).chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate) * up
    if isinstance(consumer, DenseWeight) and consumer.is_quantized:
        return fake_quantize(out)
    return out.to(_float_output(x, out_dtype))


def embedding(
    token_ids: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None, scale: float = 1.0
) -> Tensor:
    assert isinstance(weight, DenseWeight)
    rows = weight.weight[token_ids.long()]
    if weight.minima is not None:
        rows = rows + weight.minima[token_ids.long()].repeat_interleave(32, 1)[:, : rows.shape[1]]
    return (rows.float() * scale).to(out_dtype or (torch.float32 if weight.is_quantized else rows.dtype))


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float, consumer: LinearWeight | None = None) -> Tensor:
    x32 = x.float()
    out = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
    if isinstance(consumer, DenseWeight) and consumer.is_quantized:
        return fake_quantize(out)
    return out.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]; cos, sin [T, 1, R/2]: rotate the first R elements of each head as two halves."""
    half = cos.shape[-1]
    x32 = x.float()
    a, b, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def rotary_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    cache: LayerKVCache,
    slot_mapping: Tensor,
) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    query.copy_(_rotate(query, cos, sin))
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


def paged_attention(
    query: Tensor,
    cache: LayerKVCache,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
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
        hidden = distance < 0
        if sliding_window > 0:
            hidden |= distance >= sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values) * cache.value_scale
        out[start:end] = attended.to(query.dtype)
    return out.view(num_tokens, num_heads * head_size)


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def penalize(
    logits: Tensor,
    samples: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    for s, t, count in zip(samples.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        logit = logits[s, t]
        logits[s, t] = logit / repetition[s] if logit > 0 else logit * repetition[s]
        logits[s, t] -= frequency[s] * count + presence[s] * (count > 0)


def mask_tokens(logits: Tensor, words: Tensor, samples: Tensor) -> None:
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[samples] = logits[samples].masked_fill(~is_allowed, float("-inf"))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, dice: Tensor) -> Tensor:
    tokens = []
    for r in range(len(logits)):
        if temperature[r] == 0:
            tokens.append(int(logits[r].argmax()))
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
        tokens.append(int((cumulative <= dice[r] * cumulative[-1]).sum()))
    return torch.tensor(tokens, device=logits.device).clamp(max=logits.shape[1] - 1)


def copy_blocks(pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
    for source, destination in pairs:
        for cache in caches:
            cache.key[destination] = cache.key[source]
            cache.value[destination] = cache.value[source]


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> LayerKVCache:
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    return LayerKVCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
