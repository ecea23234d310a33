"""Operations that only some backends provide beyond `OpsOver`: for adapters, several workers, and separate devices."""

from typing import Any, Protocol

from octavo.ops.arrays import ExpertsWeight, HostArray, LayerKVCache, LinearWeight
from octavo.ops.factors import AdapterTable, Expand, ExpandExperts, ExpertsAdapterTable, FactorShape, Lookup
from octavo.ops.operations import A, OpsOver


class AdapterOpsOver(OpsOver[A], Protocol[A]):
    """Operations for adapters. Products with `expand` add the adapter's part to the float32 sum before rounding. A row
    without an adapter has the same bits with and without `expand`.

    A matrix that replaces the base's matrix is held in the table's dtype and multiplies rows of that dtype, whatever
    the base's format."""

    def allocate_arena(self, num_bytes: int) -> A:
        """Return [num_bytes] uint8 on the device, memory for factors."""

    def adapter_table(self, shape: FactorShape, num_slots: int, dtype: str) -> AdapterTable:
        """Return an empty table for factors held in `dtype`."""

    def experts_adapter_table(
        self, shape: FactorShape, num_experts: int, num_slots: int, dtype: str
    ) -> ExpertsAdapterTable: ...

    def rows_by_adapter(self, slots: A) -> Any:
        """Return the rows' adapter `slots` [T] int32 (-1: no adapter) in the form that other operations take. Work that
        depends on the slots alone is done here, once a step; a captured step repeats it at each replay."""

    def shrink(self, x: A, table: AdapterTable, slots: Any, weight: LinearWeight) -> Any:
        """Return x times the A factors of each row's adapter, for `Expand`: [T, R] in the table's dtype, or partial
        sums in a form of the backend's own.

        x [T, K] is an input of products with `weight`. Rows of the same adapter are multiplied together. If the adapter
        replaces the matrix, its rows of the result are x itself."""

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
    """Operations for latent attention whose keys are chosen by an index (DeepSeek-AI 2025)."""

    def rotary_and_cache(
        self, query: A, key: A, value: A, positions: A, cos_sin: A, cache: LayerKVCache, slot_mapping: A,
        query_scales: A | None = None, axes: A | None = None, index_key: A | None = None,
    ) -> None:  # fmt: skip
        """As `OpsOver.rotary_and_cache`; `index_key` [T, 1, E] is stored unchanged after the only head's key."""

    def choose_keys(
        self, query: A, weights: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A,
        num_chosen: int,
    ) -> A:  # fmt: skip
        """Return the positions of the `num_chosen` best keys that each token sees: [T, num_chosen] int32, ascending,
        filled up with -1.

        query [T, I, E], weights [T, I]. The score of a key is the sum over heads i of weights[t, i] *
        relu(query[t, i] . key); the earlier of equals wins. The key is the last E elements of the token's key in the
        cache. Sequences are given as in `paged_attention`. Scores are summed in float32; the order of a score's sum
        does not depend on other scores."""

    def latent_attention(
        self, query: A, rotated: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A,
        scale: float, chosen: A | None = None,
    ) -> A:  # fmt: skip
        """As `OpsOver.latent_attention` over the `chosen` keys (of `choose_keys`) only. Sums have the order that they
        have if the chosen keys are all keys and lie side by side."""


class SegmentOpsOver(OpsOver[A], Protocol[A]):
    """An operation of backends whose sums do not depend on the number of workers that share a model."""

    def sum_by_segments(self, weight: LinearWeight, segments: int) -> int:
        """Split later products with `weight` into `segments` equal parts of its inputs, whose sums are then added.
        Return the number of elements of a block of weights.

        If parts would end within a block, the number of segments is halved (an odd number becomes 1) until they do not.

        The sums of segments are added in a tree: neighbours first, then the sums of neighbours. Sums that are left
        over are added at the end, from the last to the first. A worker's sum is a branch of this tree if the worker has
        one segment, or all segments, or if all workers have the same number of segments, a power of two."""


class ParallelOpsOver(OpsOver[A], Protocol[A]):
    """Operations for several workers that share a model. All workers call them in the same order, with the same number
    of rows, and wait for each other."""

    def all_reduce(self, x: A, bias: A | None = None) -> None:
        """Replace x [T, H] float32 by the sum of all workers' x, in place, then add the bias [H] float32. Sums are
        added in the tree of `SegmentOps`, so all workers have the same bits, in every run."""

    def all_gather(self, x: A, begin: int, width: int) -> A:
        """Return all workers' columns [N, width], unchanged. x [N, W] are this worker's columns, from `begin` on."""


class DeviceOpsOver(OpsOver[A], Protocol[A]):
    """Operations of a backend whose device is not the processor that Python runs on.

    No operation waits for the device, so a whole step can be captured in a graph. Steps are padded to a graph's size
    with tokens whose slot is -1 and sequences of length 0; operations ignore both.
    """

    def row_classes(self, max_rows: int, exactly: bool = True) -> list[int]:
        """Return ascending numbers of rows; a step of any size launches the same kernels as the next larger of them.

        So steps of these sizes together launch every kernel. The last number is `max_rows`; if not `exactly`, it may be
        smaller, as long as these sizes still meet all kernels."""

    def begin_step(self, query_start_loc: A, seq_lens: A) -> None:
        """Begin a step with these lengths. Attention prepares its work for them once; all of its calls with these same
        array objects reuse it."""

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
        """Update the block tables on the device. Return the step's token ids [T] and block tables [G, S, W], int32.

        block_tables [G, R + 1, W] int32 has R rows for each cache group and one row for no sequence. Its entries at
        flat `places` [U] int64 become `blocks` [U] int32, in place. Where pending_token_rows [T] int64 is below R, the
        token is last_tokens[row] (last_tokens [R + 1] int32), which only the device knows; elsewhere it is from
        token_ids [T] int32. The step's block tables are the rows seq_table_rows [S] int64."""

    def keep_tokens(self, last_tokens: A, owners: A, tokens: A) -> None:
        """Set last_tokens[owners [N] int64] = tokens [N] int64, as int32; negative tokens become 0."""

    def penalize(
        self, logits: A, samples: HostArray, tokens: HostArray, counts: HostArray, repetition: HostArray,
        frequency: HostArray, presence: HostArray, last_tokens: A | None = None,
    ) -> None:  # fmt: skip
        """As `Ops.penalize`. Besides, the last entry of a sample may have the token -1, with the count 1: it stands for
        the sample's entry of `last_tokens` [N] int32, which only the device knows. The sample's other entries may have
        this token too, and the count is then one more than theirs. `samples` ascend."""


class ParallelDeviceOpsOver(ParallelOpsOver[A], DeviceOpsOver[A], Protocol[A]):
    """Operations for several workers, each with a device of its own, that share a model."""

    def from_first(self, x: A) -> None:
        """Replace x [N] by the first worker's x, in place."""
