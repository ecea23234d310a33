"""The kernel interface: every operation that a model is made of, named once.

A backend is a module that provides the functions of `Ops`: `torch_ref` says what they mean in plain torch and is the
oracle of every kernel test, `cpu` is native. Models and the runner are written against `Ops` and import no backend.

Every operation is *row-wise*: what it computes for one token depends on nothing else in the batch, bit for bit, in
every backend but the reference. That is what makes an answer independent of load, chunking and caching.

Shapes: T tokens of a step in request order, S sequences, H hidden size, D head size, Q query heads, G key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor

Array = Any
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """One layer's keys and values. The first dimension of both is the block; the rest is the backend's own layout.

    The scales are what stored elements are multiplied with; they are for eight-bit floats and 1 for other types.
    """

    key: Tensor
    value: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def num_blocks(self) -> int:
        return self.key.shape[0]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] as a file holds it, waiting to be packed. `octavo.quantization` knows the formats.

    `format` is a block format under GGUF's name ("Q4_1", "Q6_K", ...), whose `data` is uint8 [N, bytes of a row]; or
    "INT8" or "FP8", whose `data` is floats [N, K] that are quantized as they are packed. Rows may be any distance
    apart. `data` may alias a mapped file: never write.
    """

    format: str
    data: Tensor
    shape: tuple[int, int]

    def rows(self, start: int, end: int) -> QuantizedMatrix:
        """These rows as a matrix of their own, over the same memory."""
        assert 0 <= start <= end <= self.shape[0]
        return QuantizedMatrix(self.format, self.data[start:end], (end - start, self.shape[1]))


def rows_of(matrix: Tensor | QuantizedMatrix, start: int, end: int) -> Tensor | QuantizedMatrix:
    """Rows start .. end - 1 of a matrix, over the same memory."""
    return matrix.rows(start, end) if isinstance(matrix, QuantizedMatrix) else matrix[start:end]


class LinearWeight(Protocol):
    """A weight matrix [out_features, in_features] in the layout that the backend's products want, with its bias.

    Integer matrices multiply quantized activations: each 32 elements of a row as int8 with one scale. `rms_norm`
    and `linear_silu_and_mul` write those for the matrix that consumes them; `linear` and `linear_add` quantize what is
    not quantized yet.
    """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class Program(Protocol):
    """Operations that were recorded instead of run, over buffers that stay where they are."""

    def record(self, per_sample: bool) -> AbstractContextManager[None]:
        """Note what is called meanwhile. Its rows are the step's tokens, or (`per_sample`) its samples."""
        ...

    def run(self, num_tokens: int, num_seqs: int, num_samples: int) -> None:
        """Replay for that many rows, at most as many as it was recorded with. Parts without rows are left out."""
        ...

    def profile(self, num_tokens: int, num_seqs: int, num_samples: int) -> list[tuple[str, float]]:
        """Replay call by call -> (operation, nanoseconds)."""
        ...


