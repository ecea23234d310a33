"""Kernels that change logits [N, V] float32 in place before a token is chosen: penalties, masks of grammars.

Their work is given as flat lists with an entry for each (sample, token) that changes, each pair at most once. Entries
whose sample is negative are ignored, so a list may be padded to the length that a graph was captured with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # number of entries that a program handles
_SEEN_BLOCK = 1024  # number of entries that a program compares at once
_MASK_BLOCK = 2048  # number of logits that a program masks


@triton.jit(do_not_specialize=["length"])
def _penalize(logits, stride, samples, tokens, counts, repetition, frequency, presence, length, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.load(samples + entry, mask=entry < length, other=-1)
    mask = sample >= 0
    token = tl.load(tokens + entry, mask=mask, other=0)
    count = tl.load(counts + entry, mask=mask, other=0)
    place = logits + sample.to(tl.int64) * stride + token
    value = tl.load(place, mask=mask, other=0.0)
    repeated = tl.load(repetition + sample, mask=mask, other=1.0)
    value = tl.where(value > 0, tl.div_rn(value, repeated), value * repeated)
    per_token = tl.load(frequency + sample, mask=mask, other=0.0)
    once = tl.load(presence + sample, mask=mask, other=0.0)
    value -= per_token * count + tl.where(count > 0, once, 0.0)
    tl.store(place, value, mask=mask)


def penalize(
    logits: Tensor, samples: Tensor, tokens: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor,
    presence: Tensor,
) -> None:  # fmt: skip
    """`Ops.penalize` with lists on the device: `samples`, `tokens`, `counts` [P] int32, penalties [N] float32."""
    _check(logits, samples, tokens, counts)
    for penalty in (repetition, frequency, presence):
        assert penalty.dtype is torch.float32 and penalty.shape == (logits.shape[0],) and penalty.is_contiguous()
    if length := len(samples):
        _penalize[(triton.cdiv(length, _BLOCK),)](
            logits, logits.stride(0), samples, tokens, counts, repetition, frequency, presence, length, BLOCK=_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def _add_last_tokens(samples, tokens, counts, bounds, last_tokens, BLOCK: tl.constexpr):
    """Program m completes the entries bounds[m] of a sample: the last one is for its last token. If an entry before it
    has this token, that entry counts it, and the last one is ignored."""
    m = tl.program_id(0)
    begin, end = tl.load(bounds + 2 * m), tl.load(bounds + 2 * m + 1)
    token = tl.load(last_tokens + tl.load(samples + end))
    was_seen = tl.full((), 0, tl.int32)
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        is_it = tl.load(tokens + entry, mask=entry < end, other=-1) == token
        tl.store(counts + entry, tl.load(counts + entry, mask=is_it, other=0) + 1, mask=is_it)
        was_seen = tl.maximum(was_seen, tl.max(is_it.to(tl.int32), 0))
    tl.store(tokens + end, token)
    if was_seen > 0:
        tl.store(samples + end, -1)


def add_last_tokens(samples: Tensor, tokens: Tensor, counts: Tensor, bounds: Tensor, last_tokens: Tensor) -> None:
    """Complete `penalize`'s lists, in place. `bounds` [M, 2] int32: the first and last entry of each sample whose last
    entry is for its token of `last_tokens` [N] int32, at least 0."""
    assert bounds.dtype is last_tokens.dtype is torch.int32 and bounds.is_contiguous() and last_tokens.is_contiguous()
    if len(bounds):
        _add_last_tokens[(len(bounds),)](
            samples, tokens, counts, bounds, last_tokens, BLOCK=_SEEN_BLOCK, num_warps=4, enable_fp_fusion=False
        )


@triton.jit
def _apply_masks(
    logits, stride, words, words_stride, samples, VOCAB: tl.constexpr, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (m, c) masks piece c of the logits of sample samples[m]."""
    mask_index = tl.program_id(0).to(tl.int64)
    sample = tl.load(samples + mask_index).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if sample >= 0:
        word = tl.load(words + mask_index * words_stride + column // 32, mask=column < NUM_WORDS * 32, other=0)
        is_hidden = ((word >> (column % 32)) & 1) == 0
        tl.store(logits + sample * stride + column, -float("inf"), mask=is_hidden & (column < VOCAB))


def apply_masks(logits: Tensor, words: Tensor, samples: Tensor) -> None:
    """`Ops.mask_tokens` with lists on the device: `words` [M, W] and `samples` [M], both int32."""
    masks, num_words = words.shape
    vocab = logits.shape[1]
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    assert words.dtype is samples.dtype is torch.int32 and words.stride(1) == 1
    assert samples.shape == (masks,) and samples.is_contiguous()
    if masks:
        _apply_masks[(masks, triton.cdiv(vocab, _MASK_BLOCK))](
            logits, logits.stride(0), words, words.stride(0), samples, VOCAB=vocab, NUM_WORDS=num_words,
            BLOCK=_MASK_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _check(logits: Tensor, *lists: Tensor) -> None:
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    for entries in lists:
        assert entries.dtype is torch.int32 and entries.shape == lists[0].shape and entries.is_contiguous()
