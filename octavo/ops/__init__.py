"""The kernel interface: every operation that a model is made of, named once.

A backend is a module that provides the functions of `Ops`: `torch_ref` says what they mean in plain torch and is the
oracle of every kernel test, `cpu` is native, `cuda` is Triton's. Models, runner and sampler are written against `Ops`,
compute through it only, and import no backend.

Every operation is *row-wise*: what it computes for one token depends on nothing else in the batch, bit for bit, in
every backend but the reference. That is what makes an answer independent of load, chunking and caching.

Arrays are whatever the backend takes: numpy's on a CPU, torch's on a GPU and in the reference. Small lists that the
host makes (`HostArray`) are numpy's for every backend, which brings them to its device without waiting for it.
Element types go by their names: "float32", "bfloat16", "float16", "int64", ...

Shapes: T tokens of a step in request order, S sequences, H hidden size, D head size, Q query heads, G key/value heads,
N samples, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar, cast

from numpy.typing import NDArray

from octavo.quantization import StoredWeight

NO_TOKEN = -1  # in the place of a token where none could be chosen
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
# And with how many parameters.
PARAMETRIC_ACTIVATIONS = {"xielu": 4, "softcap": 1, "clip": 1}
POOLINGS = ("mean", "max", "mean_sqrt", "weighted_mean")
BIAS_PADDING = 64  # columns behind those of distances, which kernels may read: a tile of keys

HostArray = NDArray[Any]


class Array(Protocol):
    """What models, runner and sampler may know of an array. Slices and reshapes are views."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Self: ...
    def reshape(self, *shape: int) -> Self: ...


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """One layer's keys and values, as arrays. The first dimension of both is the block; the rest is the backend's own
    layout.

    Elements of one byte, int8 and eight-bit floats, are multiplied with the scale of their token and head. A token's
    scales follow from its own key and value, as they are written: of int8 the largest magnitude over 127 as bfloat16,
    rounded up; of floats the least power of two by which the largest magnitude does not exceed what the type holds. So
    a row's bytes do not depend on other tokens. `scales` are those of keys and values where the backend keeps them by
    themselves.
    """

    key: Any
    value: Any
    scales: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that a block consists of. A state has no values."""
        return tuple(part for part in (self.key, self.value, self.scales) if part is not None and part.nbytes)

    @property
    def num_blocks(self) -> int:
        return int(self.key.shape[0])


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts follow from its router's logits [E].

    A score is the softmax of all logits, or each one's sigmoid. Chosen are the `top_k` of the largest score plus bias
    or, with `bias_logits`, logit plus bias, where there is a bias; of equals the first. With groups these come from the
    `kept_groups` of `num_groups` equal parts whose best, or with `group_by_two` whose two best, are largest. The weight
    of a chosen one is its score without the bias, divided by their sum if `normalize`, times `scale`. (Softmax over the
    chosen logits alone is a softmax that is normalized.) "sparsemixer" weighs each choice by a softmax over what is
    left and not relatively further than 2 * `jitter` from the largest, and nothing else of this (Liu et al. 2023).
    With a soft cap C > 0 logits x are C * tanh(x / C) from the start.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    bias_logits: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    group_by_two: bool = False
    softcap: float = 0.0
    jitter: float = 0.0


class ExpertsWeight(Protocol):
    """Matrices of one shape and format, an expert each."""

    @property
    def num_experts(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class LinearWeight(Protocol):
    """A weight matrix [out_features, in_features] in the layout that the backend's products want, with its bias.

    Integer matrices multiply quantized activations: each 32 elements of a row as int8 with one scale, but for one that
    stands out of the others. Norms, activations and `linear_silu_and_mul` write those for the matrix that consumes
    them; `linear` and `linear_add` quantize what is not quantized yet.
    """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def takes_float32(self) -> bool:
        """Whether rows may be float32 whatever the model's type, because products quantize them."""


@dataclass(frozen=True, slots=True)
class FactorShape:
    """Of what adapters may add to one product: projections of `widths` outputs side by side, each of its own factors;
    `gated` as the matrix is. No rank is above `max_rank`. Adapters may replace a matrix of one projection that is
    `replaceable`. Of a matrix whose rows are `looked_up` by token the rows are the outputs."""

    num_in: int
    widths: tuple[int, ...]
    gated: bool
    max_rank: int
    replaceable: bool = False
    looked_up: bool = False


