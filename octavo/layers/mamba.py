"""State spaces in place of attention, or beside it: Mamba 1 and 2. `octavo.layers.recurrent` explains their states and
their division among workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.all_gather import AllGather
from octavo.layers.norm import Norm, NormDescription, SharedNorm
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.recurrent import Convolution, decay_rates, state_of
from octavo.layers.tensor_parallel import WHOLE, Shard, ShardedHeads, elements
from octavo.ops import Array, LayerKVCache, LinearWeight
from octavo.step_batch import GroupTables, StepBatch


@dataclass(frozen=True, slots=True)
class MambaDescription(ShardedHeads):
    """Mamba 2 (Dao & Gu 2024), or, with a `time_rank`, Mamba 1 (Gu & Dao 2023). In Mamba 1 time steps come from a
    product of rank `time_rank`, and each channel is a head. Names are those of the checkpoint's modules, after `name`.

    Zamba's Mamba 1 has `tensors_by_group`: each group of channels has inner matrices of its own, and rows of x and of
    the gate alternate in the first matrix.

    Workers that have heads of the same group all compute its B and C. The inner matrix of Mamba 1 reads all channels,
    so each worker computes this product whole."""

    num_heads: int
    head_size: int
    state_size: int
    kernel: int
    num_groups: int = 1
    time_rank: int = 0
    time_limit: tuple[float, float] = (0.0, inf)
    norm: NormDescription | None = None  # Mamba 2: norm of the gated output, by group
    norms_before_gate: bool = False
    inner_norm: NormDescription | None = None  # Mamba 1: norms of B, C and the low-rank input of time steps
    multipliers: tuple[float, ...] = ()  # Mamba 2: factors of the first matrix's outputs: gate, x, B, C, time steps
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    tensors_by_group: bool = False
    name: str = "mamba"
    shard: Shard = WHOLE

    @property
    def own_heads(self) -> range:
        return self.shard.of(self.num_heads, "channels" if self.time_rank else "heads of a state space")

    @property
    def own_groups(self) -> range:
        return self.shard.of_few(self.num_groups, "groups of a state space")

    @property
    def part(self) -> MambaDescription:
        return replace(self, num_heads=len(self.own_heads), num_groups=len(self.own_groups), shard=WHOLE)

    @property
    def all_gather_size(self) -> int:
        """Return the number of elements of a row that workers gather."""
        return self.channels if self.time_rank or self.norm is not None else 0

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_size

    @property
    def conv_width(self) -> int:
        return self.channels + (0 if self.time_rank else 2 * self.num_groups * self.state_size)

    @property
    def cache(self) -> LayerCacheSpec:
        d = self.part
        return state_of(d.kernel, d.conv_width, d.channels, d.num_groups, d.state_size)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Mamba:
        return Mamba(self, hidden_size, parameters, prefix)


class Mamba:
    def __init__(self, description: MambaDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        self._part, self._ops, self._dtype = description.part, parameters.ops, parameters.dtype
        d, prefix, weights = description, f"{prefix}{description.name}.", parameters.weights
        channels, size, own_heads = d.channels, d.state_size, d.own_heads
        group, own, own_group = d.num_groups * size, elements(own_heads, d.head_size), elements(d.own_groups, size)
        in_sizes = [channels, channels] if d.time_rank else [channels, channels, group, group, d.num_heads]
        in_owns = [own, own] if d.time_rank else [own, own, own_group, own_group, own_heads]
        orders = [np.arange(2 * channels).reshape(-1, 2).T[:, own].reshape(-1)] if d.tensors_by_group else None
        self.consumer = parameters.linear(
            [f"{prefix}in_proj"], in_sizes, hidden_size, d.bias, scales=d.multipliers, orders=orders,
            own=in_owns if orders is None else None,
        )  # fmt: skip
        convolved = [own] if d.time_rank else [own, *(range(begin + own_group.start, begin + own_group.stop)
                                                      for begin in (channels, channels + group))]  # fmt: skip
        self._conv = Convolution(
            parameters, {f"{prefix}conv1d": d.conv_width}, d.kernel, d.conv_bias, "silu", np.concatenate(convolved)
        )
        # Inner matrices read all channels of the groups that this worker has channels of.
        read = elements(d.own_groups, channels // d.num_groups)
        self._read = slice(read.start, read.stop)
        self._all_gather = None if read == own else AllGather(parameters.ops, d.shard, own, channels, "channels")
        self._inner_norms: list[Norm] = []
        by_head = (d.num_groups, channels // d.num_groups) if d.tensors_by_group else (d.num_heads,)
        if d.time_rank:
            if d.tensors_by_group:
                of_time = slice(own.start - read.start, own.stop - read.start)
                self._inner, self._time = self._by_group(parameters, prefix, d, of_time)
            else:
                self._inner = parameters.linear([f"{prefix}x_proj"], [d.time_rank + 2 * size], channels)
                self._time = parameters.linear([f"{prefix}dt_proj"], [channels], d.time_rank, own=own)
            if d.inner_norm is not None:
                names = (("dt", d.time_rank), ("b", size), ("c", size))
                self._inner_norms = [Norm(d.inner_norm, parameters, f"{prefix}{n}_layernorm", k) for n, k in names]
            time_bias = "dt_proj_bias" if d.tensors_by_group else "dt_proj.bias"
            by_channel = decay_rates(parameters, f"{prefix}A_log", *by_head, size).reshape(channels, size)
            rates = np.ascontiguousarray(by_channel[own].T)
        else:
            time_bias = "dt_bias"
            rates = np.repeat(decay_rates(parameters, f"{prefix}A_log", d.num_heads)[own_heads], d.head_size)
        time_biases = weights.take(f"{prefix}{time_bias}", by_head, "float32").reshape(-1)
        self._time_bias = self._ops.place(np.ascontiguousarray(time_biases[own_heads]))
        skip = np.repeat(weights.take(f"{prefix}D", by_head, "float32"), d.head_size)
        self._rates, self._skip = self._ops.place(rates), self._ops.place(np.ascontiguousarray(skip[own]))
        self._norm: SharedNorm | None = None
        if d.norm is not None:
            self._norm = SharedNorm(d.norm, parameters, f"{prefix}norm", channels, d.shard, own, groups=d.num_groups)
        self._ending = parameters.ending(f"{prefix}out_proj", hidden_size, len(own), d.output_bias, d.shard)

    def _by_group(
        self, parameters: Parameters, prefix: str, d: MambaDescription, own: slice
    ) -> tuple[LinearWeight, LinearWeight]:
        """Return the inner matrix and the matrix of time steps for this worker's groups. Both are block diagonal: zero
        where outputs of one group meet inputs of another. Time steps are for the worker's `own` channels only."""
        take, rank, width = parameters.weights.take, d.time_rank, d.channels // d.num_groups
        inner = take(f"{prefix}x_proj_weight", (d.num_groups, rank + 2 * d.state_size, width), own=d.own_groups)
        time = take(f"{prefix}dt_proj_weight", (d.num_groups, width, rank), own=d.own_groups)
        groups = len(d.own_groups)

        def matrix(*parts: NDArray[Any]) -> NDArray[Any]:
            blocks = [np.zeros((groups, part.shape[1], groups, part.shape[2]), part.dtype) for part in parts]
            for block, part in zip(blocks, parts, strict=True):
                block[np.arange(groups), :, np.arange(groups)] = part
            return np.concatenate([b.reshape(b.shape[0] * b.shape[1], -1) for b in blocks])

        of_inputs = matrix(*np.split(inner, (rank, rank + d.state_size), 1))
        return parameters.packed(of_inputs), parameters.packed(matrix(time)[own])

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        d, ops, output = self._part, self._ops, self._ending.weight
        num_tokens, channels, size = hidden.shape[0], d.channels, d.state_size
        projected = ops.linear(hidden, self.consumer, self._dtype)
        if d.time_rank:
            x, gate = projected[:, :channels], projected[:, channels:]
            x = self._conv.forward(x, batch, tables, cache)
            read = x if self._all_gather is None else self._all_gather.forward(x)[:, self._read]
            inner = ops.linear(read, self._inner, self._dtype)
            ranks, group = d.num_groups * d.time_rank, d.num_groups * size
            time, b, c = inner[:, :ranks], inner[:, ranks:-group], inner[:, -group:]
            if self._inner_norms:
                time, b, c = (norm.forward(x) for norm, x in zip(self._inner_norms, (time, b, c), strict=True))
            time = ops.linear(time, self._time, self._dtype)
        else:
            gate, mixed, time = (
                projected[:, :channels], projected[:, channels : -d.num_heads], projected[:, -d.num_heads :]
            )  # fmt: skip
            mixed = self._conv.forward(mixed, batch, tables, cache)
            end = channels + d.num_groups * size
            x, b, c = mixed[:, :channels], mixed[:, channels:end], mixed[:, end:]
        y = ops.selective_scan(
            x, time, b.reshape(num_tokens, d.num_groups, size), c.reshape(num_tokens, d.num_groups, size), self._rates,
            self._skip, self._time_bias, d.time_limit, *self._conv.behind(batch, tables, cache),
        )  # fmt: skip
        if self._norm is None:
            return self._ending.product(ops.multiply(y, gate, "silu", output))
        if d.norms_before_gate:
            return self._ending.product(ops.multiply(self._norm.forward(y), gate, "silu", output))
        return self._ending.product(self._norm.forward(ops.multiply(y, gate, "silu"), output))
