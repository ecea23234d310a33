"""Penalties, biases and grammars' masks on logits, against what the sampler does on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops import cuda
from octavo.ops.triton.logits import apply_masks, penalize
from tests.ops.kernel_cases import assert_same_bits, random
from tests.ops.triton.conftest import DEVICE

ROWS, VOCAB = 5, 700


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_penalties_follow_their_definition() -> None:
    logits = random(0, ROWS, VOCAB) * 5
    logits[0, 3] = -float("inf")
    repetition, frequency, presence = random(1, ROWS).abs() + 0.5, random(2, ROWS), random(3, ROWS)
    repetition[1] = 1
    generator = torch.Generator().manual_seed(4)
    seen = torch.stack([torch.randperm(VOCAB, generator=generator)[:100] for _ in range(ROWS)])
    counts = torch.randint(0, 4, seen.shape, generator=generator)
    expected = logits.clone()
    for n in range(ROWS):
        values = expected[n, seen[n]]
        values = torch.where(values > 0, values / repetition[n], values * repetition[n])
        expected[n, seen[n]] = values - (frequency[n] * counts[n] + presence[n] * (counts[n] > 0))
    samples = torch.arange(ROWS).repeat_interleave(100)
    samples[-3:] = -1  # padding
    expected[-1, seen[-1, -3:]] = logits[-1, seen[-1, -3:]]
    out = logits.to(DEVICE)
    lists = [x.flatten().int().to(DEVICE) for x in (samples, seen, counts)]
    penalize(out, *lists, *(x.to(DEVICE) for x in (repetition, frequency, presence)))
    torch.testing.assert_close(out.cpu(), expected)
    untouched = torch.ones(ROWS, VOCAB, dtype=torch.bool).scatter(1, seen, False)
    assert torch.equal(out.cpu()[untouched], logits[untouched])


def test_a_token_that_only_the_device_knows_is_penalized_like_those_of_the_host() -> None:
    """The last token of each sample: one of its prompt, one of its output, a new one behind a list of several pieces,
    and one without other tokens. One sample has none."""
    vocab = 3000
    logits = (random(0, ROWS, vocab) * 5).to(DEVICE)
    seen = [{4: 0, 9: 2}, {5: 3, 4: 1, 7: 0}, {token: token % 3 for token in range(1500)}, {}, {6: 1}]
    last = [4, 4, 2999, 8, None]
    penalties = random(1, ROWS).abs().numpy() + 0.5, random(2, ROWS).numpy(), random(3, ROWS).numpy()

    def penalized(known: list[dict[int, int]], *last_tokens: Tensor) -> Tensor:
        entries = np.array([(n, token, count) for n, own in enumerate(known) for token, count in own.items()])
        out = logits.clone()
        cuda.penalize(out, *entries[:, :2].T, entries[:, 2].astype(np.float32), *penalties, *last_tokens)
        return out.cpu()

    pairs = [*zip(seen, last, strict=True)]
    complete = [own if token is None else own | {token: own.get(token, 0) + 1} for own, token in pairs]
    awaiting = [own if token is None else own | {-1: 1} for own, token in pairs]
    assert_same_bits(penalized(awaiting, ints(*(token or 0 for token in last))), penalized(complete))
    assert_same_bits(penalized(complete, ints(*(token or 0 for token in last))), penalized(complete))


def test_masks_hide_what_a_grammar_does_not_allow() -> None:
    logits = random(0, ROWS, VOCAB)
    words = np.random.default_rng(0).integers(0, 2**32, (3, 23), dtype=np.uint32)
    words[1] = 0
    expected = logits.clone()
    for m, sample in ((0, 4), (1, 0)):
        allowed = np.unpackbits(words[m].view(np.uint8), bitorder="little")[:VOCAB].view(bool)
        expected[sample][~torch.from_numpy(allowed)] = -float("inf")
    out = logits.to(DEVICE)
    apply_masks(out, torch.from_numpy(words.view(np.int32)).to(DEVICE), ints(4, 0, -1))
    assert_same_bits(out.cpu(), expected)


def test_tokens_beyond_a_mask_are_hidden() -> None:
    logits = torch.zeros(1, 40, device=DEVICE)
    apply_masks(logits, ints(-1)[None], ints(0))
    assert torch.equal(logits[0].isfinite().cpu(), torch.arange(40) < 32)
