"""One sample as a test thinks of it, the way through the sampler's tables, and the plain reference of what is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import ops
from octavo.request import TokenLogprobs, pack_tokens
from octavo.sampling.random import uniform
from octavo.sampling.sampler import sample_tokens, write_settings
from octavo.sampling.sampling_table import Samples as DrawnFor
from octavo.sampling.sampling_table import SamplingBatch, SamplingTable
from octavo.sampling_params import SamplingParams
from octavo.step_plan import Admission
from tests.ops import torch_ref


@dataclass
class Row:
    """A sequence whose next token is drawn from `logits` [V]."""

    logits: Tensor
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: list[int] = field(default_factory=lambda: [1])
    output: list[int] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    index: int = 0


@dataclass
class Samples:
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str]


def sample(rows: list[Row]) -> Samples:
    """Draw one token for each row, in one batch, over a table whose rows lie in another order."""
    table = SamplingTable(len(rows) + 3)
    places = np.array([(7 * i + 3) % len(rows) if len(rows) % 7 else i for i in range(len(rows))], np.int64) + 2
    longest = max(len(row.prompt) + len(row.output) for row in rows)
    tokens = np.full((len(rows) + 3, longest + 1), 10**9, np.int32)  # what lies behind a row's tokens is never read
    for place, row in zip(places.tolist(), rows, strict=True):
        known = row.prompt + row.output
        tokens[place, : len(known)] = known
        packed, num_prompt = pack_tokens(known), len(row.prompt)
        table.admit(Admission(place, packed, num_prompt, [[]], row.params, row.stop_token_ids, row.seed, row.index))
    lengths = np.array([len(row.prompt) + len(row.output) for row in rows], np.int64)
    batch = table.build(DrawnFor(places, np.zeros(len(rows), np.int64), lengths), tokens)
    logits = torch.stack([row.logits for row in rows]).numpy()
    found, logprobs, errors = sample_from(logits, batch)
    return Samples(found.tolist(), logprobs or [None] * len(rows), errors)


def sample_from(
    logits: NDArray[np.float32], batch: SamplingBatch | None
) -> tuple[NDArray[np.int64], list[TokenLogprobs | None] | None, dict[int, str]]:
    """Tokens [N], log-probabilities and errors, by the native operations; logits [N, V] are overwritten."""
    arrays = sample_arrays(len(logits))
    if batch is not None:
        write_settings(arrays, batch)
    cpu = ops.load()
    sampled = sample_tokens(cpu, logits, cpu.argmax(logits), arrays, batch, is_known=True)
    tokens = np.array(sampled.tokens)
    return tokens, *sampled.results(tokens, lambda arrays: [np.asarray(array) for array in arrays])


def sample_arrays(num_samples: int) -> Any:
    """A step's arrays, as far as drawing reads them."""
    return SimpleNamespace(
        temperature=np.zeros(num_samples, np.float32), top_k=np.zeros(num_samples, np.int64),
        top_p=np.ones(num_samples, np.float32), min_p=np.zeros(num_samples, np.float32), uniforms=np.zeros(num_samples),
    )  # fmt: skip


def uniform_of(row: Row) -> float:
    """The uniform number that a row's draw uses."""
    counters = (np.array([x], np.uint64) for x in (row.seed, row.index, len(row.output)))
    return float(uniform(*counters)[0])


def probabilities(logits: NDArray[Any], params: SamplingParams, slack: float = 0.0) -> NDArray[np.float64]:
    """What `params` make of `logits` [V], a step at a time in float64. Thresholds are moved by `slack`, relatively."""
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    probs = np.exp(scaled)
    probs /= probs.sum()
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max() * (1 + slack)] = 0
    if 0 < params.top_k < len(probs):
        probs[probs < np.sort(probs)[-params.top_k] * (1 - 1e-9)] = 0
    if params.top_p < 1:
        wanted = params.top_p * probs.sum() * (1 + slack)
        mass = 0.0
        for p in sorted(probs, reverse=True):
            mass += p
            if mass >= wanted:
                break
        probs[probs < p * (1 - 1e-6)] = 0
    found: NDArray[np.float64] = probs / probs.sum()
    return found


def is_right_draw(row: Row, token: int) -> bool:
    """Whether `token` has the smallest exponential number for its probability. Float32 may decide otherwise about a
    token on the very edge of a threshold, and between tokens that come out nearly equal; either decision is right."""
    numbers = torch_ref.exponentials(uniform_of(row), len(row.logits)).numpy()
    for slack in (0.0, 1e-4, -1e-4):
        probs = probabilities(row.logits.numpy(), row.params, slack)
        with np.errstate(divide="ignore"):
            times = numbers / probs
        if times[token] <= times.min() * (1 + 1e-4):
            return True
    return False
