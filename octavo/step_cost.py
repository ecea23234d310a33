"""The cost of steps: `StepWork` is the work of a step, `StepCostModel` predicts its time and is fitted as steps happen.

This module uses no scheduler and no clock: code that runs steps measures them and calls `observe`; code that plans
steps, predicts a wait or chooses between machines calls `seconds`. The same calls give the same numbers.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import median
from typing import Protocol, Self

import numpy as np

_MEMORY_STEPS = 200  # after so many steps of a kind, older ones count e times less
_SPEED_STEPS = 15  # the median of so many steps is the machine's present speed; seven disturbed steps do not change it
_LARGEST_SURPRISE = 1.5  # measured times are clipped to this factor around the prediction
_FIRST_SURPRISE = 20.0  # the factor for the first step of a kind; half of it for the second, and so on
_TRUST = 0.1  # weight of the start's proportions, in steps of a single feature
_FIRST_STEPS = 50  # the first steps of a kind fit all coefficients; later steps fit one each, in a tenth of the time
_READ_S_PER_BYTE = 1e-9  # assumed for a disk or a network until a read is measured
_DOUBT = 0.9  # lowers the cost of reading after each prompt that was not read: a slow disk is tried again
_BENDS = (8, 64)  # numbers of tokens at which the cost of a further token may change


@dataclass(slots=True)
class StepWork:
    """The work of a step. An empty step has the fixed cost of every step."""

    num_tokens: int = 0
    num_samples: int = 0  # rows of logits
    num_chunks: int = 0  # rows of several tokens: parts of prompts, and draft tokens
    num_keys: int = 0  # keys in the cache; each row reads its keys once for all its tokens
    num_chunk_pairs: int = 0  # pairs of a query and a key, in rows of several tokens

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, int, tuple[int, ...]]]) -> Self:
        """Return the work of a plan's rows (`octavo.step_plan.PlannedRow`)."""
        # Sums are faster than `add` for each row, and most steps have no rows of several tokens.
        num_tokens, num_samples = sum([row[2] for row in rows]), sum([row[3] for row in rows])
        work = cls(num_tokens, num_samples, num_keys=sum([row[1] for row in rows]))
        if num_tokens > len(rows):
            for _, num_computed, num_tokens, _, _, _ in rows:
                if num_tokens > 1:
                    work.num_chunks += 1
                    work.num_chunk_pairs += _pairs(num_computed, num_tokens)
        return work

    def add(self, num_computed: int, num_tokens: int, num_samples: int) -> None:
        """Add a row that computes `num_tokens` behind `num_computed` tokens."""
        self.num_tokens += num_tokens
        self.num_samples += num_samples
        self.num_keys += num_computed
        if num_tokens > 1:
            self.num_chunks += 1
            self.num_chunk_pairs += _pairs(num_computed, num_tokens)

    def add_draft_token(self, num_computed: int, count: int) -> None:
        """Add draft token number `count` to the row of one token after `num_computed`."""
        self.num_tokens += 1
        self.num_samples += 1
        self.num_chunk_pairs += _pairs(num_computed, 1 + count)
        if count == 1:
            self.num_chunks += 1
        else:
            self.num_chunk_pairs -= _pairs(num_computed, count)

    def plus(self, num_computed: int, num_tokens: int, num_samples: int) -> Self:
        """Return this work with one more row."""
        work = replace(self)
        work.add(num_computed, num_tokens, num_samples)
        return work

    def features(self) -> tuple[float, ...]:
        """Return the features of the linear model of a step's time, whose coefficients are not negative. The number of
        tokens is split at `_BENDS`, because the first tokens cost little while reading the weights takes longer than
        multiplying."""
        few, many = _BENDS
        tokens = self.num_tokens
        return (
            1.0, min(tokens, few), min(max(tokens - few, 0), many - few), max(tokens - many, 0), self.num_samples,
            self.num_chunks, self.num_keys, self.num_chunk_pairs,
        )  # fmt: skip


def _pairs(num_computed: int, num_tokens: int) -> int:
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


class StepCost(Protocol):
    """Predicts the time of a step: `StepCostModel`, or a formula in tests."""

    def seconds(self, work: StepWork) -> float: ...


