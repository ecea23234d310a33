"""What stands in the place of attention and keeps a state of fixed size: state spaces (Mamba), short convolutions, the
gated delta rule, lightning attention, gated recurrences. A state lies in one block of the layer's cache: the
convolution's rows, then the recurrence's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Product
from octavo.loading.weights import floats
from octavo.ops import Array, ExpertsWeight, LayerKVCache, LinearWeight

_TILE = 16  # channels that a state is padded to a multiple of: room for every backend's layout


def _state(kernel: int, conv_width: int, channels: int = 0, groups: int = 1, size: int = 0) -> LayerCacheSpec:
    """Of a convolution over `kernel` tokens and a recurrence of `size` numbers a channel, in equal groups."""
    padded = groups * -(-channels // groups // _TILE) * _TILE
    num_floats = (kernel - 1) * conv_width + padded * size
    return LayerCacheSpec("state", num_bytes=-(-num_floats // _TILE) * 4 * _TILE)


@dataclass(frozen=True, slots=True)
class MambaDescription:
    """Mamba 2 (Dao & Gu 2024), or Mamba 1 (Gu & Dao 2023) where `time_rank` says that time steps come from a product
    of that rank: each channel is a head then. Names are those of the checkpoint's modules, after `name`.

    Zamba's Mamba 1 has `tensors_by_group`: inner matrices of each group of channels, and x beside its gate."""

    num_heads: int
    head_size: int
    state_size: int
    kernel: int
    num_groups: int = 1
    time_rank: int = 0
    time_limit: tuple[float, float] = (0.0, inf)
    norm: NormDescription | None = None  # Mamba 2: of the gated output, by group
    norms_before_gate: bool = False
    inner_norm: NormDescription | None = None  # Mamba 1: of what time steps are made from, and of B and C
    multipliers: tuple[float, ...] = ()  # Mamba 2: of the gate, x, B, C and the time steps that the first matrix gives
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    tensors_by_group: bool = False
    name: str = "mamba"

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_size

    @property
    def conv_width(self) -> int:
        return self.channels + (0 if self.time_rank else 2 * self.num_groups * self.state_size)

    @property
    def cache(self) -> LayerCacheSpec:
        return _state(self.kernel, self.conv_width, self.channels, self.num_groups, self.state_size)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Mamba:
        return Mamba(self, hidden_size, parameters, prefix)


