"""Operations by torch's own functions, on any torch device: log-probabilities, indexing, copies of blocks.

The reference and the CUDA backend share them. Lists that the host makes are uploaded without waiting.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import LayerKVCache
from octavo.ops.torch_arrays import upload


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = logits.double().logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    top, top_values = _top(logits, num_top)
    return (chosen - sums)[:, 0].float(), ranks, top, (top_values - sums).float()


def logprobs_of(logits: Tensor, samples: NDArray[Any], tokens: NDArray[Any]) -> Tensor:
    rows = logits[upload(samples, logits.device)]
    sums = rows.double().logsumexp(-1, keepdim=True)
    return (rows.gather(1, upload(tokens, logits.device)) - sums).float()


def normalize(logits: Tensor, samples: NDArray[Any], temperatures: NDArray[Any]) -> None:
    rows = upload(samples, logits.device)
    divisors = upload(temperatures.astype(np.float32), logits.device)
    logits[rows] = (logits[rows] / divisors[:, None]).double().log_softmax(-1).float()


def top_tokens(logits: Tensor, samples: NDArray[Any], count: int) -> tuple[Tensor, Tensor]:
    return _top(logits[upload(samples, logits.device)], count)


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the largest logits, of equals the lowest id first.

    `topk` does not define the order of equals, so it gets integer keys that are all different."""
    bits = (logits + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    width = logits.shape[1]
    keys = ordered * width + torch.arange(width - 1, -1, -1, device=logits.device)
    top = width - 1 - keys.topk(min(count, width), dim=-1).values % width
    return top, logits.gather(1, top)


def replace_rows(x: Tensor, replacements: Tensor, indices: Tensor) -> None:
    if not len(replacements):
        return
    found = replacements[indices.clamp(min=0).long()].to(x.dtype)
    x.copy_(torch.where(indices[:, None] >= 0, found, x))


def add_chosen(residual: Tensor, x: Tensor, ids: Tensor, weights: Tensor, first_id: int) -> None:
    passed = torch.where(ids >= first_id, weights, 0.0)
    factor = torch.zeros_like(passed[:, :1])
    for j in range(ids.shape[1]):  # one by one: with several rows torch may add in another order
        factor += passed[:, j : j + 1]
    residual.copy_(residual.float() + factor * x.float())


def add_rows(x: Tensor, summands: Tensor, indices: Tensor) -> None:
    if not len(summands):
        return
    found = (x.float() + summands[indices.clamp(min=0).long()]).to(x.dtype)
    x.copy_(torch.where(indices[:, None] >= 0, found, x))


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
    """Return the bytes of all layers' keys and values, [blocks, bytes of a block] each."""
    return [part.view(torch.uint8).flatten(1) for cache in caches for part in cache.arrays]


def keys_of(cache: LayerKVCache, blocks: Sequence[int], heads: Sequence[int]) -> Tensor:
    places, of_heads = (upload(np.asarray(numbers), cache.key.device) for numbers in (blocks, heads))
    found: Tensor = cache.key.view(torch.uint8)[places].view(cache.key.dtype).float()[:, :, of_heads]
    if cache.scales is not None:
        found = found * cache.scales[places][:, :, of_heads, :1].float()
    return found.flatten(0, 1).transpose(0, 1)


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
    block_tables: Tensor, places: Tensor, blocks: Tensor, last_tokens: Tensor, pending_token_rows: Tensor,
    token_ids: Tensor,
    seq_table_rows: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    block_tables.view(-1)[places] = blocks
    no_row = len(last_tokens) - 1
    return torch.where(pending_token_rows < no_row, last_tokens[pending_token_rows], token_ids), block_tables[
        ..., seq_table_rows, :
    ]


def keep_tokens(last_tokens: Tensor, owners: Tensor, tokens: Tensor) -> None:
    last_tokens[owners] = tokens.clamp(min=0).int()
