"""Measures what a model's steps cost on this machine's processors: a part of the model runs a few steps, and the
engine's own cost model is fitted to their times.

The part has enough of the model's first layers to exceed the processors' caches, and at most 64 MiB of the output
matrix. Its times are scaled up to the whole model. Its weights are random, in the model's formats. A captured step of
the engine's own runner computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np

from octavo.config import EngineConfig
from octavo.execution.block_mover import BlockMover, layer_cache
from octavo.execution.cpu_device import CpuDevice
from octavo.execution.runner import Runner
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.step_arrays import StepShape
from octavo.kv_cache.groups import group_layers
from octavo.loading.weights import Weights
from octavo.models.description import ModelDescription
from octavo.models.registry import build
from octavo.ops import LayerKVCache, load
from octavo.planning.weight_formats import packed_weight_bytes
from octavo.step_cost import StepCostModel, StepWork
from octavo.step_plan import PlannedRow, StepPlan

_LEAST_BYTES = 192 << 20  # of the part's layers, if the model has as many: exceeds most caches
_MOST_VOCABULARY_BYTES = 64 << 20  # of the part's output matrix
_MOST_TOKENS = 512  # in a step
_MOST_ROWS = 32
_PASSES = 3  # over all steps, so that a busy neighbour disturbs no step every time
_TRIES_S = 0.03  # for each step in a pass
_FITS = 40  # observations of each step
# Time around a step in the engine's core, as `benchmarks/step_overhead.py` measured it on Zen 4: 483 us at 1 stream,
# 1,676 us at 256.
_HOST_STEP_S, _HOST_ROW_S = 0.48e-3, 4.7e-6
# Measured steps: number of rows, tokens that each row has computed before, tokens that each row computes in the step.
_STEPS = (
    (1, 127, 1), (1, 1023, 1), (4, 255, 1), (16, 255, 1), (32, 127, 1), (1, 0, 64), (1, 0, 256), (1, 512, 256),
    (1, 0, 512),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that was measured with the part, and its time scaled to the whole model."""

    work: StepWork
    seconds: float


def measure_steps(config: EngineConfig, description: ModelDescription, weights: Weights, dtype: str) -> StepCostModel:
    """Return the cost model of the model's steps on this machine's processors. `weights` are random
    (`octavo.planning.weight_formats`). Takes a second or two, longer for models with large layers."""
    part, layer_scale, vocabulary_scale = _part_of(description, weights, dtype)
    runner = _runner(config, part, weights, dtype)
    steps = [step for step in _STEPS if step[1] + step[2] <= config.model.max_model_len]
    is_alike = layer_scale == vocabulary_scale
    times_s: dict[tuple[int, int, int, int], list[float]] = defaultdict(list)
    for _ in range(_PASSES):
        for step in steps:
            for num_samples in (step[0],) if is_alike else (step[0], 0):
                times_s[*step, num_samples] += _times_s(runner, *step, num_samples)
    measured = []
    for num_rows, num_computed, num_tokens in steps:
        part_s = median(times_s[num_rows, num_computed, num_tokens, num_rows])
        seconds = layer_scale * part_s
        if not is_alike:
            without_s = median(times_s[num_rows, num_computed, num_tokens, 0])
            seconds += (vocabulary_scale - layer_scale) * max(0.0, part_s - without_s)
        work = StepWork.of([(0, num_computed, num_tokens, 1, 1, ())] * num_rows)
        measured.append(MeasuredStep(work, seconds + _HOST_STEP_S + _HOST_ROW_S * num_rows))
    return fitted(measured)


def fitted(steps: Sequence[MeasuredStep]) -> StepCostModel:
    """Return the cost model that many observations of these steps lead to."""
    single = steps[0].seconds
    by_token = min(step.seconds / step.work.num_tokens for step in steps)
    # Costs that the steps cannot tell apart keep these proportions.
    model = StepCostModel(
        (single * 0.8, single * 0.2, by_token, by_token, by_token / 8, by_token / 4, single / 1e5, by_token / 1e4)
    )
    for _ in range(_FITS):
        for step in steps:
            model.observe(step.work, step.seconds)
    return model


def _part_of(description: ModelDescription, weights: Weights, dtype: str) -> tuple[ModelDescription, float, float]:
    """Return the part, the ratio of the model's layers to the part's in bytes, and the ratio of their vocabularies."""
    vocabulary_bytes = 2 * description.vocab_size * description.hidden_size
    vocabulary_scale = max(1.0, vocabulary_bytes / _MOST_VOCABULARY_BYTES)
    num_tokens = int(description.vocab_size / vocabulary_scale)

    def with_layers(count: int) -> ModelDescription:
        return replace(description, layers=description.layers[:count], vocab_size=num_tokens)

    def num_bytes(count: int) -> int:
        return packed_weight_bytes(with_layers(count), weights, dtype, with_repeated=True)[0]

    none, all_layers, total = num_bytes(0), len(description.layers), num_bytes(len(description.layers))
    of_layers = total - none
    count = min(all_layers, max(1, -(-_LEAST_BYTES * all_layers // max(1, of_layers))))
    return with_layers(count), of_layers / (num_bytes(count) - none), description.vocab_size / num_tokens


def _runner(config: EngineConfig, description: ModelDescription, weights: Weights, dtype: str) -> Runner:
    """Return a runner of the part, with a captured step and a cache whose pages have been written."""
    ops, device = load(config.cpu_threads, config.cpus), CpuDevice()
    block_size = config.cache.block_size
    longest = min(config.model.max_model_len, max(computed + tokens for _, computed, tokens in _STEPS) + block_size)
    model = build(description, weights, ops, longest, dtype)
    groups = group_layers(model.layer_caches)
    table = SequenceTable(_MOST_ROWS, longest, block_size, groups)
    num_blocks = 1 + max(-(-rows * (computed + tokens) // block_size) + rows for rows, computed, tokens in _STEPS)
    runner = Runner(model, ops, device, table, _MOST_TOKENS)
    caches = [layer_cache(config.cache, device, ops, spec, num_blocks) for spec in model.layer_caches]
    for cache in caches:
        _write(cache)
    runner.use_caches(caches, BlockMover(ops, device, [caches], [0]))
    random = np.random.default_rng(1)
    table.tokens[:] = random.integers(0, description.vocab_size, table.tokens.shape)
    runner.submitter.capture()
    return runner


def _write(cache: LayerKVCache) -> None:
    """Write the cache's pages. Reads of unwritten pages would all come from a single page of zeros."""
    for part in cache.arrays:
        part.view(np.uint8)[...] = 0


def _times_s(runner: Runner, num_rows: int, num_computed: int, num_tokens: int, num_samples: int) -> list[float]:
    """Return the times of a step, repeated for `_TRIES_S`, in seconds."""
    table, [captured] = runner.sequence_table, runner.submitter.captured_steps
    per_row = -(-(num_computed + num_tokens) // table.block_size)
    order = np.random.default_rng(2).permutation(num_rows * per_row).astype(np.int32) + 1
    table.blocks[:, :num_rows, :per_row] = order.reshape(num_rows, per_row)
    rows = [PlannedRow(row, num_computed, num_tokens, 1) for row in range(num_rows)]
    table.gather(StepPlan(rows=rows), captured.host_arrays[0])
    shape = StepShape(num_rows * num_tokens, num_rows, num_samples, 0)
    captured.step.replay(shape)
    times_s: list[float] = []
    end = perf_counter() + _TRIES_S
    while not times_s or perf_counter() < end:
        begin = perf_counter()
        captured.step.replay(shape)
        times_s.append(perf_counter() - begin)
    return times_s