class Ops(Protocol):
    """What a backend provides. All tensors are contiguous in their last dimension."""

    def pack_linear(
        self, parts: Sequence[Tensor | QuantizedMatrix], bias: Tensor | None = None, gated: bool = False
    ) -> LinearWeight:
        """Pack matrices [N, K] of the same input, once, at load, as one whose outputs are side by side.

        Floats are float32 or bfloat16; `bias` is for all outputs. With `gated` the parts are gate and up.
        """
        ...

    def linear(self, x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] -> x W^T + b: [T, N] in `out_dtype`, accumulated in float32.

        The default is the dtype of x, or float32 where x is quantized."""
        ...

    def linear_add(self, x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0) -> None:
        """residual [T, N] += scale * (x W^T + b), in place, in float32, rounded once."""
        ...

    def linear_silu_and_mul(
        self,
        x: Tensor,
        gate_up: LinearWeight,
        consumer: LinearWeight | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [T, K] and a gated matrix -> silu(gate) * up: [T, I], in float32, rounded once.

        Quantized if the `consumer` multiplies quantized activations, else in `out_dtype` as in `linear`."""
        ...

    def quantize(self, x: Tensor, consumer: LinearWeight) -> Tensor:
        """x [T, K] as `consumer` multiplies it: x itself, unless the consumer is an integer matrix."""
        ...

    def embedding(
        self, token_ids: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None, scale: float = 1.0
    ) -> Tensor:
        """Rows `token_ids` [T] int32 of a packed matrix [V, H], times `scale` -> [T, H].

        The default dtype is the one that it was packed from, or float32 for integers."""
        ...

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, H], rows [N] int64 -> x[rows]: [N, H]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, consumer: LinearWeight | None = None) -> Tensor:
        """x [..., H] / sqrt(mean(x²) + eps) * weight [H], in float32, rounded once (Zhang & Sennrich 2019).

        Quantized, as [rows, ...], if the `consumer` multiplies quantized activations."""
        ...

    def rotary_and_cache(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
    ) -> None:
        """Rotate query [T, Q, D] in place and key [T, G, D], then write key and value [T, G, D] to the cache.

        The three may be views into one [T, (Q + 2G) * D] matrix: only the heads of one token must be contiguous.
        `positions` [T] int64; `cos_sin` [max_positions, R] float32 holds R/2 cosines, then R/2 sines; the first R ≤ D
        elements of a head are rotated as two halves (Su et al. 2021, the layout of GPT-NeoX). `slot_mapping` [T] int64
        is block * block_size + offset. Whether `key` is rotated in place too is unspecified.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,
        cache: LayerKVCache,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        """Causal attention of query [T, Q, D] over the paged cache -> [T, Q * D] in the dtype of query.

        Sequence s owns rows query_start_loc[s] .. query_start_loc[s + 1] ([S + 1] int32), which are its last positions;
        its keys are positions 0 .. seq_lens[s] - 1 ([S] int32, this step's tokens included), found through
        block_tables [S, max_blocks] int32. Any mix of one-row (decode) and many-row (prefill) sequences is one call.
        With a sliding window W > 0 position p sees keys p - W + 1 .. p. With a soft cap C > 0 scores x become
        C * tanh(x / C) after scaling (Gemma Team 2024). The row's summation order is a function of its
        position alone (online softmax, Milakov & Gimelshein 2018, over fixed tiles of keys).
        """
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [S, V] float32 -> [S] int64; the lowest index wins a tie."""
        ...

    def penalize(
        self,
        logits: Tensor,
        samples: Tensor,
        tokens: Tensor,
        counts: Tensor,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
    ) -> None:
        """Make tokens that were seen less likely in logits [N, V] float32, in place.

        Sample `samples[p]` has seen `tokens[p]` ([P] int64, each pair once) and has it `counts[p]` ([P] float32) times
        in its output. Positive logits are divided by the sample's `repetition` [N] float32 and others multiplied with
        it (Keskar et al. 2019); then `frequency` [N] times the count and, if that is not zero, `presence` [N] are
        taken off (the OpenAI API's definition). All but `logits` may be on the host.
        """
        ...

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, dice: Tensor
    ) -> Tensor:
        """Draw one token a row of logits [S, V] float32, which may be overwritten -> [S] int64.

        The distribution is softmax(logits / temperature); then tokens less likely than min_p times the likeliest go;
        then all but the top_k likeliest (int64, 0 is all); then all but the smallest set of the likeliest that has
        top_p of the mass left. Tokens that are equally likely stay or go together. The token is the first one, by
        index, up to which the remaining mass exceeds dice (float64 in [0, 1)) times its sum. Other tensors are
        [S] float32. Rows whose largest logit is not finite give a meaningless token. `DeviceOps` take the most likely
        token where the temperature is 0, so that one call serves any mix.
        """
        ...

    def new_program(self) -> Program:
        """An empty program, to record a model's step into."""
        ...

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerKVCache:
        """An uninitialised cache in this backend's layout. Pages that are never written cost no memory."""
        ...


class DeviceOps(Ops, Protocol):
    """What a backend provides beyond that if its device is not the processor that Python runs on.

    Nothing waits for the device, so that all of it can be captured in a graph; and tokens of a step whose slot is -1
    and sequences of length 0, with which steps are padded to a graph's size, do nothing.
    """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
        """Copy whole blocks (source, destination) of all layers, as if one after the other."""
        ...

    def mask_tokens(self, logits: Tensor, words: Tensor, samples: Tensor) -> None:
        """Set logits [N, V] float32 of samples [M] int64 to -inf, in place, where the bit of words [M, W] int32 is 0.

        Token t is bit t % 32 of word t // 32; 32 W ≥ V."""
        ...


def load(cpu_threads: int | None = None, cpus: list[int] | None = None) -> Ops:
    """The native backend, and how many threads compute, on which processors.

    Raises `ConfigError` for threads that this process cannot have.
    """
    backend = import_module("octavo.ops.cpu")
    backend.use_threads(cpu_threads, cpus)
    return cast(Ops, backend)
