"""Operations that are torch's own functions, on any of its devices: log-probabilities, indexing, copies of blocks.

The reference and the CUDA backend share them. Lists that the host makes are uploaded without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import LayerKVCache
from octavo.ops.torch_arrays import upload
from octavo.sampling_params import MAX_LOGPROBS


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    measured = logits.log_softmax(-1)
    chosen = measured.gather(1, tokens.clamp(min=0)[:, None])
    ranks = (measured > chosen).sum(-1) + 1
    # Which of several equal tokens are in the top depends on how many are asked for: always ask for the same number.
    width = logits.shape[1]
    top = measured.topk(min(max(MAX_LOGPROBS, num_top), width) if num_top else 0, dim=-1)
    return chosen[:, 0], ranks, top.indices[:, :num_top], top.values[:, :num_top]


def normalize(logits: Tensor, samples: NDArray[Any], temperatures: NDArray[Any]) -> None:
    rows = upload(samples, logits.device)
    divisors = upload(temperatures.astype(np.float32), logits.device)
    logits[rows] = (logits[rows] / divisors[:, None]).log_softmax(-1)


def top_tokens(logits: Tensor, samples: NDArray[Any], count: int) -> tuple[Tensor, Tensor]:
    top = logits[upload(samples, logits.device)].topk(min(count, logits.shape[1]), dim=-1)
    return top.indices, top.values


def rows_of(x: Tensor, samples: NDArray[Any]) -> Tensor:
    return x[upload(samples, x.device)]


def process_row(logits: Tensor, sample: int, function: Callable[[Any], Any]) -> bool:
    row = logits[sample]
    row.copy_(function(row))
    return bool(row.isnan().any())


def add_bias(logits: Tensor, samples: NDArray[Any], tokens: NDArray[Any], values: NDArray[Any]) -> None:
    device = logits.device
    logits[upload(samples, device), upload(tokens, device)] += upload(values, device)


def _pieces(caches: Sequence[LayerKVCache]) -> list[Tensor]:
    """The bytes of all layers' keys and values, [blocks, bytes of a block] each."""
    return [part.view(torch.uint8).flatten(1) for cache in caches for part in (cache.key, cache.value)]


def gather_blocks(blocks: NDArray[Any], caches: Sequence[LayerKVCache]) -> Tensor:
    pieces = _pieces(caches)
    sources = upload(blocks, pieces[0].device)
    return torch.cat([piece[sources] for piece in pieces], 1)


def scatter_blocks(staged: Tensor, blocks: NDArray[Any], caches: Sequence[LayerKVCache]) -> None:
    pieces = _pieces(caches)
    destinations = upload(blocks, pieces[0].device)
    begin = 0
    for piece in pieces:
        piece[destinations] = staged[:, begin : begin + piece.shape[1]]
        begin += piece.shape[1]


def resolve_step(
    block_tables: Tensor, places: Tensor, blocks: Tensor, last_tokens: Tensor, token_owners: Tensor, token_ids: Tensor,
    seq_owners: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    block_tables.view(-1)[places] = blocks
    no_row = len(last_tokens) - 1
    return torch.where(token_owners < no_row, last_tokens[token_owners], token_ids), block_tables[..., seq_owners, :]


def keep_tokens(last_tokens: Tensor, owners: Tensor, tokens: Tensor) -> None:
    last_tokens[owners] = tokens.clamp(min=0).int()