class StepCostModel:
    """Predicts the seconds of a step: a linear function of its features, fitted slowly, times the machine's present
    speed, followed quickly, because other programs and clock frequencies change it.

    The function minimizes the squares of the relative errors, by coordinate descent from where it is (Lawson-Hanson's
    problem, kept up to date as in recursive least squares with forgetting). Steps with and without rows of several
    tokens are two kinds; a kind is forgotten only as new steps of this kind come, so hours of decoding do not erase the
    cost of prompts. Costs that steps cannot tell apart keep the proportions of the start.

    Steps beside a running tower take longer by a factor. Only such steps fit the factor, and they fit nothing else,
    because pictures come and go faster than the machine's speed is followed.
    """

    def __init__(self, start: Iterable[float]) -> None:
        """`start` has seconds for each of `StepWork.features`; a 0 stays 0."""
        self._start = np.array(list(start))
        self._shares = np.ones(len(self._start))  # fitted factors of `_start`
        self._coefficients = self._start.tolist()
        num = len(self._start)
        self._moments = np.zeros((2, num, num))
        self._targets = np.zeros((2, num))
        self._ratios = deque[float](maxlen=_SPEED_STEPS)  # measured time over prediction without slowness
        self.slowness = 1.0  # factor of the machine's present speed
        self.tower_running = False  # a tower runs beside the predicted steps
        self._ratios_with_tower = deque[float](maxlen=_SPEED_STEPS)  # the same ratios, for steps beside a tower
        self._num_steps = [0, 0]  # by kind
        self._mean_surprise = 1.0
        self._next = 0  # next share to fit

    @classmethod
    def derived(cls, weight_bytes: int, key_bytes: int, bytes_per_s: float, operations_per_s: float) -> Self:
        """Return a model for steps that read `weight_bytes` once and `key_bytes` for each key. The machine's figures
        may be rough: the first steps correct the speed, and until then only proportions matter."""
        num_weights = weight_bytes  # about one byte each
        read_s, token_s = weight_bytes / bytes_per_s, 2 * num_weights / operations_per_s
        key_s, pair_s = key_bytes / bytes_per_s, key_bytes / operations_per_s
        return cls((read_s, token_s / 2, token_s, token_s, token_s / 4, token_s, key_s, pair_s))

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step at the present speed."""
        base: float = sum(map(mul, self._coefficients, work.features()))
        beside = median(self._ratios_with_tower) if self.tower_running and self._ratios_with_tower else 0.0
        return max(self.slowness, beside) * base

    def observe(self, work: StepWork, seconds: float, had_neighbour: bool = False) -> None:
        """Learn from a step that took `seconds`. `had_neighbour` says that a tower ran beside it."""
        features = np.array(work.features())
        base = float(features @ self._coefficients)
        if had_neighbour:
            self._ratios_with_tower.append(seconds / base)
            return
        kind = 1 if work.num_chunks else 0
        self._num_steps[kind] += 1
        ratio = seconds / base
        self._ratios.append(ratio)
        self.slowness = median(self._ratios)
        largest = max(_LARGEST_SURPRISE, _FIRST_SURPRISE / self._num_steps[kind])
        surprise = _clipped(ratio / self.slowness, largest) / self._mean_surprise
        # Disturbances only make steps longer: without this correction the function would grow as the factor shrinks.
        self._mean_surprise += (
            _clipped(ratio / self.slowness, _LARGEST_SURPRISE) - self._mean_surprise
        ) / _MEMORY_STEPS
        parts = features * self._start / base
        decay = 1 - 1 / _MEMORY_STEPS
        self._moments[kind] *= decay
        self._moments[kind] += np.multiply.outer(parts, parts)
        self._targets[kind] *= decay
        self._targets[kind] += surprise * parts
        for _ in range(len(parts) if self._num_steps[kind] <= _FIRST_STEPS else 1):
            self._next = (self._next + 1) % len(parts)
            self._fit(self._next)

    def _fit(self, i: int) -> None:
        """Set one share to its best value for the present values of the others."""
        moments = self._moments[0, i] + self._moments[1, i]
        target, share = float(self._targets[0, i] + self._targets[1, i]), float(self._shares[i])
        residual = target - float(moments @ self._shares) + _TRUST * (1 - share)
        self._shares[i] = share = max(0.0, share + residual / (float(moments[i]) + _TRUST))
        self._coefficients[i] = float(self._start[i]) * share


class ReadCost:
    """Predicts the time to read cached blocks, from a disk or from another server."""

    def __init__(self) -> None:
        self._s_per_byte = _READ_S_PER_BYTE

    def seconds(self, num_bytes: int) -> float:
        return num_bytes * self._s_per_byte

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from a read."""
        if num_bytes:
            self._s_per_byte += (seconds / num_bytes - self._s_per_byte) / 4

    def doubt(self) -> None:
        """Lower the predicted cost a little: while it is too high nothing is read, so nothing is learned."""
        self._s_per_byte *= _DOUBT


def _clipped(ratio: float, largest: float) -> float:
    return min(max(ratio, 1 / largest), largest)
