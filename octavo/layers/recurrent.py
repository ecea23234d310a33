"""Layers that replace attention and keep a state of fixed size: short convolutions, the gated delta rule, lightning
attention, gated recurrences. State spaces are in `octavo.layers.mamba`. A state lies in one block of the layer's cache:
first the convolution's rows, then the recurrence's numbers.

Heads are divided among workers, or channels in layers without heads. A description's `part` describes one worker's part
as if it were the whole layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.norm import Norm, NormDescription, SharedNorm
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.tensor_parallel import WHOLE, Shard, ShardedHeads, elements
from octavo.loading.weights import floats
from octavo.ops import Array, ExpertsWeight, LayerKVCache, LinearWeight
from octavo.step_batch import GroupTables, StepBatch

_TILE = 16  # states are padded to a multiple of this many channels: room for every backend's layout


def state_of(kernel: int, conv_width: int, channels: int = 0, groups: int = 1, size: int = 0) -> LayerCacheSpec:
    """Return the cache of a convolution over `kernel` tokens and a recurrence of `size` numbers for each channel, in
    equal `groups` of channels."""
    padded = groups * -(-channels // groups // _TILE) * _TILE
    num_floats = (kernel - 1) * conv_width + padded * size
    return LayerCacheSpec("state", num_bytes=-(-num_floats // _TILE) * 4 * _TILE)


class Convolution:
    """A convolution over this worker's `own` channels. `widths` maps the checkpoint's modules to their numbers of
    channels; the channels of all modules are side by side."""

    def __init__(
        self, parameters: Parameters, widths: dict[str, int], kernel: int, bias: bool, activation: str,
        own: NDArray[np.intp],
    ) -> None:  # fmt: skip
        self._ops, self._activation, take = parameters.ops, activation, parameters.weights.take
        weights = [take(f"{name}.weight", (width, 1, kernel), "float32") for name, width in widths.items()]
        self._weight, self._bias = self._ops.place(np.ascontiguousarray(np.concatenate(weights)[own, 0].T)), None
        if bias:
            biases = [take(f"{name}.bias", (width,), "float32") for name, width in widths.items()]
            self._bias = self._ops.place(np.concatenate(biases)[own])
        self.num_floats = (kernel - 1) * len(own)

    def forward(self, x: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Array:
        states = cache.key[:, : self.num_floats]
        return self._ops.causal_conv(x, self._weight, self._bias, self._activation, *_places(states, batch, tables))

    def behind(self, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> tuple[Array, Array, Array, Array]:
        """Return the last arguments of an operation whose state follows the convolution's in the block: the
        recurrence's numbers."""
        return _places(cache.key[:, self.num_floats :], batch, tables)


def _places(states: Array, batch: StepBatch, tables: GroupTables) -> tuple[Array, Array, Array, Array]:
    """Return the arguments that describe states and sequences, which come last in operations with states."""
    return states, tables.slot_mapping, batch.query_start_loc, batch.seq_lens


def decay_rates(parameters: Parameters, name: str, *shape: int) -> NDArray[np.float32]:
    """Return the decay rates of a state, which are negative: the checkpoint has the logarithm of their negatives."""
    rates: NDArray[np.float32] = -np.exp(parameters.weights.take(name, shape, "float32"))
    return rates


@dataclass(frozen=True, slots=True)
class ShortConvDescription:
    """A gated convolution over the last tokens (LFM2)."""

    channels: int
    kernel: int
    bias: bool = False
    shard: Shard = WHOLE

    @property
    def units(self) -> int:
        return self.channels

    @property
    def own(self) -> range:
        return self.shard.of(self.channels, "channels")

    @property
    def cache(self) -> LayerCacheSpec:
        return state_of(self.kernel, len(self.own))

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> ShortConv:
        return ShortConv(self, hidden_size, parameters, prefix)


