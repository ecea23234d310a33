"""The sampler for a device that computes on its own: nothing here waits for it.

`draw` has the device choose the tokens of a step, and measure whatever requests want to know of them; `Drawn.finish`
makes lists of that once it has happened. The meaning is `octavo.sampling.sampler`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.execution.step_inputs import StepInputs
from octavo.ops import DeviceOps
from octavo.ops.upload import upload
from octavo.request import TokenLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.beams import best_tokens, offers, score_beams
from octavo.sampling.logprobs import MeasuredLogprobs, entries, measure
from octavo.sampling.processors import process_logits
from octavo.sampling.random import uniform
from octavo.sampling.sampler import NOTHING_TO_CHOOSE

NO_TOKEN = -1  # in the place of a sample for which nothing was left to choose from


@dataclass(slots=True)
class Drawn:
    """What a step's samples are on the device. `tokens` [N] int64 has `NO_TOKEN` where there was none to choose."""

    tokens: Tensor
    errors: dict[int, str] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)  # the samples that `logprobs` are of
    logprobs: MeasuredLogprobs | None = None
    offers: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)

    def finish(
        self, tokens: NDArray[np.int64], fetch: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> tuple[list[TokenLogprobs | None] | None, dict[int, str]]:
        """Log-probabilities by sample, if any are asked for, and what went wrong by sample. `tokens` [N] are on the
        host by now, and set right in place; `fetch` brings other tensors there."""
        errors = dict.fromkeys(np.flatnonzero(tokens == NO_TOKEN).tolist(), NOTHING_TO_CHOOSE) | self.errors
        tokens[tokens == NO_TOKEN] = 0
        if self.logprobs is None and not self.offers:
            return None, errors
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.logprobs is not None:
            for n, entry in zip(self.wanted, entries(fetch(self.logprobs.tensors), self.logprobs.num_top), strict=True):
                found[n] = entry
        for samples, best, scores in self.offers:
            for n, entry in offers(samples, *fetch([best, scores])):
                found[n] = entry
        return found, errors


def fill(inputs: StepInputs[NDArray[Any]], batch: SamplingBatch) -> None:
    """Write what `draw` needs of the batch into the step's inputs."""
    count = len(batch.temperature)
    inputs.temperature[:count] = batch.temperature
    inputs.top_k[:count] = batch.top_k
    inputs.top_p[:count] = batch.top_p
    inputs.min_p[:count] = batch.min_p
    inputs.dice[:count] = uniform(batch.seed, batch.index, batch.position)


def draw(
    ops: DeviceOps, logits: Tensor, best: Tensor, inputs: StepInputs[Tensor], batch: SamplingBatch | None
) -> Drawn:
    """logits [N, V] float32, which may be overwritten, and their argmax [N] int64 -> the step's samples. Without a
    batch they are the most likely tokens."""
    if batch is None:
        return Drawn(torch.where(_is_finite(logits, best), best, NO_TOKEN))
    drawn = Drawn(best, dict(batch.errors))
    wanted = np.flatnonzero(batch.num_logprobs >= 0)
    drawn.wanted = wanted.tolist()
    rows = upload(wanted, logits.device) if len(wanted) else None
    raw = None if rows is None else logits[rows]  # before penalties, as the model said
    if batch.beams:
        score_beams(logits, batch.beams)
    if batch.masks:
        words = np.stack([mask.words for _, mask in batch.masks]).view(np.int32)
        samples = np.array([n for n, _ in batch.masks], np.int64)
        ops.mask_tokens(logits, upload(words, logits.device), upload(samples, logits.device))
    if batch.special:
        drawn.errors |= process_logits(logits, batch.special, ops)
    if batch.masks or batch.special:
        best = ops.argmax(logits)
    if batch.beams:
        drawn.offers = best_tokens(logits, batch.beams)
    is_finite = _is_finite(logits, best)
    tokens = best
    if (batch.temperature > 0).any():  # after everything else: logits are lost
        settings = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.dice)
        tokens = ops.sample(logits, *(setting[: len(best)] for setting in settings))
    drawn.tokens = torch.where(is_finite, tokens, NO_TOKEN)
    if rows is not None and raw is not None:
        drawn.logprobs = measure(raw, drawn.tokens[rows].clamp(min=0), batch.num_logprobs[wanted])
    return drawn


def _is_finite(logits: Tensor, best: Tensor) -> Tensor:
    """Masks that leave nothing, and logits that are not numbers, end their own request and nothing else."""
    return logits.gather(1, best[:, None])[:, 0].isfinite()
