"""The operations that every backend provides.

`octavo.ops` states what holds for all operations and defines the letters of shapes. Operations that only some backends
provide are in `octavo.ops.capabilities`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from octavo.ops.arrays import ExpertsWeight, HostArray, LayerKVCache, LinearWeight, Routing
from octavo.quantization import StoredWeight

A = TypeVar("A")  # the arrays of a backend


class OpsOver(Protocol[A]):
    """The operations of a backend over its arrays `A`. All arrays are contiguous in their last dimension."""

    def place(self, array: HostArray) -> A:
        """Return a copy of a model's constant (norm, table, bias) on the backend's device."""

    def pack_linear(
        self, parts: Sequence[StoredWeight], bias: HostArray | None = None, gated: bool = False,
        is_embedding: bool = False, sixteen_bit_inputs: bool = False,
    ) -> LinearWeight:  # fmt: skip
        """Return matrices [N, K] of the same input packed as one matrix whose outputs are side by side. Called at load.

        Floats are multiplied as float32 or bfloat16, on some backends as float16 too. If some parts are floats,
        quantized parts become floats of the same type. `bias` [sum of N] covers all outputs. With `gated` the parts are
        gate and up. `is_embedding`: the matrix is for `embedding` only and may have another layout.
        `sixteen_bit_inputs`: a backend that quantizes inputs to 8-bit integers uses 16 bits instead.
        """

    def linear(self, x: A, weight: LinearWeight, out_dtype: str | None = None) -> A:
        """Return x W^T + b [T, N] of x [T, K] in `out_dtype`, accumulated in float32.

        The default dtype is that of x, or float32 if x is quantized."""

    def linear_add(self, x: A, weight: LinearWeight, residual: A, scale: float = 1.0) -> None:
        """Add scale * (x W^T + b) to residual [T, N] in place, in float32, rounded once."""

    def linear_silu_and_mul(
        self, x: A, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
        activation: str = "silu",
    ) -> A:  # fmt: skip
        """Return silu(gate) * up [T, I] of x [T, K] and a gated matrix, computed in float32, rounded once.

        The gate's `activation` may be any of `ACTIVATIONS`. The result is quantized if the `consumer` multiplies
        quantized activations, else in `out_dtype` as in `linear`."""

    def linear_activated(
        self, x: A, weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
        out_dtype: str | None = None,
    ) -> A:  # fmt: skip
        """Return activation(x W^T + b) [T, N] of x [T, K], computed in float32, rounded once.

        `activation` is one of `ACTIVATIONS`. The result is quantized if the `consumer` multiplies quantized
        activations, else in `out_dtype` as in `linear`."""

    def stack_experts(self, experts: Iterable[LinearWeight], num_experts: int) -> ExpertsWeight:
        """Return a stack of the experts' matrices, which `pack_linear` made of parts of one shape and format.

        The iterable is read one matrix at a time; afterwards the stack owns the matrices."""

    def route(
        self, logits: A, routing: Routing, bias: A | None = None, scales: A | None = None
    ) -> tuple[A, A]:  # fmt: skip
        """Return each token's experts [T, top_k] int32 and their weights [T, top_k] float32, chosen by `routing`.

        logits [T, E] float32; `bias` [E] float32 is for the choice only. Weights are finally multiplied by `scales` [E]
        float32 (not with "sparsemixer")."""

    def experts(
        self, x: A, ids: A, weights: A, gate_up: ExpertsWeight, down: ExpertsWeight, activation: str = "silu",
        clamp: tuple[float, float] | None = None, scales_inputs: bool = False, first_expert: int = 0, segments: int = 1,
    ) -> A:  # fmt: skip
        """Return, for each token t, the sum over its experts e = ids[t, j] of weights[t, j] * down[e](f(gate) * up):
        [T, H] float32.

        gate and up are the outputs of gate_up[e](x); if the matrices are not gated, f is applied to all outputs. Sums
        are in the order of expert numbers. The stacks begin with expert `first_expert`; ids outside the stacks are
        ignored. The experts may form several equal `segments`, whose sums are added as in
        `SegmentOps.sum_by_segments`. Matrices that no token needs are not read.

        x [T, H] is an input of `linear` with the first stack's matrices. With `scales_inputs`, x is not quantized, and
        the weight multiplies the expert's input instead of its output. With a `clamp` (a, limit) the activation is
        gate * sigmoid(a * gate) * (up + 1), where gate is at most `limit` and up is between -limit and limit
        (gpt-oss)."""

    def quantize(self, x: A, consumer: LinearWeight) -> A:
        """Return x [T, K] in the type that `consumer` multiplies: quantized for an integer matrix, rounded to bfloat16
        for a bfloat16 matrix."""

    def add(self, residual: A, x: A, scale: float = 1.0) -> None:
        """Add scale * x [T, N] to residual [T, N] in place, in float32, rounded once.

        With x = linear(..., "float32") the result has the same bits as `linear_add`."""

    def add_chosen(self, residual: A, x: A, ids: A, weights: A, first_id: int) -> None:
        """Add the outputs of identity experts to the residual: residual[t] += x[t] times the sum of weights[t, j] over
        all j with ids[t, j] >= `first_id`, in place, in float32, rounded once.

        residual, x [T, N]; ids [T, K] int32 and weights [T, K] float32 are results of `route`."""

    def activation(
        self, x: A, kind: str, consumer: LinearWeight | None = None, parameters: tuple[float, ...] = ()
    ) -> A:
        """Return the activation of each element of x [T, N], computed in float32, rounded once.

        The result is quantized if the `consumer` multiplies quantized activations. `kind` is one of `ACTIVATIONS`:
        "gelu" is exact (by erf), "gelu_tanh" its approximation (Hendrycks & Gimpel 2016), "relu2" the square of "relu".
        Or it is one of `PARAMETRIC_ACTIVATIONS`, with its parameters: "xielu" (a, c, b, e) is a x² + b x for x > 0,
        else c (exp(min(x, e)) - 1 - x) + b x (Huang & Schlag 2024); "softcap" (c) is c tanh(x / c); "clip" (c) limits x
        to -c .. c."""

    def multiply(self, x: A, y: A, activation: str = "identity", consumer: LinearWeight | None = None) -> A:
        """Return x * f(y) of x, y [T, N], computed in float32, rounded once.

        The result is quantized if the `consumer` multiplies quantized activations. f is "identity", "silu", "sigmoid"
        or "softplus", log(1 + exp(y)). If y is [T, M], each of its elements multiplies N / M neighbours of x."""

    def causal_conv(
        self, x: A, weight: A, bias: A | None, activation: str, states: A, slot_mapping: A, query_start_loc: A,
        seq_lens: A,
    ) -> A:  # fmt: skip
        """Return f(b[c] + sum over j of w[j, c] * x[t - K + 1 + j, c]) over the tokens of each sequence: [T, C].

        f is "identity" or "silu". x [T, C]; weight [K, C] and bias [C] float32. `states` [blocks, S] float32 keep the
        last K - 1 rows of x between steps, in a layout of the backend's own. Rows of a sequence are found as in
        `paged_attention`.

        A sequence's first row t in the step continues from the state in block slot_mapping[t], or from zeros if it is
        the sequence's first token. A block keeps the state after the last row that has this block: all rows of a prompt
        share one block, and each draft token has a block of its own."""

    def num_scan_floats(self, channels: int, num_groups: int, state_size: int) -> int:
        """Return the number of floats in a state of `selective_scan`. Raises `LoadError` for an unsupported size.

        For a state of `gated_delta`, `num_groups` is the number of value heads and `state_size` the key size."""

    def selective_scan(
        self, x: A, time: A | None, b: A, c: A, a: A, d: A | None, time_bias: A | None,
        time_limit: tuple[float, float], states: A, slot_mapping: A, query_start_loc: A, seq_lens: A,
    ) -> A:  # fmt: skip
        """Return the output y [T, C] of a state space whose step depends on its input (Gu & Dao 2023, Dao & Gu 2024).

        For each token the sequence's state h [C, N] becomes exp(s * a) * h + s * b (x) x, an outer product, and
        y = h c + d * x. The step s is log(1 + exp(time + time_bias)) within `time_limit`, or 1 without time.

        x [T, C]; each column of time [T, heads] is for C / heads channels, each group of b, c [T, G, N] for C / G
        channels. a is [C] or [N, C], d [C], time_bias [heads], all float32. States are stored as in `causal_conv`; they
        are updated token by token, so chunks do not change results."""

    def gated_delta(
        self, query: A, key: A, value: A, decay: A, beta: A, a: A, decay_bias: A, beta_scale: float, states: A,
        slot_mapping: A, query_start_loc: A, seq_lens: A, lowest: float = 0.0, alternates: bool = False,
    ) -> A:  # fmt: skip
        """Return the output y [T, V * Dv] of the gated delta rule (Yang et al. 2025).

        For each token the state S [Dk, Dv] of each value head becomes g * S + k (x) (e * (v - g * S^T k)), where (x) is
        the outer product, and y = S^T q. e = beta_scale * sigmoid(beta); g = exp(a * log(1 + exp(decay + decay_bias))),
        or exp(L * sigmoid(-a * (decay + decay_bias))) with a `lowest` exponent L < 0.

        query, key [T, K, Dk]; each of their heads serves V / K heads of value [T, V, Dv]: neighbours, or every K-th if
        it `alternates`. decay, beta [T, V]; a, decay_bias [V] float32. If decay is [T, V * Dk] and decay_bias [V * Dk],
        each row of S has a g of its own (Kimi Team 2025). States are as in `selective_scan`."""

    def gated_recurrence(
        self, x: A, input_gate: A, decay_gate: A, a: A, input_bias: A, decay_bias: A, states: A, slot_mapping: A,
        query_start_loc: A, seq_lens: A,
    ) -> A:  # fmt: skip
        """Return the output y [T, C] of the real-gated linear recurrent unit (De et al. 2024).

        For each token the sequence's state h [C] becomes d * h + sqrt(1 - d²) * sigmoid(input_gate + input_bias) * x,
        and y = h. For a sequence's first token the root is 1. d = exp(a * sigmoid(decay_gate + decay_bias)).

        x, input_gate, decay_gate [T, C]; a, input_bias, decay_bias [C] float32. States are as in `selective_scan`, with
        one float for each channel."""

    def embedding(self, token_ids: A, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0) -> A:
        """Return rows `token_ids` [T] int32 of a packed matrix [V, H], times `scale`: [T, H].

        The default dtype is the type that the matrix was packed from, or float32 for integers."""

    def take_rows(self, x: A, rows: A) -> A:
        """Return x[rows] [N, H] of x [T, H] and rows [N] int64. x may be a constant, such as learned positions."""

    def replace_rows(self, x: A, replacements: A, indices: A) -> None:
        """Set x[t] = replacements[indices[t]] in place, rounded once, for all t with indices[t] >= 0.

        x [T, H], indices [T] int32, replacements [M, H] float32, which may be a constant."""

    def add_rows(self, x: A, summands: A, indices: A) -> None:
        """Add summands[indices[t]] to x[t] in place, in float32, rounded once; arguments are as in `replace_rows`."""

    def pool(self, x: A, starts: A, ends: A, kind: str, out_dtype: str | None = None) -> A:
        """Return [N, H]: row n pools rows starts[n] .. ends[n] of x [T, H], both included, in float32, rounded once.

        starts, ends [N] int64. `kind` is one of `POOLINGS`: "mean"; "max"; "mean_sqrt", the sum divided by the square
        root of the number of rows; or "weighted_mean", where the i-th row has the weight i. A single row is returned
        unchanged. The default dtype is that of x."""

    def rms_norm(self, x: A, weight: A, eps: float, consumer: LinearWeight | None = None) -> A:
        """Return x [..., H] / sqrt(mean(x²) + eps) * weight [H], in float32, rounded once (Zhang & Sennrich 2019).

        The result is quantized, as [rows, ...], if the `consumer` multiplies quantized activations. For x [T, N, H] the
        weight may be [N, H]."""

    def layer_norm(self, x: A, weight: A, bias: A | None, eps: float, consumer: LinearWeight | None = None) -> A:
        """Return (x - mean) / sqrt(var + eps) * weight + bias over the last dimension of x [..., H], in float32,
        rounded once (Ba et al. 2016).

        `weight` and `bias` have the same dtype and shape; shapes and quantization are as in `rms_norm`."""

    def rotate(self, x: A, positions: A, cos_sin: A) -> None:
        """Rotate x [T, N, D] in place, as `rotary_and_cache` does."""

    def rotary_and_cache(
        self, query: A, key: A, value: A, positions: A, cos_sin: A, cache: LayerKVCache, slot_mapping: A,
        query_scales: A | None = None, axes: A | None = None,
    ) -> None:  # fmt: skip
        """Rotate query [T, Q, D] in place, rotate key [T, G, D], then write key and value [T, G, D] to the cache.

        The three may be views into one [T, (Q + 2G) * D] matrix: only the heads of one token must be contiguous. Keys
        and values may have other sizes than queries. `positions` [T] int64. `cos_sin` [max_positions, R] float32 holds
        R/2 cosines, then R/2 sines. The first R ≤ D elements of a head are rotated as two halves (Su et al. 2021, the
        layout of GPT-NeoX). `slot_mapping` [T] int64 is block * block_size + offset. A query at position p is
        multiplied by query_scales[p] ([max_positions] float32). `key` may or may not be rotated in place.

        With `axes` [R/2] int32 a token has three `positions` [3, T], in time, height and width: the i-th pair of
        elements is rotated by the position of axis axes[i] (Wang et al. 2024, arXiv 2409.12191). `query_scales` cannot
        be combined with `axes`.
        """

    def paged_attention(
        self, query: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A, scale: float,
        sliding_window: int = 0, softcap: float = 0.0, slopes: A | None = None, sinks: A | None = None,
        bidirectional: bool = False, distance_biases: A | None = None, key_ends: A | None = None,
        value_size: int | None = None,
    ) -> A:  # fmt: skip
        """Return causal attention of query [T, Q, D] over the paged cache: [T, Q * value_size] in the dtype of query.

        The default value size is D. Sequence s owns rows query_start_loc[s] .. query_start_loc[s + 1] ([S + 1] int32),
        which are its last positions. Its keys are positions 0 .. seq_lens[s] - 1 ([S] int32, this step's tokens
        included), found through block_tables [S, max_blocks] int32. One call takes any mix of one-row (decode) and
        many-row (prefill) sequences.

        With a sliding window W > 0 position p sees keys p - W + 1 .. p. With a soft cap C > 0 scores x become
        C * tanh(x / C) after scaling (Gemma Team 2024). `slopes` [Q] float32 times (key's position - query's position)
        are added to scores (Press et al. 2022). `sinks` [Q] float32 are the scores of one more key, whose value is zero
        (Xiao et al. 2024). The order of a row's sums depends on its position alone (online softmax, Milakov &
        Gimelshein 2018, over fixed tiles of keys).

        With `bidirectional` a token also sees later keys: all keys of its sequence, or p - W + 1 .. p + W - 1. All of
        them must be in the cache; `slopes` are not allowed. With neither a window nor biases a sequence may have more
        rows than keys (at least one key), on CPUs only. `distance_biases` [Q, 2 P + BIAS_PADDING] float32, for
        sequences of up to P tokens, are for bidirectional attention only: column P + key's position - query's position
        is added to the score (Raffel et al. 2020).

        With `key_ends` [T] int32 token t also sees the keys at positions below key_ends[t] of its own sequence, but
        none before the beginning of its window. This step must have computed these keys, or an earlier one; `slopes`
        are not allowed.
        """

    def linear_by_head(self, x: A, weight: ExpertsWeight) -> A:
        """Return x [T, Q, K] times the matrix [N, K] of each head: [T, Q, N], accumulated in float32.

        Matrices are floats of the type of x, without bias. Heads of x may be any distance apart."""

    def latent_attention(
        self, query: A, rotated: A, cache: LayerKVCache, block_tables: A, query_start_loc: A, seq_lens: A,
        scale: float,
    ) -> A:  # fmt: skip
        """Return [T, Q, L]: `paged_attention` of heads that share one key, part of which is also the value
        (DeepSeek-AI 2024).

        The cache holds L elements of each token as its value and R rotated elements as its key. A score is `scale`
        times the sum of query [T, Q, L] · value and rotated [T, Q, R] · key. The heads of `rotated` may be any distance
        apart."""

    def argmax(self, logits: A) -> A:
        """Return the index of the largest of each row of logits [N, V] float32: [N] int64; the lowest index wins a tie.

        A row gives `NO_TOKEN` if its largest logit is not finite (masks left no token), or if a logit is NaN."""

    def sample(self, logits: A, temperature: A, top_k: A, top_p: A, min_p: A, uniforms: A) -> A:
        """Return one random token for each row of logits [N, V] float32: [N] int64. Logits may be overwritten.

        The distribution is softmax(logits / temperature). Then tokens are removed in three steps: tokens less likely
        than min_p times the likeliest; all but the top_k likeliest (int64, 0 keeps all); all but the smallest set of
        the likeliest tokens that has top_p of the remaining mass. Equally likely tokens are kept or removed together.

        Each token gets an exponential random number that depends only on the row's entry of `uniforms` (float64 in
        [0, 1)) and the token's index. The token with the smallest quotient of this number and its probability is drawn
        (the Gumbel-max trick). Therefore two distributions draw the same token from the same uniform number as often as
        is possible without communication (Daliri, Musco and Suresh 2024, arXiv 2408.07978).

        Other arrays are [N] float32. A row whose temperature is 0 gives its argmax, so one call serves any mix of rows.
        `NO_TOKEN` is returned as by `argmax`.
        """

    def mask_tokens(self, logits: A, words: HostArray, samples: HostArray) -> None:
        """Set logits [N, V] float32 of rows `samples` [M] int64 to -inf, in place, where the bit of words [M, W] int32
        is 0.

        Token t is bit t % 32 of word t // 32. Tokens beyond the last word are set to -inf too."""

    def add_bias(self, logits: A, samples: HostArray, tokens: HostArray, values: HostArray) -> None:
        """Add values[p] float32 to logits[samples[p], tokens[p]] ([P], each pair once; -inf excludes a token)."""

    def penalize(
        self, logits: A, samples: HostArray, tokens: HostArray, counts: HostArray, repetition: HostArray,
        frequency: HostArray, presence: HostArray,
    ) -> None:  # fmt: skip
        """Make tokens that were seen less likely in logits [N, V] float32, in place.

        Sample `samples[p]` has seen `tokens[p]` ([P] int64, each pair once), `counts[p]` times ([P] float32) in its
        output. Positive logits are divided by the sample's `repetition` [N] float32, others are multiplied by it
        (Keskar et al. 2019). Then `frequency` [N] times the count is subtracted, and `presence` [N] if the count is not
        zero (the OpenAI API's definition).
        """

    def logprobs(self, logits: A, tokens: A, num_top: int) -> tuple[A, A, A, A]:
        """Return values and ranks of `tokens`, and ids and values of the likeliest tokens, by log_softmax of logits
        [N, V].

        For `tokens` [N] int64 (a negative token counts as 0): value [N] float32 and rank [N] int64 (1 + number of
        larger logits). For each row the K = min(num_top, V) likeliest tokens: ids [N, K] int64 and values [N, K]
        float32, best first, of equals the lowest id first."""

    def logprobs_of(self, logits: A, samples: HostArray, tokens: HostArray) -> A:
        """Return the values of `tokens` [M, K] int64 by log_softmax of rows `samples` [M] of logits: [M, K] float32, of
        each token the same bits as `logprobs` returns."""

    def normalize(self, logits: A, samples: HostArray, temperatures: HostArray) -> None:
        """Replace rows `samples` [M] of logits by log_softmax(row / temperature), in place."""

    def top_tokens(self, logits: A, samples: HostArray, count: int) -> tuple[A, A]:
        """Return ids [M, K] int64 and values [M, K] of the K = min(count, V) largest logits in rows `samples` [M],
        largest first, of equals the lowest id first."""

    def rows_of(self, x: A, samples: HostArray) -> A:
        """Return copies of rows `samples` of x [N, ...]."""

    def process_row(self, logits: A, sample: int, function: Callable[[Any], Any]) -> bool:
        """Replace row `sample` [V] of logits by `function` of it; return whether the new row has NaN.

        The function gets a torch tensor, or a numpy array on a CPU without torch."""

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str,
        value_size: int | None = None,
    ) -> LayerKVCache:  # fmt: skip
        """Return an uninitialised cache in this backend's layout, on its device. Pages never written take no memory.

        Values have `value_size` elements; the default is the keys' size."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
        """Copy whole blocks of all layers, for each pair (source, destination), as if one pair after the other."""

    def keys_of(self, cache: LayerKVCache, blocks: Sequence[int], heads: Sequence[int]) -> A:
        """Return the keys of `heads` in `blocks`, the blocks one after the other: [heads, blocks * block_size, D]
        float32."""

    def gather_blocks(self, blocks: HostArray, caches: Sequence[LayerKVCache]) -> A:
        """Return copies of `blocks`: uint8 [len(blocks), bytes of a block in all layers, keys and values]."""

    def scatter_blocks(self, staged: A, blocks: HostArray, caches: Sequence[LayerKVCache]) -> None:
        """Write blocks back that `gather_blocks` returned."""