class ShortConv:
    def __init__(
        self, description: ShortConvDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self._ops, self._dtype, self._width = parameters.ops, parameters.dtype, len(description.own)
        d, prefix = description, f"{prefix}conv."
        self.consumer = parameters.linear([f"{prefix}in_proj"], [d.channels] * 3, hidden_size, d.bias, own=d.own)
        self._conv = Convolution(
            parameters, {f"{prefix}conv": d.channels}, d.kernel, d.bias, "identity", np.array(d.own)
        )
        self._ending = parameters.ending(f"{prefix}out_proj", hidden_size, self._width, d.bias, d.shard)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        ops, width = self._ops, self._width
        projected = ops.linear(hidden, self.consumer, self._dtype)
        before, after, x = projected[:, :width], projected[:, width : 2 * width], projected[:, 2 * width :]
        x = self._conv.forward(ops.multiply(x, before), batch, tables, cache)
        return self._ending.product(ops.multiply(x, after, "identity", self._ending.weight))


@dataclass(frozen=True, slots=True)
class GatedDeltaDescription:
    """The gated delta rule (Yang et al. 2025). Names are those of the checkpoint's modules, after `name`.

    `in_names` are the matrices of query, key, value, gate, beta and decay, in this order:
    - six names: a matrix for each;
    - four names: the first three are stacked;
    - two names: a matrix of query, key, value and gate, and a matrix of beta and decay; the rows of each key head are
      together. GGUF files split the first matrix into two: query, key and value of all heads, and gates.

    With `decays_by_element` each element of a head's key has a decay (Kimi Team 2025). With a `rank` gates and decays
    come from two matrices each, with `rank` numbers between them."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel: int
    norm: NormDescription  # norm of each head's output
    beta_scale: float = 1.0
    decays_by_element: bool = False
    lowest: float = 0.0  # see `Ops.gated_delta`
    alternates: bool = False  # see `Ops.gated_delta`
    rank: int = 0
    gate_activation: str = "silu"
    rates_shape: tuple[int, ...] = ()  # shape in the checkpoint; empty: [heads]
    in_names: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
    conv_names: tuple[str, ...] = ("conv1d",)  # one module, or modules of query, key and value
    norm_name: str = "norm"
    output_name: str = "out_proj"
    name: str = "linear_attn"
    shard: Shard = WHOLE

    @property
    def units(self) -> int:
        return self.num_value_heads

    @property
    def own_values(self) -> range:
        """Return this worker's heads of values."""
        return self.shard.of(self.num_value_heads, "heads of values")

    @property
    def own_keys(self) -> range:
        """Return the heads of keys that serve this worker's heads of values. Several workers may have the same head of
        keys. Raises `ConfigError` if the heads cannot be divided."""
        values, count = self.own_values, self.num_key_heads
        if not self.alternates:
            return self.shard.of_few(count, "heads of keys")
        if len(values) % count == 0:
            return range(count)
        if count % len(values):
            raise ConfigError(
                f"--tensor-parallel-size {self.shard.size} gives each worker {len(values)} value heads, which do not "
                f"divide its {count} key heads; leave it out."
            )
        return range(values.start % count, values.start % count + len(values))

    @property
    def part(self) -> GatedDeltaDescription:
        return replace(self, num_key_heads=len(self.own_keys), num_value_heads=len(self.own_values), shard=WHOLE)

    @property
    def conv_width(self) -> int:
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def cache(self) -> LayerCacheSpec:
        d, heads = self.part, len(self.own_values)
        return state_of(d.kernel, d.conv_width, heads * d.value_size, heads, d.key_size)

    @property
    def decays_of_head(self) -> int:
        return self.key_size if self.decays_by_element else 1

    @property
    def num_decays(self) -> int:
        return self.num_value_heads * self.decays_of_head

    def convolved(self) -> NDArray[np.intp]:
        """Return this worker's channels of query, key and value among all channels of the convolution."""
        keys, values, all_keys = self.own_keys, self.own_values, self.num_key_heads * self.key_size
        parts = [elements(keys, self.key_size)] * 2 + [elements(values, self.value_size)]
        begins = (0, all_keys, 2 * all_keys)
        return np.concatenate([begin + np.array(part) for begin, part in zip(begins, parts, strict=True)])

    def matrices(self, count: int) -> list[tuple[int, NDArray[np.intp]]]:
        """Return, for each of `count` matrices, its number of rows and the rows of this worker's heads, in Octavo's
        order."""
        keys, values = self.own_keys, self.own_values
        heads, served = self.num_key_heads, self.num_value_heads // self.num_key_heads

        def by_key_head(num_keys: int, *sizes: int) -> NDArray[np.intp]:
            """Return this worker's rows of a matrix whose rows lie together by key head. A key head has two parts of
            `num_keys` rows, then a part for each of `sizes` with that many rows for each of its heads of values."""
            of_values = [served * size for size in sizes]
            rows = np.arange(heads * (2 * num_keys + sum(of_values))).reshape(heads, -1)
            parts = np.split(rows, np.cumsum([num_keys, num_keys, *of_values])[:-1], 1)
            by_value_head = [part.reshape(self.num_value_heads, -1) for part in parts[2:]]
            own = [part[keys] for part in parts[:2]] + [part[values] for part in by_value_head]
            return np.concatenate([part.reshape(-1) for part in own])

        by_key, by_value = np.array(elements(keys, self.key_size)), np.array(elements(values, self.value_size))
        num_keys, num_values = heads * self.key_size, self.num_value_heads * self.value_size
        convolved, betas = (self.conv_width, self.convolved()), (self.num_value_heads, np.array(values))
        gates, decays = (num_values, by_value), (self.num_decays, np.array(elements(values, self.decays_of_head)))
        if self.rank:
            gates = decays = self.rank, np.arange(self.rank)
        if count == 4:
            return [convolved, gates, betas, decays]
        if count == 6:
            return [(num_keys, by_key), (num_keys, by_key), (num_values, by_value), gates, betas, decays]
        last = 2 * self.num_value_heads, by_key_head(0, 1, 1)
        if count == 3:
            return [convolved, gates, last]
        return [(2 * num_keys + 2 * num_values, by_key_head(self.key_size, self.value_size, self.value_size)), last]

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> GatedDelta:
        return GatedDelta(self, hidden_size, parameters, prefix)


class GatedDelta:
    def __init__(
        self, description: GatedDeltaDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self._part, self._ops, self._dtype = description.part, parameters.ops, parameters.dtype
        d, own, prefix = description, self._part, f"{prefix}{description.name}."
        heads, values, keys = d.num_value_heads, d.num_value_heads * d.value_size, d.num_key_heads * d.key_size
        names = [f"{prefix}{name}" for name in d.in_names]
        if len(names) == 2 and f"{names[0]}.weight" not in parameters.weights:
            names = [f"{prefix}{name}" for name in ("in_proj_qkv", "in_proj_z", d.in_names[1])]
        sizes, orders = zip(*d.matrices(len(names)), strict=True)
        own_gates = own.conv_width + (d.rank or own.num_value_heads * d.value_size)
        self._ends = own_gates, own_gates + own.num_value_heads  # ends of gates and of betas in the product's columns
        self.consumer = parameters.linear(names, sizes, hidden_size, orders=orders)
        widths = (d.conv_width,) if len(d.conv_names) == 1 else (keys, keys, values)
        convolved = {f"{prefix}{name}": width for name, width in zip(d.conv_names, widths, strict=True)}
        self._conv = Convolution(parameters, convolved, d.kernel, False, "silu", d.convolved())
        own_decays = elements(d.own_values, d.decays_of_head)
        self._inner: list[LinearWeight] = []  # second matrices of gates and of decays, with a `rank`
        if d.rank:
            own_values = elements(d.own_values, d.value_size)
            self._inner = [
                parameters.linear([f"{prefix}g_b_proj"], [values], d.rank, own=own_values),
                parameters.linear([f"{prefix}f_b_proj"], [d.num_decays], d.rank, own=own_decays),
            ]
        rates = decay_rates(parameters, f"{prefix}A_log", *d.rates_shape or (heads,)).reshape(-1)
        self._rates = self._ops.place(rates[d.own_values])
        decay_bias = parameters.weights.take(f"{prefix}dt_bias", (d.num_decays,), "float32")
        self._decay_bias = self._ops.place(decay_bias[own_decays])
        # Norms with these weights give keys length 1, and queries length 1 over the root of their size.
        self._query_weight = self._ops.place(np.full(d.key_size, 1 / d.key_size, np.float32))
        self._key_weight = self._ops.place(np.full(d.key_size, d.key_size**-0.5, np.float32))
        self._norm = Norm(d.norm, parameters, f"{prefix}{d.norm_name}", d.value_size)
        self._ending = parameters.ending(
            f"{prefix}{d.output_name}", hidden_size, own.num_value_heads * d.value_size, False, d.shard
        )

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        d, ops, num_tokens = self._part, self._ops, hidden.shape[0]
        projected = ops.linear(hidden, self.consumer, self._dtype)
        heads, width, keys = d.num_value_heads, d.conv_width, d.num_key_heads * d.key_size
        (end_gates, end_betas) = self._ends
        gates, decays = projected[:, width:end_gates], projected[:, end_betas:]
        if self._inner:
            gates, decays = (
                ops.linear(part, matrix, self._dtype)
                for part, matrix in zip((gates, decays), self._inner, strict=True)
            )  # fmt: skip
        mixed = self._conv.forward(projected[:, :width], batch, tables, cache)
        query, key = (x.reshape(num_tokens, -1, d.key_size) for x in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
        eps = 1e-6 / d.key_size
        y = ops.gated_delta(
            ops.rms_norm(query, self._query_weight, eps), ops.rms_norm(key, self._key_weight, eps),
            mixed[:, 2 * keys :].reshape(num_tokens, heads, d.value_size), decays,
            projected[:, end_gates:end_betas], self._rates, self._decay_bias, d.beta_scale,
            *self._conv.behind(batch, tables, cache), d.lowest, d.alternates,
        )  # fmt: skip
        normed = self._norm.forward(y.reshape(num_tokens, heads, d.value_size)).reshape(num_tokens, -1)
        return self._ending.product(ops.multiply(normed, gates, d.gate_activation, self._ending.weight))


@dataclass(frozen=True, slots=True)
class LightningDescription(ShardedHeads):
    """Lightning attention (Qin et al. 2024): linear attention with a decay rate for each head, a gate, and a norm over
    all heads. There are two matrices: query, key and value, whose rows lie together by head, and the gate."""

    num_heads: int
    head_size: int
    rate: float  # the decay rate of head h is rate * 2^(-8 (h + 1) / heads)
    norm: NormDescription
    activation: str = "silu"  # activation of queries, keys and values
    shard: Shard = WHOLE

    @property
    def all_gather_size(self) -> int:
        """Return the number of elements of a row that workers gather."""
        return self.num_heads * self.head_size

    @property
    def cache(self) -> LayerCacheSpec:
        heads = len(self.own_heads)
        return state_of(1, 0, heads * self.head_size, heads, self.head_size)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Lightning:
        return Lightning(self, hidden_size, parameters, prefix)


class Lightning:
    def __init__(
        self, description: LightningDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        d, prefix = description, f"{prefix}self_attn."
        width, own = d.num_heads * d.head_size, elements(d.own_heads, d.head_size)
        by_part = np.arange(3 * width).reshape(d.num_heads, 3, d.head_size)[d.own_heads].swapaxes(0, 1).reshape(-1)
        self.consumer = parameters.linear(
            [f"{prefix}qkv_proj", f"{prefix}output_gate"], [3 * width, width], hidden_size,
            orders=[by_part, np.array(own)],
        )  # fmt: skip
        rates = -d.rate * 2.0 ** (-8 / d.num_heads * (np.arange(d.num_heads) + 1))
        self._rates = self._ops.place(np.repeat(rates[d.own_heads], d.head_size).astype(np.float32))
        self._norm = SharedNorm(d.norm, parameters, f"{prefix}norm", width, d.shard, own)
        self._ending = parameters.ending(f"{prefix}out_proj", hidden_size, len(own), False, d.shard)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        d, ops, num_tokens = self.description, self._ops, hidden.shape[0]
        heads = len(d.own_heads)
        width = heads * d.head_size
        projected = ops.linear(hidden, self.consumer, self._dtype)
        qkv = ops.activation(projected[:, : 3 * width], d.activation)
        query, key = (qkv[:, begin : begin + width].reshape(num_tokens, heads, d.head_size) for begin in (0, width))
        y = ops.selective_scan(
            qkv[:, 2 * width :], None, key, query, self._rates, None, None, (0.0, inf),
            *_places(cache.key, batch, tables),
        )  # fmt: skip
        gated = ops.multiply(self._norm.forward(y), projected[:, 3 * width :], "sigmoid", self._ending.weight)
        return self._ending.product(gated)


@dataclass(frozen=True, slots=True)
class GatedRecurrenceDescription(ShardedHeads):
    """The real-gated linear recurrent unit after a convolution, times a second branch (De et al. 2024). Each head has
    gate matrices of its own."""

    width: int
    num_heads: int
    kernel: int
    activation: str  # activation of the second branch
    shard: Shard = WHOLE

    @property
    def own(self) -> range:
        """Return this worker's channels."""
        return elements(self.own_heads, self.width // self.num_heads)

    @property
    def cache(self) -> LayerCacheSpec:
        width = len(self.own)
        return state_of(self.kernel, width, width, 1, 1)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> GatedRecurrence:
        return GatedRecurrence(self, hidden_size, parameters, prefix)


class GatedRecurrence:
    def __init__(
        self, description: GatedRecurrenceDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        d, prefix, weights = description, f"{prefix}temporal_block.", parameters.weights
        own, heads = d.own, d.own_heads
        self.consumer = parameters.linear(
            [f"{prefix}linear_y", f"{prefix}linear_x"], [d.width] * 2, hidden_size, True,
            own=own,
        )  # fmt: skip
        self._conv = Convolution(parameters, {f"{prefix}conv_1d": d.width}, d.kernel, True, "identity", np.array(own))
        size = d.width // d.num_heads

        def gate(name: str) -> tuple[ExpertsWeight, Array]:
            matrices = weights.take(f"{prefix}rg_lru.{name}_gate_weight", (d.num_heads, size, size), own=heads)
            packed = (self._ops.pack_linear([floats(np.ascontiguousarray(matrix.T))]) for matrix in matrices)
            bias = weights.take(f"{prefix}rg_lru.{name}_gate_bias", (d.num_heads, size), "float32", heads)
            stack = self._ops.stack_experts(packed, len(heads))
            parameters.num_matrix_bytes += stack.num_bytes
            return stack, self._ops.place(bias.reshape(-1))

        (self._input_gate, self._input_bias), (self._decay_gate, self._decay_bias) = gate("input"), gate("recurrent")
        rates = weights.take(f"{prefix}rg_lru.recurrent_param", (d.width,), "float32", own)
        self._rates = self._ops.place((-8 * np.logaddexp(0, rates)).astype(np.float32))
        self._ending = parameters.ending(f"{prefix}linear_out", hidden_size, len(own), True, d.shard)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        d, ops, num_tokens = self.description, self._ops, hidden.shape[0]
        projected = ops.linear(hidden, self.consumer, self._dtype)
        width = len(d.own)
        x = self._conv.forward(projected[:, width:], batch, tables, cache)
        heads = x.reshape(num_tokens, len(d.own_heads), -1)
        y = ops.gated_recurrence(
            x, ops.linear_by_head(heads, self._input_gate).reshape(num_tokens, -1),
            ops.linear_by_head(heads, self._decay_gate).reshape(num_tokens, -1), self._rates, self._input_bias,
            self._decay_bias, *self._conv.behind(batch, tables, cache),
        )  # fmt: skip
        other = ops.activation(projected[:, :width], d.activation)
        return self._ending.product(ops.multiply(y, other, consumer=self._ending.weight))
