"""Latent attention (DeepSeek-AI 2024): what is cached of a token is one compressed vector, from which the keys and
values of all heads are made, and one rotated part of a key that all heads share. Of several workers each has all of
that, and some of the heads.

Nothing is made from it here. A query is multiplied with its head's matrix of keys instead, so that it meets compressed
vectors themselves, and what a head gathers of these is multiplied with its matrix of values ("absorbed" form). Prompts
and decodes compute the same: the form in which keys and values are made adds up in another order, and an answer would
depend on where its prompt is cut. See docs/kernels.md for what either costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.batch import GroupTables, StepBatch
from octavo.errors import LoadError
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.rotary import AttentionTemperature, RopeConfig, halves
from octavo.layers.sparse_indexer import SparseIndexer, SparseIndexerDescription
from octavo.layers.tensor_parallel import WHOLE, Shard, ShardedHeads, elements
from octavo.loading.weights import floats
from octavo.ops import Array, ExpertsWeight, IndexOps, LayerKVCache


@dataclass(frozen=True, slots=True)
class MLADescription(ShardedHeads):
    """Sizes in elements. Names are those of the checkpoint's modules, after the layer's prefix and `name`.

    A head's query has `qk_nope_head_dim` elements, then `rope.rotary_dim` that are rotated. With a `q_lora_rank`
    queries are compressed as well."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    value_size: int
    qk_rope_head_dim: int
    rope: RopeConfig | None  # None: nothing is rotated
    scale: float  # of the scores
    norm: NormDescription  # of what is compressed
    query_scale: float = 1.0  # of compressed queries after their norm
    latent_scale: float = 1.0  # of compressed keys and values likewise
    attention_temperature: AttentionTemperature | None = None
    gate_name: str | None = None  # of a matrix to a number for each head, whose sigmoid its values are multiplied with
    bias: bool = False  # of the matrices that compress, and of the last
    name: str = "self_attn"
    output_name: str = "o_proj"
    shard: Shard = WHOLE  # of the heads
    index: SparseIndexerDescription | None = None  # chooses the keys that a token reads; None: it reads all
    shares_index: bool = False  # reads those that the index of a layer before has chosen

    @property
    def cache(self) -> LayerCacheSpec:
        """What the layer keeps of each token."""
        index_size = 0 if self.index is None else self.index.head_size
        return LayerCacheSpec(
            "full", num_kv_heads=1, key_size=self.qk_rope_head_dim + index_size, value_size=self.kv_lora_rank
        )

    @property
    def query_size(self) -> int:
        """Of a head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def query_order(self) -> NDArray[np.intp]:
        """The checkpoint's rows of our heads' queries as ours, where a head's rotated elements come first."""
        head = np.concatenate(
            [self.qk_nope_head_dim + halves(self.rope, self.qk_rope_head_dim), np.arange(self.qk_nope_head_dim)]
        )
        rows: NDArray[np.intp] = np.array(self.own_heads)[:, None] * self.query_size + head
        return rows.reshape(-1)

    def latent_order(self) -> NDArray[np.intp]:
        return np.concatenate(
            [np.arange(self.kv_lora_rank), self.kv_lora_rank + halves(self.rope, self.qk_rope_head_dim)]
        )

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> MLA:
        return MLA(self, hidden_size, parameters, prefix)


