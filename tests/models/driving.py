"""A model driven step by step over the reference backend, without an engine: mixed batches of chunks of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.loading.weights import floats
from octavo.models.registry import Model
from octavo.ops import LayerKVCache, Ops
from octavo.quantization.stored import StoredWeight
from octavo.step_batch import GroupTables, StepBatch

BLOCK_SIZE = 8
# Small models of the short tier. Nearly every value of a setting that only some descriptions of models have is in one.
VARIED = {
    "a.x k1", "apertus", "beam", "biogpt", "bitnet", "bloom", "codegen", "cohere", "ctrl", "dbrx", "deepseek v3",
    "deepseek v3.2, of whose keys its index chooses 8", "dynamic rope", "ernie 4.5 moe", "falcon 40b",
    "falcon h1, biases that are multiplied", "falcon h1, norm before the gate", "falcon mamba", "gemma 2", "gemma 3n",
    "gemma 3n, three streams, not scaled", "gemma 4, experts", "glm 4",
    "glm moe dsa, of whose keys indexes of some layers choose 8", "gpt bigcode, not multi-query", "gpt-neox japanese",
    "gpt-neox, sequential, no bias", "gpt-oss", "hunyuan dense", "hyperclova x", "kimi linear", "kolibri 1",
    "laguna, gates by element", "lfm 3", "llama ratio 3, head 64, tied", "longcat flash", "mamba", "mimo v2 flash",
    "minimax", "ministral 3", "modernbert decoder", "mpt", "nanochat, yarn", "nemotron h, experts", "olmo hybrid",
    "openai gpt", "opt, projections, norms after", "persimmon", "phi3, window, longrope", "qwen 3.5", "qwen3 moe",
    "qwen3 next", "recurrent gemma", "xglm", "zamba", "zamba 2", "zamba 2, biases, no adapters of attention",
}  # fmt: skip


class ArrayWeights:
    """`Weights` of float32 arrays by name."""

    position_bytes = 0

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays, self.left = arrays, set(arrays)

    @classmethod
    def of(cls, module: torch.nn.Module) -> ArrayWeights:
        return cls({name: tensor.numpy() for name, tensor in module.state_dict().items()})

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def take(
        self, name: str, shape: tuple[int, ...], dtype: str | None = None, own: range | None = None
    ) -> NDArray[Any]:
        assert self.arrays[name].shape == shape, name
        self.left.discard(name)
        return self.arrays[name] if own is None else self.arrays[name][own.start : own.stop]

    def take_matrix(
        self, name: str, shape: tuple[int, ...], rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None, is_transposed: bool = False, order: NDArray[np.intp] | None = None,
    ) -> StoredWeight:  # fmt: skip
        data = self.take(name, shape).reshape(-1, shape[-1])
        stored = floats(data.T if is_transposed else data)
        stored = stored if rows is None and columns is None else stored.shard(rows, columns)
        return stored if order is None else stored.take_rows(order)

    def take_integers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        return self.take(name, shape).astype(np.int64)

    def is_untransposed(self, name: str, untransposed_shape: tuple[int, ...] | None = None) -> bool:
        return False

    def matrix_format(self, name: str) -> str:
        return "F32"

    def read_again(self, take: Callable[[], object]) -> None:
        """What a layer shares with one before it."""

    def check_all_taken(self) -> None:
        assert not self.left

    def ignore(self, prefix: str) -> None: ...

    def close(self) -> None: ...


def all_logits(model: Model, ops: Ops, sequences: Sequence[list[int]], seed: int = 0) -> list[torch.Tensor]:
    """Logits [length, V] of every position of each sequence, computed in steps of random chunks of all of them."""
    rng = np.random.default_rng(seed)
    width = -(-max(map(len, sequences)) // BLOCK_SIZE)
    num_blocks = width * len(sequences)
    caches = [_cache(ops, spec, num_blocks) for spec in model.layer_caches]
    tables = [rng.permutation(num_blocks).reshape(len(sequences), width) for _ in group_layers(model.layer_caches)]
    kinds = [group.spec.kind for group in group_layers(model.layer_caches)]
    num_done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(done < len(tokens) for done, tokens in zip(num_done, sequences, strict=True)):
        rows = [
            (s, range(done, min(len(sequences[s]), done + int(rng.choice([1, 1, 5, 17])))))
            for s, done in enumerate(num_done)
            if done < len(sequences[s])
        ]
        hidden = model.forward(_batch(rows, sequences, kinds, tables), caches)
        found = model.logits(hidden).split([len(chunk) for _, chunk in rows])  # type: ignore[attr-defined]
        for (s, chunk), part in zip(rows, found, strict=True):
            logits[s].append(part)
            num_done[s] = chunk.stop
    return [torch.cat(parts) for parts in logits]


def _cache(ops: Ops, spec: LayerCacheSpec, num_blocks: int) -> LayerKVCache:
    if spec.kind == "state":  # of which nothing may be read before it is written
        states = torch.full((num_blocks, spec.num_bytes // 4), float("nan"))
        return LayerKVCache(states, states[:, :0])
    return ops.allocate_kv_cache(num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.key_size, "float32", spec.value_size)


def _batch(
    rows: list[tuple[int, range]], sequences: Sequence[list[int]], kinds: list[str], tables: list[NDArray[np.int64]]
) -> StepBatch:
    tokens = [sequences[s][position] for s, chunk in rows for position in chunk]
    owners = np.array([s for s, chunk in rows for _ in chunk])
    positions = np.array([position for _, chunk in rows for position in chunk])
    groups = tuple(
        GroupTables(
            torch.from_numpy(
                table[owners, 0]
                if kind == "state"
                else table[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            ),
            torch.from_numpy(table[[s for s, _ in rows]].astype(np.int32)),
        )
        for kind, table in zip(kinds, tables, strict=True)
    )
    return StepBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.from_numpy(positions),
        query_start_loc=torch.tensor(np.cumsum([0, *(len(chunk) for _, chunk in rows)]), dtype=torch.int32),
        seq_lens=torch.tensor([chunk.stop for _, chunk in rows], dtype=torch.int32),
        sample_rows=torch.arange(len(tokens)),
        groups=groups,
    )