@dataclass(frozen=True, slots=True)
class LowRank:
    """a [r, K] and b [N, r] float32: a projection becomes x W^T + (x a^T) b^T, a row looked up W[n] + b[n] a."""

    a: HostArray
    b: HostArray


@dataclass(frozen=True, slots=True)
class Whole:
    """A matrix [N, K] float32 in the place of W."""

    matrix: HostArray


@dataclass(frozen=True, slots=True)
class Factors:
    """What one adapter does to one matrix: low-rank factors of its projections, or others in their place, None for what
    it leaves alone; then, over all outputs [N] float32, what the sum is multiplied with (DoRA, Liu et al. 2024),
    and what is added. Rows that are looked up have neither of these."""

    projections: tuple[LowRank | Whole | None, ...]
    scales: HostArray | None = None
    bias: HostArray | None = None


class PackedFactors(Protocol):
    """`Factors` as a backend reads them, on the host: pieces that may lie anywhere, each at a multiple of 64 bytes.
    Those that are `constant` stay as they are there, so that several that are equal may be one."""

    @property
    def pieces(self) -> tuple[HostArray, ...]: ...
    @property
    def constant(self) -> tuple[bool, ...]: ...


_P = TypeVar("_P", bound=PackedFactors)


@dataclass(frozen=True, slots=True)
class ExpertsFactors(Generic[_P]):
    """One adapter's factors for a stack, one expert after the other, none of which share any."""

    experts: tuple[tuple[int, _P], ...]

    @property
    def pieces(self) -> tuple[HostArray, ...]:
        return tuple(piece for _, one in self.experts for piece in one.pieces)

    @property
    def constant(self) -> tuple[bool, ...]:
        return tuple(is_constant for _, one in self.experts for is_constant in one.constant)


class AdapterTable(Protocol):
    """The factors that adapters have for one product, by slot; a slot without any adds nothing."""

    @property
    def shape(self) -> FactorShape: ...
    def pack(self, factors: Factors, page_bytes: int) -> Any:
        """-> `PackedFactors` whose pieces take a page at most. Only host memory is touched: any thread may."""

    def least_page_bytes(self) -> int:
        """Bytes that a page must have, for the largest rank."""

    def largest(self, page_bytes: int) -> list[int]:
        """Bytes of the pieces of an adapter of the largest rank that has everything, but replaces nothing."""

    def put(self, slot: int, packed: Any, arena: Any, places: Sequence[int]) -> None:
        """The slot's factors are those that lie in `arena` [bytes] uint8 of the device, each piece at its place."""

    def clear(self, slot: int) -> None: ...


class ExpertsAdapterTable(Protocol):
    """As `AdapterTable`, of a stack of experts whose matrices are all of the shape."""

    @property
    def shape(self) -> FactorShape: ...
    def pack(self, factors: Mapping[int, Factors], page_bytes: int) -> Any:
        """Of some of the experts. Projections that share an A have it once."""

    def least_page_bytes(self) -> int: ...
    def largest(self, page_bytes: int) -> list[int]: ...
    def put(self, slot: int, packed: Any, arena: Any, places: Sequence[int]) -> None: ...
    def clear(self, slot: int) -> None: ...


class Expand(NamedTuple):
    """The second half of what adapters add to a product, in float32 before anything is rounded."""

    table: Any  # `AdapterTable`
    slots: Any  # of `AdapterOps.rows_by_adapter`
    shrunk: Any  # of `Ops.shrink`


class Lookup(NamedTuple):
    """What adapters make of rows that are looked up, in float32 before these are scaled and rounded."""

    table: Any  # `AdapterTable`
    slots: Any  # of `AdapterOps.rows_by_adapter`


class ExpandExperts(NamedTuple):
    """What adapters add to the products of experts, to each in float32 before anything is rounded."""

    slots: Any  # of `AdapterOps.rows_by_adapter`
    gate_up: Any  # `ExpertsAdapterTable`, or None
    down: Any


A = TypeVar("A")  # the arrays of a backend


