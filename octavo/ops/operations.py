"""The operations that every backend provides. `octavo.ops` says what holds for all of them, and what the letters of
shapes mean; what some backends provide beyond these is in `octavo.ops.capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from octavo.ops.arrays import ExpertsWeight, HostArray, LayerKVCache, LinearWeight, Routing
from octavo.quantization import StoredWeight

A = TypeVar("A")  # the arrays of a backend


class OpsOver(Protocol[A]):
    """What a backend provides, over its arrays `A`. All arrays are contiguous in their last dimension."""

    def place(self, array: HostArray) -> A:
        """A constant of a model (norm, table, bias) where the backend computes."""

    def pack_linear(
        self, parts: Sequence[StoredWeight], bias: HostArray | None = None, gated: bool = False,
        looked_up: bool = False, is_precise: bool = False,
    ) -> LinearWeight:  # fmt: skip
        """Pack matrices [N, K] of the same input, once, at load, as one whose outputs are side by side.

        Floats are multiplied as float32 or bfloat16, on some backends as float16 too. Parts of few bits beside floats
        become floats of their type. `bias` [sum of N] is for all outputs. With `gated` the parts are gate and up.
        A matrix that is `looked_up` is for `embedding` and for no product, and may lie otherwise. What a backend would
        quantize to eight bits, since it multiplies integers, has sixteen for one that `is_precise`.
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
        stay. x [T, H], replacements [M, H] float32, which may be a constant."""

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
        in the cache: all of its sequence, or p - W + 1 .. p + W - 1. With neither a window nor biases a sequence may
        have more rows than keys, from 1 on, on CPUs. Then scores may have `distance_biases`
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
