"""Mixtures of experts: routing, stacks of packed weights, and their products.

Rows are sorted by expert, and each expert's rows begin with a new tile, so that a tile of a product has one matrix. The
number of tiles is the most that this number of rows and experts may need; programs of empty tiles end at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import ACTIVATIONS, ExpandExperts, ExpertsAdapterTable, ExpertsWeight, LinearWeight, Routing
from octavo.ops.triton import linear as linear_float
from octavo.ops.triton import linear_int
from octavo.ops.triton.launch import by_pieces, capability
from octavo.ops.triton.lora import ExpertRows, rows_of_experts
from octavo.ops.triton.packed_weights import FloatWeight, IntWeight, PackedWeight, ScaledWeight
from octavo.ops.triton.quantize import codes_of, quantize_rows, scales_of
from octavo.ops.triton.schedule import row_class
from octavo.ops.triton.tiles import ACTIVATED, GATED, LARGE_SHARED, STORE, UNIT, Groups

_MANY_TOKENS = 4096
_SCORINGS = ("softmax", "sigmoid", "sparsemixer")


@triton.jit
def _largest(x, index, free, SIZE: tl.constexpr):
    """Return the largest free element and its index. The first of equals wins; NaN counts as the smallest."""
    x = tl.where(x == x, x, -float("inf"))
    best = tl.max(tl.where(free, x, -float("inf")), 0)
    return best, tl.min(tl.where(free & (x == best), index, SIZE), 0)


@triton.jit
def _route(
    logits, bias, scales, ids, weights, stride, scale, softcap, jitter, NUM: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, SCORING: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr, BIAS_LOGITS: tl.constexpr, NUM_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr, NORMALIZE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    x = tl.load(logits + row * stride + index, mask=index < NUM, other=-float("inf"))
    if CAPPED:
        x = tl.where(index < NUM, softcap * (2.0 / (1.0 + tl.exp(-2.0 * (x / softcap))) - 1.0), -float("inf"))
    free = index < NUM
    place = tl.arange(0, PADDED_K)
    chosen = tl.zeros((PADDED_K,), tl.int32)
    weight = tl.zeros((PADDED_K,), tl.float32)
    if SCORING == 2:  # sparsemixer
        for j in tl.static_range(TOP_K):
            best, at = _largest(x, index, free, SIZE)
            is_far = (best - x) / tl.maximum(tl.abs(x), best) > 2 * jitter
            total = tl.sum(tl.where(free & (is_far == 0), tl.exp(x - best), 0.0), 0)
            chosen = tl.where(place == j, at, chosen)
            weight = tl.where(place == j, 1.0 / total, weight)
            free = free & (index != at)
    else:
        if SCORING == 0:
            scores = tl.exp(x - tl.max(x, 0))
            scores = scores / tl.sum(scores, 0)
        else:
            scores = 1.0 / (1.0 + tl.exp(-x))
        choice = scores if BY_TWO else x
        if HAS_BIAS:
            added = tl.load(bias + index, mask=index < NUM, other=0.0)
            choice = (x if BIAS_LOGITS else scores) + added
        if KEPT_GROUPS < NUM_GROUPS:
            group = index // (NUM // NUM_GROUPS)
            bests = tl.full((SIZE,), -float("inf"), tl.float32)
            for g in tl.static_range(NUM_GROUPS):
                best, at = _largest(choice, index, free & (group == g), SIZE)
                if BY_TWO:
                    second, _ = _largest(choice, index, free & (group == g) & (index != at), SIZE)
                    best += second
                bests = tl.where(index == g, best, bests)
            free_groups = index < NUM_GROUPS
            kept = index < 0
            for _ in tl.static_range(KEPT_GROUPS):
                _, at = _largest(bests, index, free_groups, SIZE)
                free_groups = free_groups & (index != at)
                kept = kept | (group == at)
            free = free & kept
        for j in tl.static_range(TOP_K):
            _, at = _largest(choice, index, free, SIZE)
            chosen = tl.where(place == j, at, chosen)
            weight = tl.where(place == j, tl.sum(tl.where(index == at, scores, 0.0), 0), weight)
            free = free & (index != at)
        if NORMALIZE:
            weight = weight / (tl.sum(weight, 0) + 1e-20)
        weight = weight * scale
        if HAS_SCALES:
            weight = weight * tl.load(scales + chosen)
    tl.store(ids + row * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights + row * TOP_K + place, weight, mask=place < TOP_K)


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`Ops.route`."""
    num_tokens, num_experts = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    shape = (num_tokens, routing.top_k)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, bias, scales, ids, weights, logits.stride(0), routing.scale, routing.softcap, routing.jitter,
            NUM=num_experts, SIZE=triton.next_power_of_2(num_experts), TOP_K=routing.top_k,
            PADDED_K=triton.next_power_of_2(routing.top_k), SCORING=_SCORINGS.index(routing.scoring),
            HAS_BIAS=bias is not None, HAS_SCALES=scales is not None, BIAS_LOGITS=routing.bias_logits,
            NUM_GROUPS=routing.num_groups, KEPT_GROUPS=routing.kept_groups, BY_TWO=routing.group_by_two,
            NORMALIZE=routing.normalize, CAPPED=routing.softcap > 0, num_warps=1 if num_experts <= 128 else 4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return ids, weights


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Packed weights of one layout. The tensors of `weight` hold all experts, one below the other; its sizes are those
    of one expert."""

    num_experts: int
    weight: PackedWeight
    factors: Tensor | None  # [num_experts] float32, for matrices of codes

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes


# Kind of packed weight -> names of its tensors.
_STACKED = {
    FloatWeight: ("data", "bias"),
    IntWeight: ("codes", "scales", "bias", "table"),
    ScaledWeight: ("codes", "scales", "bias"),
}


def stack_experts(experts: Iterable[LinearWeight], num_experts: int) -> StackedWeight:
    """`Ops.stack_experts`. Each expert is copied to its place as soon as it is read."""
    first: PackedWeight | None = None
    stacks: dict[str, Tensor] = {}
    factors: list[float] = []
    shapes: dict[str, torch.Size] = {}
    for e, expert in enumerate(experts):
        assert isinstance(expert, PackedWeight)
        tensors = {name: getattr(expert, name) for name in _STACKED[type(expert)]}
        if first is None:
            first = expert
            stacks = {
                name: torch.empty_strided(
                    (num_experts * len(x), *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device
                )
                for name, x in tensors.items()
                if x is not None
            }
            shapes = {name: x.shape for name, x in tensors.items() if x is not None}
        if isinstance(expert, IntWeight) and expert.order is not None:
            raise ConfigError("experts that were quantized in the order of activations (desc_act) are not built.")
        if {name: x.shape for name, x in tensors.items() if x is not None} != shapes:
            raise ConfigError("experts of one layer that are quantized differently are not built.")
        for name, stack in stacks.items():
            rows = len(tensors[name])
            stack[e * rows : (e + 1) * rows] = tensors[name]
        factors.append(expert.factor if isinstance(expert, IntWeight) else 1.0)
        if next(iter(stacks.values())).is_meta:  # in outlines all experts are equal; a model may have 10,000
            factors *= num_experts
            break
    assert first is not None and len(factors) == num_experts
    there = torch.tensor(factors, dtype=torch.float32, device=next(iter(stacks.values())).device)
    stacked: PackedWeight = replace(first, **stacks)  # type: ignore[arg-type]
    return StackedWeight(num_experts, stacked, there if isinstance(first, IntWeight) else None)


def _tile_rows(num_tokens: int, top_k: int, num_experts: int, is_hopper: bool = True) -> int:
    """Return the number of rows of a tile. On average an expert's last tile is half empty. Bits do not depend on it.

    Steps of `_MANY_TOKENS` or more are one more class beside `ROW_CLASSES`; the start's largest step is in it if any
    step can be."""
    num_each = (_MANY_TOKENS if num_tokens >= _MANY_TOKENS else row_class(num_tokens)) * top_k // num_experts
    return 16 if num_each <= 16 else 64 if num_each < 256 or not is_hopper else 128  # 128 rows spill on others


@triton.jit(do_not_specialize=["first_expert", "num_entries", "num_tiles"])
def _group(
    ids, tile_experts, rows, first_expert, num_entries, num_tiles, NUM: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e assigns rows to the entries of ids that equal `first_expert` + e, and the expert to their tiles;
    program NUM handles entries of other experts. Each program counts the entries of all experts, because another launch
    would take longer."""
    own = tl.program_id(0)
    index = tl.arange(0, SIZE)
    place = tl.arange(0, BLOCK)
    counts = tl.zeros((SIZE,), tl.int32)
    for first in range(0, num_entries, BLOCK):
        expert = tl.load(ids + first + place, mask=first + place < num_entries, other=-1) - first_expert
        counts += tl.histogram(tl.where((expert >= 0) & (expert < NUM), expert, NUM), SIZE)
    tiles = tl.where(index < NUM, (counts + BLOCK_T - 1) // BLOCK_T, 0)
    begin = tl.sum(tl.where(index < own, tiles, 0), 0)
    end = begin + tl.sum(tl.where(index == own, tiles, 0), 0)
    if own == NUM:
        end = num_tiles
    for first in range(begin, end, BLOCK):
        tl.store(tile_experts + first + place, tl.where(own < NUM, own, -1), mask=first + place < end)
    row = begin * BLOCK_T
    for first in range(0, num_entries, BLOCK):
        expert = tl.load(ids + first + place, mask=first + place < num_entries, other=-1) - first_expert
        expert = tl.where((expert >= 0) & (expert < NUM), expert, NUM)
        is_own = ((expert == own) & (first + place < num_entries)).to(tl.int32)
        found = tl.where(own < NUM, row + tl.cumsum(is_own, 0) - 1, -1)
        tl.store(rows + first + place, found.to(tl.int64), mask=is_own > 0)
        row += tl.sum(is_own, 0)


def group(ids: Tensor, first_expert: int, num_experts: int, block_t: int) -> tuple[Tensor, Tensor]:
    """Return the expert of each tile [tiles] int32 (-1: none), and the row of each entry of ids [T, top_k] int64 (-1 if
    the id is none of the `num_experts` from `first_expert` on). Entries of an expert stay in order."""
    num_entries = ids.numel()
    num_tiles = min(num_experts, num_entries) + num_entries // block_t
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    rows = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    _group[(num_experts + 1,)](
        ids.contiguous(), tile_experts, rows, first_expert, num_entries, num_tiles, NUM=num_experts,
        SIZE=triton.next_power_of_2(num_experts + 1), BLOCK_T=block_t, BLOCK=1024, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return tile_experts, rows


@triton.jit
def _gather(
    x, rows, weights, out, stride, out_stride, WIDTH: tl.constexpr, TOP_K: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, c) writes piece c of row n // TOP_K, times weight n if SCALED, to row rows[n]."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n)
    values = tl.load(x + n // TOP_K * stride + column, mask=column < WIDTH, other=0)
    if SCALED:
        values = (values.to(tl.float32) * tl.load(weights + n)).to(x.dtype.element_ty)
    tl.store(out + row * out_stride + column, values, mask=column < tl.where(row >= 0, WIDTH, 0))


@triton.jit
def _clamped_gate(
    x, out, slope, limit, stride, WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (n, c) computes piece c of the gated row n. Gate and up alternate in units of UNIT columns."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + n * stride + column // UNIT * (2 * UNIT) + column % UNIT
    gate = tl.load(at, mask=column < WIDTH, other=0.0)
    up = tl.load(at + UNIT, mask=column < WIDTH, other=0.0)
    gate = tl.where(gate > limit, limit, gate)  # keeps NaN
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    gated = gate / (1.0 + tl.exp(-slope * gate)) * (up + 1.0)
    tl.store(out + n * WIDTH + column, gated.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _combine(
    y, rows, weights, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, c) computes piece c of the sum of token t's rows of y, in the order of rows, which is that of
    experts."""
    NONE: tl.constexpr = 0x7FFFFFFF
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PADDED_K)
    left = tl.load(rows + t * TOP_K + place, mask=place < TOP_K, other=-1).to(tl.int32)
    left = tl.where(left < 0, NONE, left)
    if SCALED:
        scales = tl.load(weights + t * TOP_K + place, mask=place < TOP_K, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(TOP_K):
        row = tl.min(left, 0)
        value = tl.load(y + row.to(tl.int64) * WIDTH + column, mask=column < tl.where(row < NONE, WIDTH, 0), other=0.0)
        weight = tl.sum(tl.where(left == row, scales, 0.0), 0) if SCALED else 1.0
        total = tl.fma(value, tl.where(row < NONE, weight, 0.0), total)
        left = tl.where(left == row, NONE, left)
    tl.store(out + t * WIDTH + column, total, mask=column < WIDTH)


def _product(
    x: Tensor, stack: StackedWeight, out: Tensor, epilogue: tl.constexpr, groups: Groups, adapted: ExpertRows | None,
    table: ExpertsAdapterTable | None,
) -> None:  # fmt: skip
    weight = stack.weight
    added = None if adapted is None else adapted.added(table, x, weight)
    if isinstance(weight, IntWeight):
        groups = replace(groups, factors=stack.factors)
        linear_int.launch(x, weight, out, epilogue, groups=groups, added=added)
    elif isinstance(weight, ScaledWeight):
        codes, x_scales = codes_of(x, weight.activation_dtype), scales_of(x)
        linear_float.launch(
            codes, x_scales, weight.codes, weight.scales, weight.bias, out, epilogue, groups=groups, added=added
        )
    else:
        linear_float.launch(x, None, weight.data, None, weight.bias, out, epilogue, groups=groups, added=added)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str = "silu",
    clamp: tuple[float, float] | None = None, scales_inputs: bool = False, first_expert: int = 0, segments: int = 1,
    expand: ExpandExperts | None = None,
) -> Tensor:  # fmt: skip
    """`AdapterOps.experts`."""
    assert segments == 1, "sums over experts are cut on CPUs only"
    assert expand is None or first_expert == 0, "adapters of experts that are shared out are refused before"
    assert isinstance(gate_up, StackedWeight) and isinstance(down, StackedWeight)
    assert gate_up.weight.gated or clamp is None
    (num_tokens, top_k), num_experts, device = ids.shape, gate_up.num_experts, x.device
    out = torch.empty((num_tokens, down.out_features), dtype=torch.float32, device=device)
    if num_tokens == 0:
        return out
    weights = weights.contiguous()
    block_t = _tile_rows(num_tokens, top_k, num_experts, capability(device)[0] in LARGE_SHARED)
    tile_experts, rows = group(ids, first_expert, num_experts, block_t)
    groups = Groups(num_experts, block_t, tile_experts)
    num_rows = len(tile_experts) * block_t
    adapted = None if expand is None else rows_of_experts(expand, ids, rows, num_rows, num_experts)
    codes_dtype = gate_up.weight.activation_dtype
    if codes_dtype is not None and not scales_inputs:
        x = x if x.dtype is torch.uint8 else quantize_rows(x, codes_dtype)
        x = x.view(torch.int32)
    # Rows must start at multiples of 16 bytes.
    width, unit = x.shape[1], 16 // x.element_size()
    inputs = torch.empty((num_rows, -(-width // unit) * unit), dtype=x.dtype, device=device)[:, :width]
    by_pieces(
        _gather, num_tokens * top_k, width, 2048, x, rows, weights, inputs, x.stride(0), inputs.stride(0), TOP_K=top_k,
        SCALED=scales_inputs,
    )  # fmt: skip
    if codes_dtype is not None:
        inputs = quantize_rows(inputs, codes_dtype) if scales_inputs else inputs.view(torch.uint8)
    inner_dtype = torch.float32
    if not isinstance(down.weight, ScaledWeight):
        inner_dtype = down.weight.data.dtype if isinstance(down.weight, FloatWeight) else torch.float32
        if isinstance(down.weight, IntWeight) and codes_dtype is None:
            inner_dtype = x.dtype
    inner = _gated(inputs, gate_up, groups, inner_dtype, activation, clamp, adapted)
    if down.weight.activation_dtype is not None:
        inner = quantize_rows(inner, down.weight.activation_dtype)
    y = torch.empty((num_rows, down.out_features), dtype=torch.float32, device=device)
    _product(inner, down, y, STORE, groups, adapted, None if expand is None else expand.down)
    by_pieces(
        _combine, num_tokens, down.out_features, 1024, y, rows, weights, out, TOP_K=top_k,
        PADDED_K=triton.next_power_of_2(top_k), SCALED=not scales_inputs,
    )  # fmt: skip
    return out


def _gated(
    x: Tensor, gate_up: StackedWeight, groups: Groups, dtype: torch.dtype, activation: str,
    clamp: tuple[float, float] | None, adapted: ExpertRows | None,
) -> Tensor:  # fmt: skip
    """Return the gated (or activated) product [rows, width of the gate]; rows start at multiples of 16 bytes."""
    is_gated = gate_up.weight.gated
    table = None if adapted is None else adapted.expand.gate_up
    width = gate_up.out_features // (2 if is_gated else 1)
    padded = -(-width // UNIT.value) * UNIT.value
    out = torch.empty((len(x), padded), dtype=dtype, device=x.device)
    if clamp is None:
        kind = (GATED if is_gated else ACTIVATED).value + ACTIVATIONS.index(activation)
        _product(x, gate_up, out, tl.constexpr(kind), groups, adapted, table)
    else:
        both = torch.empty((len(x), 2 * padded), dtype=torch.float32, device=x.device)
        _product(x, gate_up, both, STORE, groups, adapted, table)
        by_pieces(_clamped_gate, len(x), padded, 1024, both, out, *clamp, both.stride(0), UNIT=UNIT.value)
    return out[:, :width]
