"""Sequences of which an index chooses the keys, in a backend's cache, and choices whose sums are exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.ops.kernel_cases import cos_sin, random
from tests.ops.tensors import OverTensors, torch_ref


@dataclass(frozen=True)
class Sizes:
    heads: int = 5
    latent: int = 40
    rotated: int = 8
    index_heads: int = 7
    index: int = 16


class IndexedBatch:
    """Sequences written into a backend's cache, whose unused slots hold `poison`. A sequence is the same wherever it
    lies."""

    def __init__(
        self, ops: OverTensors, sizes: Sizes, dtype: torch.dtype, lengths: list[int], block_size: int = 16,
        poison: float = float("nan"), seed: int = 0, num_keys: int = 10**6,
    ) -> None:  # fmt: skip
        self.ops, self.sizes = ops, sizes
        counts = [-(-length // block_size) for length in lengths]
        self.cache = ops.allocate_kv_cache(
            sum(counts) + 2, block_size, 1, sizes.rotated + sizes.index, dtype, sizes.latent
        )
        self.cache.key.fill_(poison)
        self.cache.value.fill_(poison)
        blocks = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).int()
        unused = 0 if ops is torch_ref else 2**30
        self.tables = torch.full((len(lengths), max(counts) + 1), unused, dtype=torch.int32)
        self.inputs = []
        for i, n in enumerate(lengths):
            self.tables[i, : counts[i]] = blocks[sum(counts[:i]) : sum(counts[: i + 1])]
            positions = torch.arange(n)
            slots = self.tables[i].long()[positions // block_size] * block_size + positions % block_size
            key, latent, index_key = (
                random(n + k, n, 1, size, dtype=dtype)
                for k, size in enumerate((sizes.rotated, sizes.latent, sizes.index))
            )
            index_key = index_key[positions % num_keys]  # every key comes again after so many
            rotated = random(n + 3, n, sizes.heads, sizes.rotated, dtype=dtype)
            ops.rotary_and_cache(
                rotated, key, latent, positions, cos_sin(sizes.rotated), self.cache, slots, index_key=index_key
            )
            query = random(n + 4, n, sizes.heads, sizes.latent, dtype=dtype)
            # Of the index, side by side as they are in the layer.
            both = random(n + 5, n, sizes.index_heads * (sizes.index + 1), dtype=dtype)
            self.inputs.append((query, rotated, both))

    def run(self, ranges: list[tuple[int, int, int]], num_chosen: int) -> tuple[Tensor, Tensor]:
        """-> what was chosen, and attention to that"""
        query, rotated, both = (torch.cat([self.inputs[s][k][b:e] for s, b, e in ranges]) for k in range(3))
        size = self.sizes.index_heads * self.sizes.index
        starts = torch.tensor([0] + [end - begin for _, begin, end in ranges]).cumsum(0).int()
        lengths = torch.tensor([end for _, _, end in ranges], dtype=torch.int32)
        where = self.tables[[s for s, _, _ in ranges]], starts, lengths
        index_query = both[:, :size].reshape(len(both), self.sizes.index_heads, self.sizes.index)
        chosen = self.ops.choose_keys(index_query, both[:, size:], self.cache, *where, num_chosen)
        return chosen, self.attend(query, rotated, where, chosen)

    def attend(self, query: Tensor, rotated: Tensor, where: tuple[Tensor, ...], chosen: Tensor) -> Tensor:
        out = self.ops.latent_attention(query, rotated, self.cache, *where, 0.2, chosen=chosen)
        assert isinstance(out, Tensor)
        return out


def assert_the_best_are_chosen(ops: OverTensors, begin: int, num_chosen: int, sizes: Sizes, n: int = 1500) -> None:
    """By the last rows, from `begin` on, of `n` tokens. Sums of small integers are exact, and most scores are those of
    other keys too."""
    batch = IndexedBatch(ops, sizes, torch.float32, [n])
    generator = np.random.default_rng(0)
    heads, size = sizes.index_heads, sizes.index
    keys, query = (generator.integers(-3, 4, shape).astype(np.float32) for shape in ((n, 1, size), (n, heads, size)))
    weights = generator.integers(-2, 3, (n, heads)).astype(np.float32)
    slots = batch.tables[0].long()[torch.arange(n) // 16] * 16 + torch.arange(n) % 16
    row, latent = torch.zeros(n, 1, sizes.rotated), torch.zeros(n, 1, sizes.latent)
    ops.rotary_and_cache(
        row.clone(), row, latent, torch.arange(n), cos_sin(sizes.rotated), batch.cache, slots,
        index_key=torch.from_numpy(keys),
    )  # fmt: skip
    starts, lengths = torch.tensor([0, n - begin]).int(), torch.tensor([n]).int()
    chosen = ops.choose_keys(
        torch.from_numpy(query[begin:]), torch.from_numpy(weights[begin:]), batch.cache, batch.tables, starts, lengths,
        num_chosen,
    )  # fmt: skip
    products = np.maximum(np.einsum("tid,kd->tik", query[begin:], keys[:, 0]), 0)
    scores = np.einsum("ti,tik->tk", weights[begin:], products)
    for i, found in enumerate(chosen.numpy()):
        seen = begin + i + 1
        best = np.sort(np.argsort(-scores[i, :seen], kind="stable")[:num_chosen])
        np.testing.assert_array_equal(found, np.pad(best, (0, num_chosen - len(best)), constant_values=-1))