class MLA:
    """Queries and compressed vectors, the cache, and the output matrix."""

    def __init__(self, description: MLADescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        self.description, self._dtype = description, parameters.dtype
        self._ops = cast(IndexOps, parameters.ops)
        d, prefix = description, f"{prefix}{description.name}."
        latent, all_queries = d.kv_lora_rank + d.qk_rope_head_dim, d.num_heads * d.query_size
        self._num_heads = len(d.own_heads)
        first, first_order, size = f"{prefix}q_proj", d.query_order(), all_queries
        if d.q_lora_rank is not None:
            first, first_order, size = f"{prefix}q_a_proj", np.arange(d.q_lora_rank), d.q_lora_rank
        self._first_size = len(first_order)
        names, sizes = [first, f"{prefix}kv_a_proj_with_mqa"], [size, latent]
        orders = [first_order, d.latent_order()]
        if d.gate_name is not None:
            assert not d.bias
            names, sizes = [*names, f"{prefix}{d.gate_name}"], [*sizes, d.num_heads]
            orders.append(np.array(d.own_heads))
        unbiased = [first] if d.q_lora_rank is None else []  # nothing compresses queries
        of_index = f"{prefix}indexer."
        if d.index is not None:
            assert d.gate_name is None and d.q_lora_rank is not None
            unbiased = [f"{of_index}wk", f"{of_index}weights_proj"]  # as queries are compressed
            names, sizes = [*names, *unbiased], [*sizes, d.index.head_size, d.index.num_heads]
            orders += [d.index.element_order(), np.arange(d.index.num_heads)]
        self.consumer = parameters.linear(
            names, sizes, hidden_size, d.bias, orders=orders, without_bias=unbiased if d.bias else ()
        )
        self._query_norm: Norm | None = None
        if d.q_lora_rank is not None:
            self._query_norm = Norm(
                d.norm, parameters, f"{prefix}q_a_layernorm", d.q_lora_rank, divisor=1 / d.query_scale
            )
            names, sizes, orders = [f"{prefix}q_b_proj"], [all_queries], [d.query_order()]
            if d.index is not None:
                names, sizes = [*names, f"{of_index}wq_b"], [*sizes, d.index.num_heads * d.index.head_size]
                orders.append(d.index.query_order())
            self._query = parameters.linear(names, sizes, d.q_lora_rank, orders=orders)
        self._latent_norm = Norm(
            d.norm, parameters, f"{prefix}kv_a_layernorm", d.kv_lora_rank, divisor=1 / d.latent_scale
        )
        self._keys, self._values = self._stacks(parameters, prefix)
        self._ending = parameters.ending(
            f"{prefix}{d.output_name}", hidden_size, self._num_heads * d.value_size, d.bias, d.shard
        )
        self._rotary = parameters.rotary(d.rope, d.qk_rope_head_dim)
        if d.index is not None:
            parameters.index = SparseIndexer(d.index, parameters, of_index, self._rotary)
        elif d.shares_index and parameters.index is None:
            raise LoadError(f"{prefix} reads the keys that an index of a layer before chooses, and there is none.")
        self._index = parameters.index if d.index is not None or d.shares_index else None
        self._attention_temperature = parameters.attention_temperature(d.attention_temperature)

    def _stacks(self, parameters: Parameters, prefix: str) -> list[ExpertsWeight]:
        """For each of our heads the matrix from a query to the compressed vectors, and from these to a value. They are
        floats, whatever the checkpoint has: keys' matrices are multiplied from the other side than they were quantized
        for."""
        d, ops, take, own = self.description, parameters.ops, parameters.weights.take, self.description.own_heads
        if f"{prefix}kv_b_proj.weight" in parameters.weights:
            size = d.qk_nope_head_dim + d.value_size
            both = take(
                f"{prefix}kv_b_proj.weight", (d.num_heads * size, d.kv_lora_rank), own=elements(own, size)
            ).reshape(len(own), size, d.kv_lora_rank)
            keys, values = both[:, : d.qk_nope_head_dim].swapaxes(1, 2), both[:, d.qk_nope_head_dim :]
        else:  # as GGUF files have them
            keys = take(f"{prefix}k_b_proj.weight", (d.num_heads, d.kv_lora_rank, d.qk_nope_head_dim), own=own)
            values = take(f"{prefix}v_b_proj.weight", (d.num_heads, d.value_size, d.kv_lora_rank), own=own)
        stacks = [
            ops.stack_experts((ops.pack_linear([floats(head)]) for head in heads), len(own)) for heads in (keys, values)
        ]
        parameters.num_matrix_bytes += sum(stack.num_bytes for stack in stacks)
        return stacks

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""
        d, ops, num_tokens = self.description, self._ops, hidden.shape[0]
        first = ops.linear(hidden, self.consumer, self._dtype)
        end = self._first_size + d.kv_lora_rank
        queries, rotated, further = first[:, : self._first_size], first[:, end:], first[:, end + d.qk_rope_head_dim :]
        if self._query_norm is not None:
            queries = ops.linear(self._query_norm.forward(queries, self._query), self._query, self._dtype)
        size, index, index_key = self._num_heads * d.query_size, self._index, {}
        queries, index_queries = queries[:, :size].reshape(num_tokens, self._num_heads, -1), queries[:, size:]
        latent = self._latent_norm.forward(first[:, self._first_size : end])
        if index is not None and d.index is not None:
            index_key = {"index_key": index.keys(further[:, : d.index.head_size], batch)}
        ops.rotary_and_cache(
            queries, rotated[:, : d.qk_rope_head_dim].reshape(num_tokens, 1, d.qk_rope_head_dim),
            latent.reshape(num_tokens, 1, d.kv_lora_rank), batch.positions, self._rotary, cache, tables.slot_mapping,
            self._attention_temperature, **index_key,
        )  # fmt: skip
        if index is not None and d.index is not None:
            index.choose(index_queries, further[:, d.index.head_size :], batch, tables, cache)
        chosen = {} if index is None or index.chosen is None else {"chosen": index.chosen}
        gathered = ops.latent_attention(
            ops.linear_by_head(queries[:, :, d.qk_rope_head_dim :], self._keys), queries[:, :, : d.qk_rope_head_dim],
            cache, tables.block_tables, batch.query_start_loc, batch.seq_lens, d.scale, **chosen,
        )  # fmt: skip
        attended = ops.linear_by_head(gathered, self._values).reshape(num_tokens, -1)
        if d.gate_name is not None:
            attended = ops.multiply(attended, further, "sigmoid", self._ending.weight)
        return self._ending.product(attended)