class OpsOver(Protocol[A]):
    """What a backend provides, over its arrays `A`. All arrays are contiguous in their last dimension."""

    def place(self, array: HostArray) -> A:
        """A constant of a model (norm, table, bias) where the backend computes."""

    def pack_linear(
        self, parts: Sequence[StoredWeight], bias: HostArray | None = None, gated: bool = False
    ) -> LinearWeight:
        """Pack matrices [N, K] of the same input, once, at load, as one whose outputs are side by side.

        Floats are multiplied as float32 or bfloat16, on some backends as float16 too. Parts of few bits beside floats
        become floats of their type. `bias` [sum of N] is for all outputs. With `gated` the parts are gate and up.
        """

    def linear(self, x: A, weight: LinearWeight, out_dtype: str | None = None) -> A:
        """x [T, K] -> x W^T + b: [T, N] in `out_dtype`, accumulated in float32.

        The default is the dtype of x, or float32 where x is quantized."""

    def linear_add(self, x: A, weight: LinearWeight, residual: A, scale: float = 1.0) -> None:
        """residual [T, N] += scale * (x W^T + b), in place, in float32, rounded once."""

    def linear_silu_and_mul(
        self, x: A, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
        activation: str = "silu",
    ) -> A:  # fmt: skip
        """x [T, K] and a gated matrix -> silu(gate) * up: [T, I], in float32, rounded once.

        The gate's `activation` may be any of `ACTIVATIONS`.

        Quantized if the `consumer` multiplies quantized activations, else in `out_dtype` as in `linear`."""

    def linear_activated(
        self, x: A, weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
        out_dtype: str | None = None,
    ) -> A:  # fmt: skip
        """x [T, K] -> activation(x W^T + b): [T, N], in float32, rounded once. `activation` is one of `ACTIVATIONS`.

        Quantized if the `consumer` multiplies quantized activations, else in `out_dtype` as in `linear`."""

    def stack_experts(self, experts: Iterable[LinearWeight], num_experts: int) -> ExpertsWeight:
        """Matrices that `pack_linear` has made of parts of one shape and format, one an expert. They are asked for one
        by one and belong to the stack from then on."""

    def route(
        self, logits: A, routing: Routing, bias: A | None = None, scales: A | None = None
    ) -> tuple[A, A]:  # fmt: skip
        """logits [T, E] float32, a bias [E] float32 for the choice -> each token's experts [T, top_k] int32 and their
        weights [T, top_k] float32, at the end times `scales` [E] float32 (not of sparsemixers)."""

    def experts(
        self, x: A, ids: A, weights: A, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str = "silu",
        clamp: tuple[float, float] | None = None, scales_inputs: bool = False, first_expert: int = 0, segments: int = 1,
    ) -> A:  # fmt: skip
        """x [T, H] -> the sum over a token's experts e = ids[t, j] of weights[t, j] * down[e](f(gate) * up): [T, H]
        float32, where gate and up are those of gate_up[e](x), in the order of the experts' numbers. Of matrices that
        are not gated it is f of all outputs. The stacks begin with `first_expert`. Their experts may be so many equal
        `segments`, whose sums are added up as in `SegmentOps.sum_by_segments`.

        x is what `linear` takes with either stack's matrices; with `scales_inputs` it is not quantized, and multiplied
        with the weight in the place of the output. An id outside the stack stands for nothing. With a `clamp` (a,
        limit) the activation is gate * sigmoid(a * gate) * (up + 1), gate at most the limit, up between it and its
        negative (gpt-oss). Matrices that no token needs are not read."""

    def quantize(self, x: A, consumer: LinearWeight) -> A:
        """x [T, K] as `consumer` multiplies it: quantized for an integer matrix, rounded to bfloat16 for such a one."""

    def add(self, residual: A, x: A, scale: float = 1.0) -> None:
        """residual [T, N] += scale * x [T, N], in place, in float32, rounded once.

        With x = linear(..., "float32") it gives the bits of `linear_add`."""

    def add_chosen(self, residual: A, x: A, ids: A, weights: A, first_id: int) -> None:
        """residual[t] += x[t] times the sum of those weights[t, j] whose ids[t, j] are `first_id` at least, in place,
        in float32, rounded once: what the experts add that only pass on what they see. residual, x [T, N]; ids [T, K]
        int32 and weights [T, K] float32 of `route`."""

    def activation(
        self, x: A, kind: str, consumer: LinearWeight | None = None, parameters: tuple[float, ...] = ()
    ) -> A:
        """Element-wise on x [T, N], in float32, rounded once; quantized if the `consumer` multiplies quantized
        activations.

        `kind` is one of `ACTIVATIONS`: "gelu" is exact (by erf), "gelu_tanh" its approximation (Hendrycks & Gimpel
        2016), "relu2" the square of "relu". Or one of `PARAMETRIC_ACTIVATIONS`, with its parameters: "xielu"
        (a, c, b, e) is a x² + b x for x > 0, else c (exp(min(x, e)) - 1 - x) + b x (Huang & Schlag 2024); "softcap" (c)
        is c tanh(x / c); "clip" (c) is x between -c and c."""

    def multiply(self, x: A, y: A, activation: str = "identity", consumer: LinearWeight | None = None) -> A:
        """x * f(y) of x, y [T, N], in float32, rounded once; quantized if the `consumer` multiplies quantized
        activations. f is "identity", "silu", "sigmoid" or "softplus", log(1 + exp(y)). Of y [T, M] each element is for
        N / M neighbours."""

    def causal_conv(
        self, x: A, weight: A, bias: A | None, activation: str, states: A, slot_mapping: A, query_start_loc: A,
        seq_lens: A,
    ) -> A:  # fmt: skip
        """f(b[c] + sum over j of w[j, c] * x[t - K + 1 + j, c]) over the tokens of each sequence: [T, C]; f is
        "identity" or "silu".

        x [T, C]; weight [K, C] and bias [C] float32. `states` [blocks, S] float32 keep K - 1 rows of x from step to
        step, in a layout of the backend's. The rows of sequence s are found as by `paged_attention`. The first of them
        goes on from the state in block slot_mapping[t], and from zeros where it is the sequence's first token. The
        state after row t is left in block slot_mapping[t], where no later row of the sequence has the same block: all
        rows of a prompt have one, and each guess has its own."""

    def num_scan_floats(self, channels: int, num_groups: int, state_size: int) -> int:
        """Numbers that a state of `selective_scan` takes; one of `gated_delta` takes those of its value heads as groups
        and its key size as state size. Raises `LoadError` for a size that the kernels do not have."""

    def selective_scan(
        self, x: A, time: A | None, b: A, c: A, a: A, d: A | None, time_bias: A | None,
        time_limit: tuple[float, float], states: A, slot_mapping: A, query_start_loc: A, seq_lens: A,
    ) -> A:  # fmt: skip
        """A state space whose step depends on its input (Gu & Dao 2023, Dao & Gu 2024): the state h [C, N] of a
        sequence becomes exp(s * a) * h + s * b (x), and y = h c + d * x: [T, C].

        x [T, C]; time [T, heads] is of channels C / heads each, and s = log(1 + exp(time + time_bias)) within the
        limits, or 1 without time. b, c [T, G, N] are of channels C / G each. a is [C] or [N, C], d [C], time_bias
        [heads], all float32. States are as in `causal_conv`, summed up token by token, whatever the chunks."""

    def gated_delta(
        self, query: A, key: A, value: A, decay: A, beta: A, a: A, decay_bias: A, beta_scale: float, states: A,
        slot_mapping: A, query_start_loc: A, seq_lens: A, lowest: float = 0.0, alternates: bool = False,
    ) -> A:  # fmt: skip
        """The gated delta rule (Yang et al. 2025): the state S [Dk, Dv] of each value head becomes g * S + k (x) (e *
        (v - g * S^T k)), and y = S^T q: [T, V * Dv].

        query, key [T, K, Dk], each head of which serves V / K heads of value [T, V, Dv]: neighbours, or where that
        `alternates` every K-th; decay, beta [T, V];
        g = exp(a * log(1 + exp(decay + decay_bias))) with a, decay_bias [V] float32, e = beta_scale * sigmoid(beta).
        Of decay [T, V * Dk] and decay_bias [V * Dk] each row of S has a g of its own (Kimi Team 2025). With a `lowest`
        exponent L < 0 g is exp(L * sigmoid(-a * (decay + decay_bias))). States are as in `selective_scan`."""

    def gated_recurrence(
        self, x: A, input_gate: A, decay_gate: A, a: A, input_bias: A, decay_bias: A, states: A, slot_mapping: A,
        query_start_loc: A, seq_lens: A,
    ) -> A:  # fmt: skip
        """The real-gated linear recurrent unit (De et al. 2024): the state h [C] of a sequence becomes
        d * h + sqrt(1 - d²) * sigmoid(input_gate + input_bias) * x, the first token's without the root, and y = h:
        [T, C].

        x, input_gate, decay_gate [T, C]; d = exp(a * sigmoid(decay_gate + decay_bias)); a, input_bias, decay_bias [C]
        float32. States are as in `selective_scan`, one number a channel."""

    def embedding(self, token_ids: A, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0) -> A:
        """Rows `token_ids` [T] int32 of a packed matrix [V, H], times `scale` -> [T, H].

        The default dtype is the one that it was packed from, or float32 for integers."""

    def take_rows(self, x: A, rows: A) -> A:
        """x [T, H], rows [N] int64 -> x[rows]: [N, H]. x may be a constant, as a table of learned positions."""

    def replace_rows(self, x: A, replacements: A, indices: A) -> None:
        """x[t] = replacements[indices[t]] in place, rounded once, where indices [T] int32 are not negative; other rows
        stay. x [T, H], replacements [M, H] float32."""

    def add_rows(self, x: A, summands: A, indices: A) -> None:
        """x[t] += summands[indices[t]] as in `replace_rows`, in float32, rounded once."""

    def pool(self, x: A, starts: A, ends: A, kind: str, out_dtype: str | None = None) -> A:
        """Rows starts[n] .. ends[n] of x [T, H], both included ([N] int64), made one: [N, H], in float32, rounded once.

        `kind` is one of `POOLINGS`: "mean"; "max"; "mean_sqrt", the sum over the square root of their number; or
        "weighted_mean", where the i-th counts i times. A single row is itself. The default dtype is that of x."""

    def rms_norm(self, x: A, weight: A, eps: float, consumer: LinearWeight | None = None) -> A:
        """x [..., H] / sqrt(mean(x²) + eps) * weight [H], in float32, rounded once (Zhang & Sennrich 2019).

        Quantized, as [rows, ...], if the `consumer` multiplies quantized activations. The weights of x [T, N, H] may be
        [N, H]."""

    def layer_norm(self, x: A, weight: A, bias: A | None, eps: float, consumer: LinearWeight | None = None) -> A:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension of x [..., H], in float32, rounded once
        (Ba et al. 2016). `weight` and `bias` are of one shape, as in `rms_norm`, and one dtype; quantized likewise."""

    def rotate(self, x: A, positions: A, cos_sin: A) -> None:
        """Rotate x [T, N, D] in place, as `rotary_and_cache` does."""

    def rotary_and_cache(
        self, query: A, key: A, value: A, positions: A, cos_sin: A, cache: LayerKVCache, slot_mapping: A,
        query_scales: A | None = None, axes: A | None = None,
    ) -> None:  # fmt: skip
        """Rotate query [T, Q, D] in place and key [T, G, D], then write key and value [T, G, D] to the cache.

        The three may be views into one [T, (Q + 2G) * D] matrix: only the heads of one token must be contiguous.
        Keys and values may be of other sizes than queries. `positions` [T] int64; `cos_sin` [max_positions, R] float32
        holds R/2 cosines, then R/2 sines; the first R ≤ D elements of a head are rotated as two halves (Su et al. 2021,
        the layout of GPT-NeoX). `slot_mapping` [T] int64 is block * block_size + offset. Whether `key` is rotated in
        place too is unspecified. Queries of position p are multiplied with `query_scales` [max_positions] float32.

        With `axes` [R/2] int32 a token has three positions [3, T], in time, height and width: the i-th pair of elements
        is rotated as that of axis axes[i] says (Wang et al. 2024, arXiv 2409.12191). Queries have no scales then.
        """

    def paged_attention(
        self, query: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A, scale: float,
        sliding_window: int = 0, softcap: float = 0.0, slopes: A | None = None, sinks: A | None = None,
        bidirectional: bool = False, distance_biases: A | None = None, key_ends: A | None = None,
        value_size: int | None = None,
    ) -> A:  # fmt: skip
        """Causal attention of query [T, Q, D] over the paged cache -> [T, Q * value_size] in the dtype of query. Values
        are of size D if nothing else is said.

        Sequence s owns rows query_start_loc[s] .. query_start_loc[s + 1] ([S + 1] int32), which are its last positions;
        its keys are positions 0 .. seq_lens[s] - 1 ([S] int32, this step's tokens included), found through
        block_tables [S, max_blocks] int32. Any mix of one-row (decode) and many-row (prefill) sequences is one call.
        With a sliding window W > 0 position p sees keys p - W + 1 .. p. With a soft cap C > 0 scores x become
        C * tanh(x / C) after scaling (Gemma Team 2024). `slopes` [Q] float32 times (key's position - query's) are added
        to them (Press et al. 2022). `sinks` [Q] float32 are scores of one more key, whose value is zero (Xiao et al.
        2024). The row's summation order is a function of its position alone (online softmax, Milakov & Gimelshein
        2018, over fixed tiles of keys).

        Where attention is `bidirectional`, without slopes, a token also sees the keys after it, all of which must be
        in the cache: all of its sequence, or p - W + 1 .. p + W - 1. Then scores may have `distance_biases`
        [Q, 2 P + BIAS_PADDING] float32 for sequences of up to P tokens: column P + key's position - query's is added
        (Raffel et al. 2020).

        With `key_ends` [T] int32 a token sees the keys before its number, of its own sequence, besides those that it
        sees anyway, and from where a window begins on; without slopes. The step must have computed them.
        """

    def linear_by_head(self, x: A, weight: ExpertsWeight) -> A:
        """x [T, Q, K] times the matrix [N, K] of each head, which are floats of its type and have no bias -> [T, Q, N],
        accumulated in float32. Heads may be any distance apart."""

    def latent_attention(
        self, query: A, rotated: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A,
        scale: float,
    ) -> A:  # fmt: skip
        """`paged_attention` of heads that share one key, whose greater part is the value too (DeepSeek-AI 2024):
        query [T, Q, L] and rotated [T, Q, R] -> [T, Q, L].

        The cache holds for each token L elements as its value and R rotated ones as its key. A score is the product
        of both with those of the query, times `scale`. The heads of `rotated` may be any distance apart."""

    def argmax(self, logits: A) -> A:
        """logits [N, V] float32 -> [N] int64; the lowest index wins a tie. `NO_TOKEN` where nothing can be chosen: the
        largest is not finite (masks have left nothing), or one is NaN."""

    def sample(self, logits: A, temperature: A, top_k: A, top_p: A, min_p: A, uniforms: A) -> A:
        """Draw one token a row of logits [N, V] float32, which may be overwritten -> [N] int64.

        The distribution is softmax(logits / temperature); then tokens less likely than min_p times the likeliest go;
        then all but the top_k likeliest (int64, 0 is all); then all but the smallest set of the likeliest that has
        top_p of the mass left. Tokens that are equally likely stay or go together. Each token then gets an exponential
        number, which follows from the row's number of `uniforms` (float64 in [0, 1)) and its index alone; the token
        whose number divided by its probability is the smallest is drawn (the Gumbel-max trick). Two distributions so
        draw the same token from the same number as often as they can without knowing of each other (Daliri, Musco and
        Suresh 2024, arXiv 2408.07978). Other arrays are [N] float32. A row whose temperature is 0 gives its argmax, so
        that one call serves any mix. `NO_TOKEN` is given as by `argmax`.
        """

    def mask_tokens(self, logits: A, words: HostArray, samples: HostArray) -> None:
        """Set logits [N, V] float32 of samples [M] int64 to -inf, in place, where the bit of words [M, W] int32 is 0.

        Token t is bit t % 32 of word t // 32; tokens beyond the words are taken out too."""

    def add_bias(self, logits: A, samples: HostArray, tokens: HostArray, values: HostArray) -> None:
        """logits[samples[p], tokens[p]] += values[p] float32 ([P], each pair once; -inf takes a token out)."""

    def penalize(
        self, logits: A, samples: HostArray, tokens: HostArray, counts: HostArray, repetition: HostArray,
        frequency: HostArray, presence: HostArray,
    ) -> None:  # fmt: skip
        """Make tokens that were seen less likely in logits [N, V] float32, in place.

        Sample `samples[p]` has seen `tokens[p]` ([P] int64, each pair once) and has it `counts[p]` ([P] float32) times
        in its output. Positive logits are divided by the sample's `repetition` [N] float32 and others multiplied with
        it (Keskar et al. 2019); then `frequency` [N] times the count and, if that is not zero, `presence` [N] are
        taken off (the OpenAI API's definition).
        """

    def logprobs(self, logits: A, tokens: A, num_top: int) -> tuple[A, A, A, A]:
        """log_softmax of logits [N, V]. Of `tokens` [N] int64 (a negative one counts as 0): value [N] float32 and rank
        [N] int64 (1 + how many are larger); and of each row the K = min(num_top, V) likeliest: ids [N, K] int64 and
        values [N, K] float32, best first, of equals the lowest id first."""

    def normalize(self, logits: A, samples: HostArray, temperatures: HostArray) -> None:
        """Rows `samples` [M] of logits become log_softmax(row / temperature), in place."""

    def top_tokens(self, logits: A, samples: HostArray, count: int) -> tuple[A, A]:
        """ids [M, K] int64 and values [M, K] of the K = min(count, V) largest in rows `samples` [M], largest first,
        of equals the lowest id first."""

    def rows_of(self, x: A, samples: HostArray) -> A:
        """Copies of rows of x [N, ...]."""

    def process_row(self, logits: A, sample: int, function: Callable[[Any], Any]) -> bool:
        """Let a caller's function see row `sample` [V] of logits and put what it returns in its place. -> whether that
        has NaN. The row is a torch tensor; on a CPU where torch is not installed it is numpy's array."""

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str,
        value_size: int | None = None,
    ) -> LayerKVCache:  # fmt: skip
        """An uninitialised cache in this backend's layout, on its device, of values of `value_size` elements if that is
        not the keys' size. Pages that are never written cost no memory."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
        """Copy whole blocks (source, destination) of all layers, as if one after the other."""

    def keys_of(self, cache: LayerKVCache, blocks: Sequence[int], heads: Sequence[int]) -> A:
        """The keys of `heads` in `blocks`, one block behind the other: [heads, blocks * block_size, D] float32."""

    def gather_blocks(self, blocks: HostArray, caches: Sequence[LayerKVCache]) -> A:
        """-> uint8 [len(blocks), bytes of a block in all layers, keys and values]: copies."""

    def scatter_blocks(self, staged: A, blocks: HostArray, caches: Sequence[LayerKVCache]) -> None:
        """The reverse of `gather_blocks`."""


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
        """x [N, W] float32, which are columns `begin` .. of all -> [N, width], those of all workers."""


class DeviceOpsOver(OpsOver[A], Protocol[A]):
    """What a backend provides beyond that if its device is not the processor that Python runs on.

    Nothing waits for the device, so that all of it can be captured in a graph; and tokens of a step whose slot is -1
    and sequences of length 0, with which steps are padded to a graph's size, do nothing.
    """

    def row_classes(self, max_rows: int) -> list[int]:
        """Numbers of rows up to `max_rows`, the last of them. What is launched for any number of rows is what is
        launched for the next of these, so that steps of these sizes meet all kernels there are."""

    def begin_step(self, query_start_loc: A, seq_lens: A) -> None:
        """What follows is a step with these lengths. What attention works out from them is worked out once, for all of
        its calls with these very arrays."""

    def resolve_step(
        self, block_tables: A, places: A, blocks: A, last_tokens: A, token_owners: A, token_ids: A, seq_owners: A
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


# What models, runner and sampler are written against: the same over arrays of which they know no more than `Array`.
Ops = OpsOver[Array]
DeviceOps = DeviceOpsOver[Array]
AdapterOps = AdapterOpsOver[Array]
SegmentOps = SegmentOpsOver[Array]
ParallelOps = ParallelOpsOver[Array]
ParallelDeviceOps = ParallelDeviceOpsOver[Array]


def load(cpu_threads: int | None = None, cpus: list[int] | None = None) -> Ops:
    """The native backend, and how many threads compute, on which processors.

    Raises `ConfigError` for threads that this process cannot have.
    """
    from octavo.ops import cpu

    cpu.use_threads(cpu_threads, cpus)
    backend: AdapterOpsOver[HostArray] = (
        cpu  # what lacks an operation, or takes other arguments, does not pass the type checker
    )
    return cast(Ops, backend)


def load_cuda() -> DeviceOps:
    """Triton's backend, on the CUDA device that is current."""
    from octavo.ops import cuda

    backend: ParallelDeviceOpsOver[Tensor] = cuda
    return cast(DeviceOps, backend)


if TYPE_CHECKING:
    from torch import Tensor

    from octavo.ops import cpu, cuda, torch_ref

    _segments: SegmentOpsOver[HostArray] = cpu
    _parallel: ParallelOpsOver[HostArray] = cpu
    _reference: DeviceOpsOver[Tensor] = torch_ref
    _reference_of_adapters: AdapterOpsOver[Tensor] = torch_ref
    _adapters_of_devices: AdapterOpsOver[Tensor] = cuda
