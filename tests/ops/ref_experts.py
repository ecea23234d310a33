"""The reference's experts: the choice of experts for each token, and their products, one expert after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.ops import Expand, ExpandExperts, ExpertsWeight, LinearWeight, Routing
from tests.ops.ref_products import FUNCTIONS, DenseWeight, linear, product, quantize, rounded, shrink
from tests.ops.torch_adapters import TorchExpertsTable


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
    """Return the indices of the `count` largest along the last dimension, largest first; the first of equals wins."""
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
        outputs = product(rows, first, what).float()
        gate, up = outputs.chunk(2, dim=-1) if first.gated else (outputs, torch.ones_like(outputs))
        if clamp is None:
            inner = FUNCTIONS[activation](gate) * up
        else:
            slope, limit = clamp
            gate = gate.clamp(max=limit)
            inner = gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + 1)
        inner = rounded(inner, second.weight.dtype, second)
        what = None if expand is None else added(expand.down, e, tokens, quantize(inner, second), second)
        y = product(inner, second, what).float()
        out[tokens] += y if scales_inputs else scales * y
    return out


def linear_by_head(x: Tensor, weight: ExpertsWeight) -> Tensor:
    assert isinstance(weight, DenseExperts)
    return torch.stack([linear(x[:, head], matrix) for head, matrix in enumerate(weight.weights)], 1)
