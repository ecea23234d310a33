"""What some backends provide beyond `OpsOver`: for adapters, for several workers, for devices of their own."""

from __future__ import annotations

from typing import Any, Protocol

from octavo.ops.arrays import ExpertsWeight, LayerKVCache, LinearWeight
from octavo.ops.factors import AdapterTable, Expand, ExpandExperts, ExpertsAdapterTable, FactorShape, Lookup
from octavo.ops.operations import A, OpsOver


class AdapterOpsOver(OpsOver[A], Protocol[A]):
    """What a backend provides that adapters run on. Its three products also take what adapters add: part of the sum in
    float32 before anything is rounded. A row without an adapter has the bits that it has without `expand`.

    A matrix that an adapter replaces is held in the table's dtype and multiplies rows of it, whatever the base is."""

    def allocate_arena(self, num_bytes: int) -> A:
        """[num_bytes] uint8 of the device, for factors."""

    def adapter_table(self, shape: FactorShape, num_slots: int, dtype: str) -> AdapterTable:
        """An empty table of factors that are held in `dtype`."""

    def experts_adapter_table(
        self, shape: FactorShape, num_experts: int, num_slots: int, dtype: str
    ) -> ExpertsAdapterTable: ...

    def rows_by_adapter(self, slots: A) -> Any:
        """`slots` [T] int32 of the rows of a step, -1 for none, as other operations take them: what these work out from
        them is worked out once. Captured steps do so anew."""

    def shrink(self, x: A, table: AdapterTable, slots: Any, weight: LinearWeight) -> Any:
        """x [T, K], as products with `weight` take it, times the first factors of each row's adapter, for `Expand`:
        [T, R] in the table's dtype, or not summed up yet. Rows of an adapter are multiplied together. Of one that
        replaces the matrix it is x itself."""

    def embedding(
        self, token_ids: A, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0,
        adapted: Lookup | None = None,
    ) -> A: ...  # fmt: skip

    def experts(
        self, x: A, ids: A, weights: A, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str = "silu",
        clamp: tuple[float, float] | None = None, scales_inputs: bool = False, first_expert: int = 0, segments: int = 1,
        expand: ExpandExperts | None = None,
    ) -> A: ...  # fmt: skip

    def linear(self, x: A, weight: LinearWeight, out_dtype: str | None = None, expand: Expand | None = None) -> A: ...

    def linear_add(
        self, x: A, weight: LinearWeight, residual: A, scale: float = 1.0, expand: Expand | None = None
    ) -> None: ...

    def linear_silu_and_mul(
        self, x: A, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
        activation: str = "silu", expand: Expand | None = None,
    ) -> A: ...  # fmt: skip

    def linear_activated(
        self, x: A, weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
        out_dtype: str | None = None, expand: Expand | None = None,
    ) -> A: ...  # fmt: skip


class IndexOpsOver(OpsOver[A], Protocol[A]):
    """What a backend provides beyond that where an index chooses the keys of latent attention (DeepSeek-AI 2025)."""

    def rotary_and_cache(
        self, query: A, key: A, value: A, positions: A, cos_sin: A, cache: LayerKVCache, slot_mapping: A,
        query_scales: A | None = None, axes: A | None = None, index_key: A | None = None,
    ) -> None:  # fmt: skip
        """`index_key` [T, 1, E] goes behind the only head's key in the cache, as it is."""

    def choose_keys(
        self, query: A, weights: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A,
        num_chosen: int,
    ) -> A:  # fmt: skip
        """Of the keys that a token sees those of the largest score, the sum over heads i of weights[t, i] *
        relu(query[t, i] . key), of equals the earlier: their positions [T, num_chosen] int32 in order, then -1.

        query [T, I, E], weights [T, I]. A key is the last E elements that the cache has as its token's key. Sequences
        are as in `paged_attention`. Scores are summed up in float32, each in an order of its own."""

    def latent_attention(
        self, query: A, rotated: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A,
        scale: float, chosen: A | None = None,
    ) -> A:  # fmt: skip
        """Of the keys that a token sees only those that `choose_keys` has `chosen`. Rows are summed up as if these were
        all and lay side by side."""


class SegmentOpsOver(OpsOver[A], Protocol[A]):
    """What a backend provides beyond that whose sums do not depend on how many workers share a model."""

    def sum_by_segments(self, weight: LinearWeight, segments: int) -> int:
        """From now on a product with `weight` is the sum of those of so many equal parts of its inputs, or of half as
        many and so on where parts would end within a block of weights. -> elements of a block.

        Sums are added up by two: neighbours first, then the sums of neighbours, what is left over in the end from the
        last to the first. A worker that has a power of two of equally many summands, one, or all, has a branch of that
        tree."""


class ParallelOpsOver(OpsOver[A], Protocol[A]):
    """What a backend provides beyond that where several workers share a model. All of them call these in the same
    order, with as many rows, and wait for each other."""

    def all_reduce(self, x: A, bias: A | None = None) -> None:
        """x [T, H] float32 becomes the sum of all workers' in place, added up in the tree of `SegmentOps`: the same
        bits for each of them and in every run. After that the bias [H] float32 is added."""

    def all_gather(self, x: A, begin: int, width: int) -> A:
        """x [N, W], which are columns `begin` .. of all -> [N, width], those of all workers, as they are."""


class DeviceOpsOver(OpsOver[A], Protocol[A]):
    """What a backend provides beyond that if its device is not the processor that Python runs on.

    Nothing waits for the device, so that all of it can be captured in a graph; and tokens of a step whose slot is -1
    and sequences of length 0, with which steps are padded to a graph's size, do nothing.
    """

    def row_classes(self, max_rows: int, exactly: bool = True) -> list[int]:
        """Numbers of rows up to `max_rows`, the last of them. What is launched for any number of rows is what is
        launched for the next of these, so that steps of these sizes meet all kernels there are. Where the last need not
        be `max_rows` `exactly`, it is no larger than meets them all."""

    def begin_step(self, query_start_loc: A, seq_lens: A) -> None:
        """What follows is a step with these lengths. What attention works out from them is worked out once, for all of
        its calls with these very arrays."""

    def resolve_step(
        self,
        block_tables: A,
        places: A,
        blocks: A,
        last_tokens: A,
        pending_token_rows: A,
        token_ids: A,
        seq_table_rows: A,
    ) -> tuple[A, A]:
        """What only the device knows of a step. block_tables [G, R + 1, W] int32 has, for each cache group, R rows and
        one of no sequence: its entries at flat `places` [U] int64 become `blocks` [U] int32, in place.

        -> the step's token ids [T] int32 (last_tokens [R + 1] int32 of token_owners [T] int64 where these are below R,
        else token_ids [T] int32) and its block tables [G, S, W] int32 (rows seq_owners [S] int64)."""

    def keep_tokens(self, last_tokens: A, owners: A, tokens: A) -> None:
        """last_tokens[owners [N] int64] = tokens [N] int64, as int32; negative ones as 0."""


class ParallelDeviceOpsOver(ParallelOpsOver[A], DeviceOpsOver[A], Protocol[A]):
    """What such a backend provides where several workers, each with a device, share a model."""

    def from_first(self, x: A) -> None:
        """x [N] becomes the first worker's, in place."""
