"""Latent attention (DeepSeek-AI 2024). The cache holds for each token one compressed vector, from which the keys and
values of all heads follow, and one rotated part of a key that all heads share. With several workers each has the whole
cache and some of the heads.

Keys and values are never computed here ("absorbed" form). A query is multiplied by its head's matrix of keys, so its
scores are products with the compressed vectors. A head's weighted sum of compressed vectors is multiplied by its matrix
of values. Prompts and decodes both use this form. The form that computes keys and values has another order of sums, so
an answer would depend on where its prompt is cut. docs/layer_kernels.md compares the costs of both forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

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
from octavo.step_batch import GroupTables, StepBatch


@dataclass(frozen=True, slots=True)
class MLADescription(ShardedHeads):
    """The description of latent attention. Sizes are in elements. Names are those of the checkpoint's modules, after
    the layer's prefix and `name`.

    A head's query has `qk_nope_head_dim` elements, then `rope.rotary_dim` rotated elements. With a `q_lora_rank`
    queries are compressed as well."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    value_size: int
    qk_rope_head_dim: int
    rope: RopeConfig | None  # None: nothing is rotated
    scale: float  # of the scores
    norm: NormDescription  # norm of compressed vectors
    query_scale: float = 1.0  # factor of compressed queries after their norm
    latent_scale: float = 1.0  # factor of compressed keys and values after their norm
    attention_temperature: AttentionTemperature | None = None
    gate_name: str | None = None  # matrix with one output for each head; its sigmoid multiplies the head's values
    bias: bool = False  # whether the compressing matrices and the last matrix have a bias
    name: str = "self_attn"
    output_name: str = "o_proj"
    shard: Shard = WHOLE  # this worker's heads
    index: SparseIndexerDescription | None = None  # chooses the keys that a token reads; None: it reads all keys
    shares_index: bool = False  # the layer reads the keys that an earlier layer's index has chosen

    @property
    def cache(self) -> LayerCacheSpec:
        """Return the layer's cache of each token."""
        index_size = 0 if self.index is None else self.index.head_size
        return LayerCacheSpec(
            "full", num_kv_heads=1, key_size=self.qk_rope_head_dim + index_size, value_size=self.kv_lora_rank
        )

    @property
    def query_size(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def query_order(self) -> NDArray[np.intp]:
        """Return the checkpoint's rows of this worker's queries in Octavo's order: rotated elements of a head first."""
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
    """Latent attention: products for queries and compressed vectors, the paged cache, and the output matrix."""

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
            raise LoadError(
                f"{prefix} needs the keys that an earlier layer's index chooses, but no earlier layer has an index."
            )
        self._index = parameters.index if d.index is not None or d.shares_index else None
        self._attention_temperature = parameters.attention_temperature(d.attention_temperature)

    def _stacks(self, parameters: Parameters, prefix: str) -> list[ExpertsWeight]:
        """Return two stacks with a matrix for each of this worker's heads: from queries to compressed vectors, and from
        compressed vectors to values.

        They are floats whatever the checkpoint's format: the matrices of keys are multiplied from another side than the
        side that they were quantized for."""
        d, ops, take, own = self.description, parameters.ops, parameters.weights.take, self.description.own_heads
        if f"{prefix}kv_b_proj.weight" in parameters.weights:
            size = d.qk_nope_head_dim + d.value_size
            both = take(
                f"{prefix}kv_b_proj.weight", (d.num_heads * size, d.kv_lora_rank), own=elements(own, size)
            ).reshape(len(own), size, d.kv_lora_rank)
            keys, values = both[:, : d.qk_nope_head_dim].swapaxes(1, 2), both[:, d.qk_nope_head_dim :]
        else:  # GGUF files
            keys = take(f"{prefix}k_b_proj.weight", (d.num_heads, d.kv_lora_rank, d.qk_nope_head_dim), own=own)
            values = take(f"{prefix}v_b_proj.weight", (d.num_heads, d.value_size, d.kv_lora_rank), own=own)
        stacks = [
            ops.stack_experts((ops.pack_linear([floats(head)]) for head in heads), len(own)) for heads in (keys, values)
        ]
        parameters.num_matrix_bytes += sum(stack.num_bytes for stack in stacks)
        return stacks

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
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