class _Convolution:
    """Over channels that have modules of their own, by name."""

    def __init__(
        self, parameters: Parameters, widths: dict[str, int], kernel: int, bias: bool, activation: str
    ) -> None:
        self._ops, self._activation, take = parameters.ops, activation, parameters.weights.take
        weights = [take(f"{name}.weight", (width, 1, kernel), "float32") for name, width in widths.items()]
        self._weight, self._bias = self._ops.place(np.ascontiguousarray(np.concatenate(weights)[:, 0].T)), None
        if bias:
            biases = [take(f"{name}.bias", (width,), "float32") for name, width in widths.items()]
            self._bias = self._ops.place(np.concatenate(biases))
        self.num_floats = (kernel - 1) * sum(widths.values())

    def forward(self, x: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Array:
        states = cache.key[:, : self.num_floats]
        return self._ops.causal_conv(x, self._weight, self._bias, self._activation, *_places(states, batch, tables))

    def behind(self, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> tuple[Array, Array, Array, Array]:
        """Where the recurrence's numbers are."""
        return _places(cache.key[:, self.num_floats :], batch, tables)


def _places(states: Array, batch: StepBatch, tables: GroupTables) -> tuple[Array, Array, Array, Array]:
    """As operations with states want them."""
    return states, tables.slot_mapping, batch.query_start_loc, batch.seq_lens


def _rates(parameters: Parameters, name: str, *shape: int) -> NDArray[np.float32]:
    """How fast a state decays: stored as the logarithm of its negative."""
    rates: NDArray[np.float32] = -np.exp(parameters.weights.take(name, shape, "float32"))
    return rates


class Mamba:
    def __init__(self, description: MambaDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        d, prefix, weights = description, f"{prefix}{description.name}.", parameters.weights
        channels, size = d.channels, d.state_size
        group = d.num_groups * size
        in_sizes = [channels, channels] if d.time_rank else [channels, channels, group, group, d.num_heads]
        orders = [np.arange(2 * channels).reshape(-1, 2).T.reshape(-1)] if d.tensors_by_group else None
        self.consumer = parameters.linear(
            [f"{prefix}in_proj"], in_sizes, hidden_size, d.bias, scales=d.multipliers, orders=orders
        )
        self._conv = _Convolution(parameters, {f"{prefix}conv1d": d.conv_width}, d.kernel, d.conv_bias, "silu")
        self._inner_norms: list[Norm] = []
        by_head = (d.num_groups, channels // d.num_groups) if d.tensors_by_group else (d.num_heads,)
        if d.time_rank:
            if d.tensors_by_group:
                self._inner, self._time = self._by_group(parameters, prefix)
            else:
                self._inner = parameters.linear([f"{prefix}x_proj"], [d.time_rank + 2 * size], channels)
                self._time = parameters.linear([f"{prefix}dt_proj"], [channels], d.time_rank)
            if d.inner_norm is not None:
                names = (("dt", d.time_rank), ("b", size), ("c", size))
                self._inner_norms = [Norm(d.inner_norm, parameters, f"{prefix}{n}_layernorm", k) for n, k in names]
            time_bias = "dt_proj_bias" if d.tensors_by_group else "dt_proj.bias"
            by_channel = _rates(parameters, f"{prefix}A_log", *by_head, size).reshape(channels, size)
            rates = np.ascontiguousarray(by_channel.T)
        else:
            time_bias = "dt_bias"
            rates = np.repeat(_rates(parameters, f"{prefix}A_log", d.num_heads), d.head_size)
        self._time_bias = self._ops.place(weights.take(f"{prefix}{time_bias}", by_head, "float32").reshape(-1))
        skip = np.repeat(weights.take(f"{prefix}D", by_head, "float32"), d.head_size)
        self._rates, self._skip = self._ops.place(rates), self._ops.place(skip)
        self._norm: Norm | None = None
        if d.norm is not None:
            self._norm = Norm(d.norm, parameters, f"{prefix}norm", channels, groups=d.num_groups)
        self._output = parameters.linear([f"{prefix}out_proj"], [hidden_size], channels, d.output_bias)

    def _by_group(self, parameters: Parameters, prefix: str) -> tuple[LinearWeight, LinearWeight]:
        """Matrices of all groups, with nothing where one's outputs meet another's inputs."""
        d, take = self.description, parameters.weights.take
        groups, rank, width = d.num_groups, d.time_rank, d.channels // d.num_groups
        inner = take(f"{prefix}x_proj_weight", (groups, rank + 2 * d.state_size, width))
        time = take(f"{prefix}dt_proj_weight", (groups, width, rank))

        def packed(*parts: NDArray[Any]) -> LinearWeight:
            blocks = [np.zeros((groups, part.shape[1], groups, part.shape[2]), part.dtype) for part in parts]
            for block, part in zip(blocks, parts, strict=True):
                block[np.arange(groups), :, np.arange(groups)] = part
            return parameters.packed(np.concatenate([b.reshape(b.shape[0] * b.shape[1], -1) for b in blocks]))

        return packed(*np.split(inner, (rank, rank + d.state_size), 1)), packed(time)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Product:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""
        d, ops = self.description, self._ops
        num_tokens, channels, size = hidden.shape[0], d.channels, d.state_size
        projected = ops.linear(hidden, self.consumer, self._dtype)
        if d.time_rank:
            x, gate = projected[:, :channels], projected[:, channels:]
            x = self._conv.forward(x, batch, tables, cache)
            inner = ops.linear(x, self._inner, self._dtype)
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
            return Product(ops, ops.multiply(y, gate, "silu", self._output), self._output)
        if d.norms_before_gate:
            return Product(ops, ops.multiply(self._norm.forward(y), gate, "silu", self._output), self._output)
        return Product(ops, self._norm.forward(ops.multiply(y, gate, "silu"), self._output), self._output)


@dataclass(frozen=True, slots=True)
class ShortConvDescription:
    """A gated convolution over the last tokens (LFM2)."""

    channels: int
    kernel: int
    bias: bool = False
    name: str = "conv"

    @property
    def cache(self) -> LayerCacheSpec:
        return _state(self.kernel, self.channels)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> ShortConv:
        return ShortConv(self, hidden_size, parameters, prefix)


class ShortConv:
    def __init__(
        self, description: ShortConvDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self._ops, self._dtype, self._width = parameters.ops, parameters.dtype, description.channels
        d, prefix = description, f"{prefix}{description.name}."
        self.consumer = parameters.linear([f"{prefix}in_proj"], [3 * d.channels], hidden_size, d.bias)
        self._conv = _Convolution(parameters, {f"{prefix}conv": d.channels}, d.kernel, d.bias, "identity")
        self._output = parameters.linear([f"{prefix}out_proj"], [hidden_size], d.channels, d.bias)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Product:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""
        ops, width = self._ops, self._width
        projected = ops.linear(hidden, self.consumer, self._dtype)
        before, after, x = projected[:, :width], projected[:, width : 2 * width], projected[:, 2 * width :]
        x = self._conv.forward(ops.multiply(x, before), batch, tables, cache)
        return Product(ops, ops.multiply(x, after, "identity", self._output), self._output)


@dataclass(frozen=True, slots=True)
class GatedDeltaDescription:
    """The gated delta rule (Yang et al. 2025). Names are those of the checkpoint's modules, after `name`.

    `in_names` are of the matrices of query, key, value, gate, beta and decay, in this order: each its own; the first
    three stacked; or two, where each key head's rows lie together: its query, key, values and gates, and its betas and
    decays. GGUF files have the first of those two as query, key and value of all heads, and gates: those are three.

    Where it `decays_by_element` each element of a head's key has a decay (Kimi Team 2025). With a `rank` gates and
    decays are made by two matrices each, with so many numbers between; the second ones are `inner_names`."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel: int
    norm: NormDescription  # of each head's output
    beta_scale: float = 1.0
    decays_by_element: bool = False
    lowest: float = 0.0  # see `Ops.gated_delta`, as for the next one
    alternates: bool = False
    rank: int = 0
    gate_activation: str = "silu"
    inner_names: tuple[str, str] = ("g_b_proj", "f_b_proj")
    rates_shape: tuple[int, ...] = ()  # as stored; none: [heads]
    in_names: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
    conv_names: tuple[str, ...] = ("conv1d",)  # or of query, key and value
    norm_name: str = "norm"
    output_name: str = "out_proj"
    name: str = "linear_attn"

    @property
    def conv_width(self) -> int:
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def cache(self) -> LayerCacheSpec:
        heads = self.num_value_heads
        return _state(self.kernel, self.conv_width, heads * self.value_size, heads, self.key_size)

    @property
    def num_decays(self) -> int:
        return self.num_value_heads * (self.key_size if self.decays_by_element else 1)

    def row_orders(self, num_matrices: int) -> list[NDArray[np.intp]] | None:
        """For each matrix its rows in our order; None if it is the checkpoint's."""
        if num_matrices > 3:
            return None
        heads, share = self.num_key_heads, self.num_value_heads // self.num_key_heads

        def order(*sizes: int) -> NDArray[np.intp]:
            rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
            return np.concatenate([part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], 1)])

        values = share * self.value_size
        if num_matrices == 3:
            return [np.arange(self.conv_width), np.arange(heads * values), order(share, share)]
        return [order(self.key_size, self.key_size, values, values), order(share, share)]

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> GatedDelta:
        return GatedDelta(self, hidden_size, parameters, prefix)


class GatedDelta:
    def __init__(
        self, description: GatedDeltaDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        d, prefix = description, f"{prefix}{description.name}."
        heads, values, keys = d.num_value_heads, d.num_value_heads * d.value_size, d.num_key_heads * d.key_size
        gates, decays = (d.rank, d.rank) if d.rank else (values, d.num_decays)
        names = [f"{prefix}{name}" for name in d.in_names]
        if len(names) == 2 and f"{names[0]}.weight" not in parameters.weights:
            names = [f"{prefix}{name}" for name in ("in_proj_qkv", "in_proj_z", d.in_names[1])]
        sizes = {
            2: (2 * keys + 2 * values, 2 * heads),
            3: (d.conv_width, values, 2 * heads),
            4: (d.conv_width, values, heads, heads),
            6: (keys, keys, values, gates, heads, decays),
        }[len(names)]
        self._ends = d.conv_width + gates, d.conv_width + gates + heads  # of gates and betas in that product
        self.consumer = parameters.linear(names, sizes, hidden_size, orders=d.row_orders(len(names)))
        widths = (d.conv_width,) if len(d.conv_names) == 1 else (keys, keys, values)
        convolved = {f"{prefix}{name}": width for name, width in zip(d.conv_names, widths, strict=True)}
        self._conv = _Convolution(parameters, convolved, d.kernel, False, "silu")
        self._inner = [
            parameters.linear([f"{prefix}{name}"], [size], d.rank)
            for name, size in zip(d.inner_names, (values, d.num_decays), strict=True) if d.rank
        ]  # fmt: skip
        rates = _rates(parameters, f"{prefix}A_log", *d.rates_shape or (heads,))
        self._rates = self._ops.place(rates.reshape(-1))
        self._decay_bias = self._ops.place(parameters.weights.take(f"{prefix}dt_bias", (d.num_decays,), "float32"))
        # Queries and keys of length 1, and queries over the root of their size: norms with these weights.
        self._query_weight = self._ops.place(np.full(d.key_size, 1 / d.key_size, np.float32))
        self._key_weight = self._ops.place(np.full(d.key_size, d.key_size**-0.5, np.float32))
        self._norm = Norm(d.norm, parameters, f"{prefix}{d.norm_name}", d.value_size)
        self._output = parameters.linear([f"{prefix}{d.output_name}"], [hidden_size], values)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Product:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""
        d, ops, num_tokens = self.description, self._ops, hidden.shape[0]
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
        gated = ops.multiply(normed, gates, d.gate_activation, self._output)
        return Product(ops, gated, self._output)


@dataclass(frozen=True, slots=True)
class LightningDescription:
    """Lightning attention (Qin et al. 2024): linear attention whose heads forget at rates of their own, with a gate and
    a norm over all heads. Of two matrices: query, key and value of each head together, and the gate."""

    num_heads: int
    head_size: int
    rate: float  # of all heads in this layer; that of head h is 2^(-8 (h + 1) / heads) times this
    norm: NormDescription
    activation: str = "silu"  # of queries, keys and values
    name: str = "self_attn"

    @property
    def cache(self) -> LayerCacheSpec:
        return _state(1, 0, self.num_heads * self.head_size, self.num_heads, self.head_size)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Lightning:
        return Lightning(self, hidden_size, parameters, prefix)


class Lightning:
    def __init__(
        self, description: LightningDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        d, prefix = description, f"{prefix}{description.name}."
        width = d.num_heads * d.head_size
        by_part = np.arange(3 * width).reshape(d.num_heads, 3, d.head_size).swapaxes(0, 1).reshape(-1)
        self.consumer = parameters.linear(
            [f"{prefix}qkv_proj", f"{prefix}output_gate"], [3 * width, width], hidden_size,
            orders=[by_part, np.arange(width)],
        )  # fmt: skip
        rates = -d.rate * 2.0 ** (-8 / d.num_heads * (np.arange(d.num_heads) + 1))
        self._rates = self._ops.place(np.repeat(rates, d.head_size).astype(np.float32))
        self._norm = Norm(d.norm, parameters, f"{prefix}norm", width)
        self._output = parameters.linear([f"{prefix}out_proj"], [hidden_size], width)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Product:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""
        d, ops, num_tokens = self.description, self._ops, hidden.shape[0]
        width = d.num_heads * d.head_size
        projected = ops.linear(hidden, self.consumer, self._dtype)
        qkv = ops.activation(projected[:, : 3 * width], d.activation)
        query, key = (
            qkv[:, begin : begin + width].reshape(num_tokens, d.num_heads, d.head_size) for begin in (0, width)
        )
        y = ops.selective_scan(
            qkv[:, 2 * width :], None, key, query, self._rates, None, None, (0.0, inf),
            *_places(cache.key, batch, tables),
        )  # fmt: skip
        gated = ops.multiply(self._norm.forward(y), projected[:, 3 * width :], "sigmoid", self._output)
        return Product(ops, gated, self._output)


@dataclass(frozen=True, slots=True)
class GatedRecurrenceDescription:
    """The real-gated linear recurrent unit behind a convolution, times a second branch (De et al. 2024). Its gates are
    products of each head by itself. Names are those of the checkpoint's modules, after `name`."""

    width: int
    num_heads: int
    kernel: int
    activation: str  # of the second branch
    name: str = "temporal_block"

    @property
    def cache(self) -> LayerCacheSpec:
        return _state(self.kernel, self.width, self.width, 1, 1)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> GatedRecurrence:
        return GatedRecurrence(self, hidden_size, parameters, prefix)


class GatedRecurrence:
    def __init__(
        self, description: GatedRecurrenceDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        d, prefix, weights = description, f"{prefix}{description.name}.", parameters.weights
        self.consumer = parameters.linear([f"{prefix}linear_y", f"{prefix}linear_x"], [d.width] * 2, hidden_size, True)
        self._conv = _Convolution(parameters, {f"{prefix}conv_1d": d.width}, d.kernel, True, "identity")
        size = d.width // d.num_heads

        def gate(name: str) -> tuple[ExpertsWeight, Array]:
            matrices = weights.take(f"{prefix}rg_lru.{name}_gate_weight", (d.num_heads, size, size))
            packed = (self._ops.pack_linear([floats(np.ascontiguousarray(matrix.T))]) for matrix in matrices)
            bias = weights.take(f"{prefix}rg_lru.{name}_gate_bias", (d.num_heads, size), "float32")
            stack = self._ops.stack_experts(packed, d.num_heads)
            parameters.num_matrix_bytes += stack.num_bytes
            return stack, self._ops.place(bias.reshape(-1))

        (self._input_gate, self._input_bias), (self._decay_gate, self._decay_bias) = gate("input"), gate("recurrent")
        rates = weights.take(f"{prefix}rg_lru.recurrent_param", (d.width,), "float32")
        self._rates = self._ops.place((-8 * np.logaddexp(0, rates)).astype(np.float32))
        self._output = parameters.linear([f"{prefix}linear_out"], [hidden_size], d.width, True)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Product:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""
        d, ops, num_tokens = self.description, self._ops, hidden.shape[0]
        projected = ops.linear(hidden, self.consumer, self._dtype)
        x = self._conv.forward(projected[:, d.width :], batch, tables, cache)
        heads = x.reshape(num_tokens, d.num_heads, -1)
        y = ops.gated_recurrence(
            x, ops.linear_by_head(heads, self._input_gate).reshape(num_tokens, -1),
            ops.linear_by_head(heads, self._decay_gate).reshape(num_tokens, -1), self._rates, self._input_bias,
            self._decay_bias, *self._conv.behind(batch, tables, cache),
        )  # fmt: skip
        other = ops.activation(projected[:, : d.width], d.activation)
        return Product(ops, ops.multiply(y, other, consumer=self._output), self._output)
