"""The reference's products with matrices of any format, and its operations on rows: embeddings, norms, activations,
sums, pooling. Inputs of integer matrices are quantized here as backends quantize them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import AdapterTable, Expand, LinearWeight, Lookup
from octavo.ops.torch_arrays import DTYPES, to_torch
from octavo.quantization import StoredWeight, dequantize
from tests.ops.torch_adapters import TorchAdapterTable, expand_rows, looked_up, shrink_rows


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """An unpacked matrix [out_features, in_features]; gate lies before up.

    A quantized matrix holds dequantized values without `minima` [out_features, ceil(in_features / 32)], which multiply
    sums of activations rounded to bfloat16."""

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


def pack_linear(
    parts: Sequence[StoredWeight], bias: NDArray[Any] | None = None, gated: bool = False, is_embedding: bool = False,
    sixteen_bit_inputs: bool = False,
) -> DenseWeight:  # fmt: skip
    """Return the parts as one matrix; quantized parts are dequantized to the type of float parts, or to float32.

    So products with this matrix are the reference of products whose activations are not quantized."""
    floats = [part.tensors["data"] for part in parts if part.format in ("F32", "F16", "BF16")]
    dtype = floats[0].dtype.name if floats else "float32"
    tensors = [to_torch(dequantize(part, dtype)) for part in parts]
    return DenseWeight(torch.cat(tensors), None if bias is None else to_torch(bias), gated=gated)


def _without_outliers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., groups, 32] with zeros for outliers, and the outliers with zeros elsewhere.

    Outliers of a group are its one or two largest elements if they exceed 3 times the next magnitude; if both one and
    two elements qualify, two are taken. A group has none if its largest magnitude is not finite or below 2^-100."""
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
    """Return x [..., K] quantized, and its outliers: both [..., groups, 32] float64.

    Quantized elements are int8 times the float32 scale absmax / 127. A group with elements that are not finite becomes
    NaN; a group whose absmax is below 2^-100 becomes zero."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 32)).reshape(*x.shape[:-1], -1, 32)
    groups, outliers = _without_outliers(groups)
    absmax = groups.abs().amax(-1, keepdim=True)
    # torch divides two tensors exactly, but computes number / tensor as a product with the reciprocal.
    largest = torch.full_like(absmax, 127)
    q = (groups * (largest / absmax)).round()
    out = q.double() * (absmax / largest).double()
    out = torch.where(absmax < 2.0**-100, 0.0, out)
    return torch.where(absmax.isfinite(), out, float("nan")), outliers.double()


def fake_quantize(x: Tensor) -> Tensor:
    """Return x [..., K] as integer matrices see it: quantized and dequantized, in float64."""
    quantized, outliers = _quantized_groups(x)
    return (quantized + outliers).flatten(-2)[..., : x.shape[-1]]


def quantize(x: Tensor, consumer: LinearWeight) -> Tensor:
    assert isinstance(consumer, DenseWeight)
    return fake_quantize(x) if consumer.is_quantized else x


def product(x: Tensor, weight: LinearWeight, what: Expand | None = None) -> Tensor:
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


def rounded(out: Tensor, dtype: torch.dtype, consumer: LinearWeight | None) -> Tensor:
    """Return outputs as the consumer takes them: quantized, or in `dtype`."""
    return fake_quantize(out) if isinstance(consumer, DenseWeight) and consumer.is_quantized else out.to(dtype)


def linear(x: Tensor, weight: LinearWeight, out_dtype: str | None = None, expand: Expand | None = None) -> Tensor:
    return product(x, weight, expand).to(_float_output(x, out_dtype))


def linear_add(
    x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0, expand: Expand | None = None
) -> None:
    residual.copy_(residual.float() + scale * product(x, weight, expand))


def linear_silu_and_mul(
    x: Tensor, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
    activation: str = "silu", expand: Expand | None = None,
) -> Tensor:  # fmt: skip
    gate, up = product(x, gate_up, expand).chunk(2, dim=-1)
    out = FUNCTIONS[activation](gate) * up
    return rounded(out, _float_output(x, out_dtype), consumer)


def linear_activated(
    x: Tensor, weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
    out_dtype: str | None = None, expand: Expand | None = None,
) -> Tensor:  # fmt: skip
    return rounded(FUNCTIONS[activation](product(x, weight, expand)), _float_output(x, out_dtype), consumer)


def shrink(x: Tensor, table: AdapterTable, slots: Tensor, weight: LinearWeight) -> Tensor:
    assert isinstance(table, TorchAdapterTable) and table.shape.num_in == weight.in_features
    return shrink_rows(x.float(), table, slots)


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


def rms_norm(x: Tensor, weight: Tensor, eps: float, consumer: LinearWeight | None = None) -> Tensor:
    x32 = x.float()
    out = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()
    return rounded(out, x.dtype, consumer)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, consumer: LinearWeight | None = None
) -> Tensor:
    x32 = x.float()
    centered = x32 - x32.mean(-1, keepdim=True)
    out = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        out = out + bias.float()
    return rounded(out, x.dtype, consumer)


def add(residual: Tensor, x: Tensor, scale: float = 1.0) -> None:
    residual.copy_(residual.float() + scale * x.float())


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
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
    out = FUNCTIONS[kind](x.float(), *parameters)
    return rounded(out, x.dtype, consumer)


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
}


def multiply(x: Tensor, y: Tensor, activation: str = "identity", consumer: LinearWeight | None = None) -> Tensor:
    factors = FACTORS[activation](y.float()).repeat_interleave(x.shape[1] // y.shape[1], 1)
    return rounded(x.float() * factors, x.dtype, consumer)


def pool(x: Tensor, starts: Tensor, ends: Tensor, kind: str, out_dtype: str | None = None) -> Tensor:
    pooled = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        rows = x[start : end + 1].float()
        if len(rows) == 1:
            pooled.append(rows[0])
        elif kind == "max":
            pooled.append(rows.amax(0))
        elif kind == "weighted_mean":
            weights = torch.arange(1, len(rows) + 1, device=x.device)
            pooled.append((rows * weights[:, None]).sum(0) / weights.sum())
        else:
            pooled.append(rows.sum(0) / (len(rows) if kind == "mean" else len(rows) ** 0.5))
    dtype = DTYPES[out_dtype] if out_dtype else x.dtype
    return torch.stack(pooled).to(dtype) if pooled else x[:0].to(dtype)
