"""Grouped-query attention (Ainslie et al. 2023) over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.norm import Norm, NormDescription, SharedNorm
from octavo.layers.parameters import Parameters
from octavo.layers.product import Adapters, Summand
from octavo.layers.rotary import AttentionTemperature, RopeConfig, alibi_slopes, halves
from octavo.layers.tensor_parallel import WHOLE, Shard, ShardedHeads, elements
from octavo.ops import Array, LayerKVCache
from octavo.step_batch import GroupTables, StepBatch


@dataclass(frozen=True, slots=True)
class GateDescription:
    """A gate: attention's output is multiplied by an activation of one more product of the layer's input."""

    name: str | None  # the gate's matrix; None: the matrix of queries has a gate of equal size after each head
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    by_head: bool = False  # one number for all values of a head
    bias: str | None = None  # tensor [heads]; a head's entry is added to all of its gates


@dataclass(frozen=True, slots=True)
class AttentionDescription(ShardedHeads):
    """The description of attention. Sizes are in elements, `num_` are counts. Names are those of the checkpoint's
    modules, without the layer's prefix.

    Three `qkv_names` are the modules of query, key and value. A single name is a module that has them stacked, in
    `qkv_blocks` blocks of equally many heads; `qkv_order` is their order within a block. A layer without keys or values
    of its own (`made_parts`) has names only for the parts that it computes.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # of the scores
    rope: RopeConfig | None  # None: queries and keys are not rotated
    head_value_size: int | None = None  # None: the head size
    window: int = 0  # number of positions that a token sees, its own included; 0: all
    softcap: float = 0.0  # soft cap of the scores; 0: none
    alibi_max: float = 0.0  # ALiBi: the flattest slope is 2^-alibi_max (Press et al. 2022); 0: no slopes
    alibi_scale: float = 1.0  # factor of the slopes
    sinks: str | None = None  # tensor [heads]: the score of a further key that has no value
    bidirectional: bool = False  # a token also sees later tokens; a window extends to both sides
    sees_ahead: bool = True  # whether this layer follows `ModelDescription.sees_ahead`
    # Biases of scores by the bucket of the distance: name of the tensor [buckets, heads], and number of buckets.
    distance_biases: tuple[str, int] | None = None
    attention_temperature: AttentionTemperature | None = None
    qkv_clip: float = 0.0  # queries, keys and values are clipped to -qkv_clip .. qkv_clip; 0: no clipping
    qk_norm: NormDescription | None = None
    qk_norm_scope: Literal["head", "heads", "all"] = "head"  # each head; each with its own weights; all heads together
    norms_after_rotation: bool = False  # queries and keys are normed after the rotation
    value_norm: NormDescription | None = None  # norm of the values of each head; it has no weights
    keys_are_values: bool = False  # values are the keys before their norm and rotation; there are two `qkv_names`
    reads_layer: int | None = None  # index of the layer whose keys and values this layer reads; one of `qkv_names`
    output_norm: NormDescription | None = None  # norm of the output matrix's input
    gate: GateDescription | None = None
    qkv_bias: bool = False
    keys_have_bias: bool = True  # False: keys have no bias even if queries and values have one
    output_bias: bool | str = False  # whether there is a bias, or its tensor's name
    qkv_names: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_blocks: int = 1
    qkv_order: str = "qkv"
    is_transposed: bool = False  # matrices are stored [inputs, outputs]
    output_name: str = "self_attn.o_proj"
    input_size: int | None = None  # size of each input; None: the hidden size
    num_inputs: int = 1  # number of inputs, which stand side by side in the columns of the matrices
    qk_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    output_norm_name: str = ""
    shard: Shard = WHOLE  # this worker's heads; `octavo.models.sharding` refuses layers that cannot be sharded

    @property
    def all_gather_size(self) -> int:
        """Return the most elements of a row that workers gather."""
        queries = self.head_size if self.qk_norm is not None and self.qk_norm_scope == "all" else 0
        return self.num_heads * max(queries, 0 if self.output_norm is None else self.value_size)

    @property
    def own_kv_heads(self) -> range:
        return self.shard.of_few(self.num_kv_heads, "key and value heads")

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_value_size is None else self.head_value_size

    @property
    def cache(self) -> LayerCacheSpec:
        """Return the layer's cache of each token. With bidirectional attention, whole texts are cached for one step."""
        window = 0 if self.bidirectional else self.window
        return LayerCacheSpec(
            kind="window" if window else "full",
            num_kv_heads=len(self.own_kv_heads),
            key_size=self.head_size,
            value_size=self.value_size,
            window=window,
        )

    @property
    def made_parts(self) -> str:
        """Return which of query, key and value the layer computes from its input. Values may be keys; keys and values
        may be another layer's."""
        if self.reads_layer is not None:
            return "q"
        return "qk" if self.keys_are_values else "qkv"

    @property
    def own_gates(self) -> range:
        """Return this worker's range of all heads' gates."""
        if self.gate is None:
            return range(0)
        return elements(self.own_heads, 1 if self.gate.by_head else self.value_size)

    @property
    def element_order(self) -> NDArray[np.intp]:
        """Return the order of a head's elements: for each of Octavo's elements the index of the checkpoint's."""
        return halves(self.rope, self.head_size)

    def row_orders(self) -> list[NDArray[np.intp]]:
        """Return, for each matrix of `qkv_names`, the checkpoint's rows of this worker's heads, in Octavo's order."""
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        sizes = {"q": self.head_size, "k": self.head_size, "v": self.value_size}
        own = np.arange(self.head_size)
        if self.gate is not None and self.gate.name is None:
            assert len(self.qkv_names) == 3 and np.array_equal(self.element_order, own)
            pairs = np.arange(2 * self.num_heads * self.head_size).reshape(self.num_heads, 2, self.head_size)
            keys = np.array(elements(self.own_kv_heads, self.head_size))
            return [pairs[self.own_heads].transpose(1, 0, 2).reshape(-1), keys, keys]
        within = {"q": self.element_order, "k": self.element_order, "v": np.arange(self.value_size)}
        parts = self.made_parts
        assert not self.keys_are_values or np.array_equal(self.element_order, own)
        first = {}  # part -> the first row of each head, [heads]
        if len(self.qkv_names) == len(parts):
            first = {part: np.arange(count) * sizes[part] for part, count in heads.items()}
        else:
            assert self.value_size == self.head_size
            in_block = {part: count // self.qkv_blocks for part, count in heads.items()}
            block_heads, begin = sum(in_block.values()), 0
            for part in self.qkv_order:
                blocks = np.arange(self.qkv_blocks)[:, None] * block_heads
                first[part] = (blocks + begin + np.arange(in_block[part])).reshape(-1) * self.head_size
                begin += in_block[part]
        own_heads = {"q": self.own_heads, "k": self.own_kv_heads, "v": self.own_kv_heads}
        orders = [(first[part][own_heads[part]][:, None] + within[part]).reshape(-1) for part in parts]
        return orders if len(self.qkv_names) == len(parts) else [np.concatenate(orders)]

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Attention:
        return Attention(self, hidden_size, parameters, prefix)


class Attention:
    """Attention: one product for queries, keys and values, the paged cache, and the output matrix."""

    def __init__(
        self, description: AttentionDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        head_size, num_heads, shard = description.head_size, description.num_heads, description.shard
        self._query_size = len(description.own_heads) * head_size
        self._key_size = len(description.own_kv_heads) * head_size
        self._gate_size = len(description.own_gates)
        value_size = len(description.own_heads) * description.value_size
        gate = description.gate
        names, orders = [f"{prefix}{name}" for name in description.qkv_names], description.row_orders()
        kv_heads, has_gates = description.num_kv_heads, gate is not None and gate.name is None
        sizes = [num_heads * head_size * (1 + has_gates), kv_heads * head_size, kv_heads * description.value_size]
        sizes = sizes[: len(description.made_parts)]
        without_bias = () if description.keys_have_bias else names[1:2]
        qkv_bias: bool | NDArray[Any] = description.qkv_bias
        if gate is not None and gate.name is not None:
            assert len(names) == 3
            names.insert(1, f"{prefix}{gate.name}")
            sizes.insert(1, num_heads * (1 if gate.by_head else description.value_size))
            without_bias = (*without_bias, names[1])
            orders.insert(1, np.array(description.own_gates))
            if gate.bias is not None:
                assert not (qkv_bias or gate.by_head)
                of_heads = parameters.weights.take(f"{prefix}{gate.bias}", (num_heads,))
                of_parts = [np.zeros(size, of_heads.dtype) for size in sizes]
                of_parts[1] = of_heads.repeat(description.value_size)
                qkv_bias = np.concatenate(of_parts)
        self._qkv_of_inputs = [
            parameters.linear(
                names, sizes, description.input_size or hidden_size, qkv_bias if number == 0 else False, orders=orders,
                is_transposed=description.is_transposed, part=(number, description.num_inputs),
                without_bias=without_bias,
            )
            for number in range(description.num_inputs)
        ]  # fmt: skip
        self._qkv = self._qkv_of_inputs[0]
        bias = description.output_bias
        bias = f"{prefix}{bias}" if isinstance(bias, str) else bias
        self._ending = parameters.ending(
            f"{prefix}{description.output_name}", hidden_size, value_size, bias, shard,
            is_transposed=description.is_transposed,
        )  # fmt: skip
        self._output = self._ending.weight
        self.consumer = self._qkv  # the only matrix that reads the layer's input
        self._rotary = parameters.rotary(description.rope, head_size)
        self._identity = parameters.rotary(None, head_size) if description.norms_after_rotation else self._rotary
        self._axes = None
        if description.rope is not None and description.rope.axes:
            assert not description.norms_after_rotation and description.attention_temperature is None
            self._axes = self._ops.place(np.array(description.rope.axes, np.int32))
        self._qk_norms: list[Norm | SharedNorm] = []
        if description.qk_norm is not None:
            of_query = description.qk_norm_names[0], num_heads, description.own_heads
            of_key = description.qk_norm_names[1], description.num_kv_heads, description.own_kv_heads
            for name, heads, own in (of_query, of_key) if description.reads_layer is None else (of_query,):
                self._qk_norms.append(self._qk_norm(description.qk_norm, parameters, f"{prefix}{name}", heads, own))
        self._value_norm: Norm | None = None
        if description.value_norm is not None:
            assert not description.value_norm.has_weight
            self._value_norm = Norm(description.value_norm, parameters, "", description.value_size)
        self._output_norm: SharedNorm | None = None
        if description.output_norm is not None:
            self._output_norm = SharedNorm(
                description.output_norm, parameters, f"{prefix}{description.output_norm_name}",
                num_heads * description.value_size, shard, elements(description.own_heads, description.value_size),
            )  # fmt: skip
        self._slopes = self._sinks = None
        if description.alibi_max:
            slopes = alibi_slopes(num_heads, description.alibi_max) * np.float32(description.alibi_scale)
            self._slopes = self._ops.place(slopes[description.own_heads])
        if description.sinks is not None:
            sinks = parameters.weights.take(f"{prefix}{description.sinks}", (num_heads,))
            self._sinks = self._ops.place(np.asarray(sinks[description.own_heads], np.float32))
        self._biases = None
        if description.distance_biases is not None:
            self._biases = parameters.distance_biases(*description.distance_biases, num_heads, description.own_heads)
        self._attention_temperature = parameters.attention_temperature(description.attention_temperature)

    def _qk_norm(
        self, norm: NormDescription, parameters: Parameters, name: str, heads: int, own: range
    ) -> Norm | SharedNorm:
        """Return the norm of queries or keys for this worker's `own` of all `heads`."""
        d, size = self.description, self.description.head_size
        if d.qk_norm_scope == "all":
            order = (np.arange(heads)[:, None] * size + d.element_order).reshape(-1)
            return SharedNorm(norm, parameters, name, heads * size, d.shard, elements(own, size), order=order)
        with_own = heads if d.qk_norm_scope == "heads" else None
        return Norm(norm, parameters, name, size, heads=with_own, own_heads=own, order=d.element_order)

    def forward(
        self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache, *others: Array,
        adapters: Adapters | None = None,
    ) -> Summand:  # fmt: skip
        """Return the output [T, H] of hidden [T, H]. `tables` belong to the layer's cache group; the `others` are
        further inputs, [T, H] each."""
        description, ops = self.description, self._ops
        qkv = ops.linear(hidden, self._qkv, self._dtype)
        for other, weight in zip(others, self._qkv_of_inputs[1:], strict=True):
            ops.linear_add(other, weight, qkv)
        if adapters is not None:
            adapters.add_to(qkv, hidden)
        if description.qkv_clip:
            qkv = ops.activation(qkv, "clip", parameters=(description.qkv_clip,))
        if description.reads_layer is None:
            query = self._write_cache(qkv, batch, tables, cache)
        else:
            query = self._heads(qkv, description.head_size)
            query = self._qk_norms[0].forward(query) if self._qk_norms else query
            ops.rotate(query, batch.positions, self._rotary)
        further: dict[str, Any] = {}
        if description.bidirectional:
            further = {"bidirectional": True, "distance_biases": self._biases}
        elif batch.key_ends is not None and description.sees_ahead:
            further = {"key_ends": batch.key_ends}
        if description.value_size != description.head_size:
            further["value_size"] = description.value_size
        attended = ops.paged_attention(
            query,
            cache,
            tables.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            description.scale,
            description.window,
            description.softcap,
            self._slopes,
            self._sinks,
            **further,
        )
        if description.gate is not None:
            gate = qkv[:, self._query_size : self._query_size + self._gate_size]
            attended = ops.multiply(attended, gate, description.gate.activation, self._output)
        if self._output_norm is not None:
            attended = self._output_norm.forward(attended, self._output)
        return self._ending.product(attended)

    def _write_cache(self, qkv: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Array:
        """Write keys and values of the step's tokens to the cache; return queries [T, heads, D].

        `qkv` [T, outputs] is the product of the layer's input."""
        description, ops = self.description, self._ops
        size, first_key = description.head_size, self._query_size + self._gate_size
        both = first_key + self._key_size
        query, key = qkv[:, : self._query_size], qkv[:, first_key:both]
        if description.norms_after_rotation:
            assert description.gate is None
            ops.rotate(self._heads(qkv[:, :both], size), batch.positions, self._rotary)
        value = self._heads(key if description.keys_are_values else qkv[:, both:], description.value_size)
        if description.qk_norm_scope == "all":
            query, key = self._normed(query, key)
        query, key = self._heads(query, size), self._heads(key, size)
        if description.qk_norm_scope != "all":
            query, key = self._normed(query, key)
        if self._value_norm is not None:
            value = self._value_norm.forward(value)
        if self._axes is not None and batch.axis_positions is not None:
            ops.rotary_and_cache(
                query, key, value, batch.axis_positions, self._rotary, cache, tables.slot_mapping, axes=self._axes
            )
        else:
            ops.rotary_and_cache(
                query,
                key,
                value,
                batch.positions,
                self._identity,
                cache,
                tables.slot_mapping,
                self._attention_temperature,
            )
        return query

    @staticmethod
    def _heads(x: Array, size: int) -> Array:
        """Return x [T, heads * size] as [T, heads, size]."""
        return x.reshape(x.shape[0], -1, size)

    def _normed(self, query: Array, key: Array) -> tuple[Array, Array]:
        if not self._qk_norms:
            return query, key
        query_norm, key_norm = self._qk_norms
        return query_norm.forward(query), key_norm.forward(key)
