"""The choice of a GPU's attention kernel: Octavo's own or FlashAttention.

All kernels are tried at start on the model's shapes, with a busy decode step and with a prompt. FlashAttention is
chosen only if the two steps together are faster, and if a row has the same bits alone, among other rows, and in a
prompt: answers that change with load are not worth a faster kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import DeviceOps, LayerKVCache, flash, flash3
from octavo.ops.torch_arrays import DTYPES

logger = logging.getLogger(__name__)

_NUM_SEQS, _CONTEXT, _PROMPT = 64, 1024, 1024  # sizes of the timed decode step and prompt
_WORTH_IT = 0.97  # another kernel must need at most this share of the own kernel's time


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A model's shapes, types and settings as attention needs them."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    sliding_window: int
    dtype: str
    cache_dtype: str
    device: str | torch.device = "cuda"
    score_settings: tuple[str, ...] = ()  # settings of any layer that only Octavo's own kernel supports


Attention = Callable[..., Any]


def with_attention(
    ops: DeviceOps, wanted: str, shape: AttentionShape, time_s: Callable[[Callable[[], object]], float]
) -> DeviceOps:
    """Return `ops` with the `wanted` attention: "triton", "flash_attn", or "auto" to measure with `time_s`.

    Logs the choice and its reason. Raises `ConfigError` if "flash_attn" is wanted but cannot be used.
    """
    if wanted == "triton":
        return ops
    own: Attention = ops.paged_attention
    reasons = []
    for name, other in (("FlashAttention 3", flash3), ("FlashAttention", flash)):
        reason = other.why_not(shape.dtype, shape.cache_dtype, shape.score_settings)
        if reason is None:
            reason = _why_not_taken(own, other.paged_attention, shape, time_s, wanted == "auto")
        if reason is None:
            logger.info("attention: %s, in one split", name)
            return _replaced(ops, other.paged_attention)
        reasons.append(f"{name}: {reason}")
    if wanted == "flash_attn":
        raise ConfigError(f"--attention-backend flash_attn: {'; '.join(reasons)}. Use auto or triton.")
    logger.info("attention: Triton (%s)", "; ".join(reasons))
    return ops


def _replaced(ops: DeviceOps, attention: Attention) -> DeviceOps:
    names = [name for name in dir(ops) if not name.startswith("_")]
    operations: dict[str, Any] = {name: getattr(ops, name) for name in names} | {"paged_attention": attention}
    return cast(DeviceOps, SimpleNamespace(**operations))


def _why_not_taken(
    own: Attention,
    other: Attention,
    shape: AttentionShape,
    time_s: Callable[[Callable[[], object]], float],
    must_be_faster: bool,
) -> str | None:
    """Return the reason why `other` is not used; None if it is used."""
    decode, prompt, cache = _steps(shape)
    scale = shape.head_size**-0.5

    def attend(kernel: Attention, step: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        query, tables, starts, lens = step
        out: Tensor = kernel(query, cache, tables, starts, lens, scale, shape.sliding_window)
        return out

    try:
        rows, prompted = attend(other, decode), attend(other, prompt)
        query, tables, starts, lens = decode
        alone = attend(other, (query[-1:], tables[-1:], starts[:2], lens[-1:]))
    except (RuntimeError, TypeError, ValueError) as e:
        return f"it does not take this model's shapes ({str(e).splitlines()[0]})"
    worst = max(float((a - b).abs().max()) for a, b in ((rows, attend(own, decode)), (prompted, attend(own, prompt))))
    if not worst < 0.02:
        return f"its results are others, by {worst:.3g}"
    # The last row of the decode step and of the prompt are the same token.
    if not (torch.equal(alone[0], rows[-1]) and torch.equal(prompted[-1], rows[-1])):
        return "a row's bits depend on what else is computed"
    if must_be_faster:
        times = [sum(time_s(lambda k=k, s=s: attend(k, s)) for s in (decode, prompt)) for k in (own, other)]  # type: ignore[misc]
        if times[1] > _WORTH_IT * times[0]:
            return f"measured {times[1] / times[0]:.2f} times the time of Triton's"
    return None


def _steps(shape: AttentionShape) -> tuple[Any, Any, LayerKVCache]:
    """Return a decode step, a prompt, and the cache of both. A step is (query, block tables, starts, lengths)."""
    place: dict[str, Any] = {"device": shape.device}
    generator = torch.Generator().manual_seed(0)
    blocks_each = -(-_CONTEXT // shape.block_size)
    cache_shape = (_NUM_SEQS * blocks_each, shape.block_size, shape.num_kv_heads, shape.head_size)
    few = torch.randn(1 << 16, generator=generator).to(**place, dtype=DTYPES[shape.cache_dtype])
    count = torch.Size(cache_shape).numel()
    # Keys and values repeat the same random numbers, each from another offset.
    key = few.repeat(-(-count // len(few)))[:count].view(cache_shape)
    value = few.roll(12345).repeat(-(-count // len(few)))[:count].view(cache_shape)
    int32 = place | {"dtype": torch.int32}
    tables = torch.arange(_NUM_SEQS * blocks_each, **int32).view(_NUM_SEQS, blocks_each)
    query = torch.randn(_PROMPT, shape.num_heads, shape.head_size, generator=generator)
    query = query.to(**place, dtype=DTYPES[shape.dtype])
    decode = (
        query[-_NUM_SEQS:], tables, torch.arange(_NUM_SEQS + 1, **int32), torch.full((_NUM_SEQS,), _CONTEXT, **int32)
    )  # fmt: skip
    prompt = (query, tables[-1:], torch.tensor([0, _PROMPT], **int32), torch.tensor([_CONTEXT], **int32))
    return decode, prompt, LayerKVCache(key, value)
