"""Draws how long a decode step takes against context length and batch size, between the limits of this machine.

    python benchmarks/step_time.py [--out docs/images] [--seconds 0.6] [--bandwidth-gbs 48] [--int8-gops 930]

The step is the model's: one replay of the recorded program over the default model, its KV cache filled, every row at
the same context. The limits are measured in the same run. *Memory*: the packed weights and the rows' keys and values,
each read once, at the fastest rate at which anything here reads memory. *Compute*: the integer products of the matrices
at the best rate of torch's own int8 product, plus attention at the best of its bfloat16 product. Each figure is the
best of many steps, since other programs can only make a step slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ml_dtypes import bfloat16

from octavo import _cpu
from octavo.bench.plot import BLUE, GREEN, ORANGE, new_figure, save_figure
from octavo.config import EngineArgs
from octavo.execution.executor import LocalExecutor
from octavo.execution.step_arrays import StepShape
from octavo.models.inventory import required_tensors
from octavo.models.registry import describe
from octavo.ops import cpu
from octavo.quantization.stored import StoredWeight
from octavo.step_plan import PlannedRow, StepPlan

CONTEXTS = [128, 256, 512, 1024, 2048, 4096, 8192]
CONTEXT_ROWS = [1, 16]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
BATCH_CONTEXT = 128
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Peaks:
    """What this machine gives at best."""

    bandwidth_gbs: float
    int8_gops: float
    bf16_gflops: float


@dataclass(frozen=True)
class Point:
    """A measured step and its limits, in milliseconds."""

    rows: int
    context: int
    measured_ms: float
    memory_ms: float
    compute_ms: float


def best_s(call: Callable[[], object], seconds: float) -> float:
    """The shortest time of a call, tried for that long."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def measure_peaks(seconds: float) -> Peaks:
    threads = _cpu.num_threads()
    numbers = np.ones(1 << 25)  # 256 MiB: no cache holds it
    parts = np.array_split(numbers, threads)
    with ThreadPoolExecutor(threads) as pool:
        sum_s = best_s(lambda: list(pool.map(np.sum, parts)), seconds)
    random = np.random.default_rng(0)
    matrices = [random.standard_normal((49152, 576), np.float32).astype(bfloat16) for _ in range(3)]
    weights = [cpu.pack_linear([StoredWeight("BF16", {"data": matrix}, matrix.shape)]) for matrix in matrices]
    row, turn = random.standard_normal((1, 576), np.float32).astype(bfloat16), iter(range(1 << 30))
    product_s = best_s(lambda: cpu.linear(row, weights[next(turn) % 3]), seconds)
    int8_gops, bf16_gflops = 0.0, 0.0
    for n in (512, 1024, 2048):
        codes = torch.randint(-100, 100, (n, n), dtype=torch.int8)
        floats = codes.bfloat16()
        int8_s = best_s(lambda codes=codes: torch._int_mm(codes, codes), seconds / 2)
        bf16_s = best_s(lambda floats=floats: floats @ floats, seconds / 2)
        int8_gops = max(int8_gops, 2e-9 * n**3 / int8_s)
        bf16_gflops = max(bf16_gflops, 2e-9 * n**3 / bf16_s)
    bandwidth = max(numbers.nbytes / sum_s, weights[0].num_bytes / product_s) / 1e9
    return Peaks(bandwidth, int8_gops, bf16_gflops)


class Model:
    """The default model with a cache for the largest of the steps."""

    def __init__(self) -> None:
        most_tokens = max(max(CONTEXTS) * max(CONTEXT_ROWS), max(BATCHES) * BATCH_CONTEXT)
        num_blocks = most_tokens // BLOCK_SIZE
        config = EngineArgs(
            max_model_len=max(CONTEXTS),
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK_SIZE,
            disable_log_stats=True,
        ).create_engine_config()
        self.description = describe(config.model.checkpoint.config)
        tensors = required_tensors(self.description)
        self.num_parameters = sum(prod(tensor.shape) for tensor in tensors if tensor.is_matrix)
        executor = LocalExecutor(config)
        self.weight_bytes, self.cache_bytes = executor.weight_bytes, executor.cache_bytes
        self.token_bytes = executor.cache_bytes // most_tokens
        self.runner = executor.worker.runner
        self.blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        for cache in self.runner.submitter.caches:  # a page that was never written is read from one page of zeros
            for part in (cache.key, cache.value):
                part[:] = np.random.default_rng(2).standard_normal(part.shape[1:], np.float32).astype(part.dtype)
        table = self.runner.sequence_table
        table.tokens[:] = np.random.default_rng(1).integers(0, self.description.vocab_size, table.tokens.shape)

    def measure(self, rows: int, context: int, peaks: Peaks, seconds: float) -> Point:
        per_row = -(-context // BLOCK_SIZE)
        table = self.runner.sequence_table
        table.blocks[0, :rows, :per_row] = self.blocks[: rows * per_row].reshape(rows, per_row)
        [captured] = self.runner.submitter.captured_steps
        table.gather(
            StepPlan(rows=[PlannedRow(row, context - 1, 1, 1) for row in range(rows)]), captured.host_arrays[0]
        )
        measured_s = best_s(lambda: captured.step.replay(StepShape(rows, rows, rows, 0)), seconds)
        num_bytes = self.weight_bytes + rows * context * self.token_bytes
        int8_ops = 2 * rows * self.num_parameters
        heads = sum(layer.attention.num_heads * layer.attention.head_size for layer in self.description.layers)
        attention_flops = 4 * rows * context * heads
        compute_s = int8_ops / peaks.int8_gops / 1e9 + attention_flops / peaks.bf16_gflops / 1e9
        return Point(rows, context, measured_s * 1e3, num_bytes / peaks.bandwidth_gbs / 1e6, compute_s * 1e3)


def draw(panels: list[tuple[str, str, list[int], list[Point]]], title: str, file: Path) -> None:
    """Panels of (title, what x is, its values, points) side by side, as SVG."""
    figure, axes = new_figure(len(panels), sharey=True)
    for axis, (name, x_label, xs, points) in zip(axes, panels, strict=True):
        axis.plot(xs, [p.memory_ms for p in points], color=ORANGE, linestyle="--", label="memory limit")
        axis.plot(xs, [p.compute_ms for p in points], color=GREEN, linestyle=":", label="compute limit")
        axis.plot(xs, [p.measured_ms for p in points], color=BLUE, marker="o", markersize=4, label="measured")
        axis.set(xscale="log", yscale="log", xlabel=x_label, title=name)
        axis.set_xticks(xs, [f"{x // 1024}k" if x >= 1024 else str(x) for x in xs])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[0].set_ylabel("milliseconds a step")
    axes[0].legend(frameon=False, loc="upper left")
    save_figure(figure, file, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the SVG files")
    parser.add_argument("--seconds", type=float, default=0.6, help="time for one figure")
    parser.add_argument("--bandwidth-gbs", type=float, help="memory reads, instead of measuring them")
    parser.add_argument("--int8-gops", type=float, help="int8 operations, instead of measuring them")
    args = parser.parse_args()
    measured = measure_peaks(args.seconds)
    peaks = Peaks(
        args.bandwidth_gbs or measured.bandwidth_gbs, args.int8_gops or measured.int8_gops, measured.bf16_gflops
    )
    print(f"{_cpu.isa()}, {_cpu.num_threads()} threads; {peaks}", flush=True)
    model = Model()
    print(f"{model.weight_bytes / 1e6:.0f} MB of packed weights, {model.token_bytes} bytes a cached token")
    print(f"{'rows':>5}{'context':>9}{'ms':>9}{'memory':>9}{'compute':>9}{'of limit':>9}")

    def measure(rows: int, context: int) -> Point:
        point = model.measure(rows, context, peaks, args.seconds)
        share = max(point.memory_ms, point.compute_ms) / point.measured_ms
        times: list[Any] = [point.measured_ms, point.memory_ms, point.compute_ms]
        print(f"{rows:>5}{context:>9}" + "".join(f"{ms:>9.2f}" for ms in times) + f"{share:>9.0%}", flush=True)
        return point

    by_context = {rows: [measure(rows, context) for context in CONTEXTS] for rows in CONTEXT_ROWS}
    by_batch = [measure(rows, BATCH_CONTEXT) for rows in BATCHES]
    limits = f"{peaks.bandwidth_gbs:.0f} GB/s, {peaks.int8_gops:.0f} int8 Gop/s"
    about = f"SmolLM2-135M-Instruct Q4_1, {_cpu.num_threads()} threads ({limits})"
    draw(
        [
            (f"{rows} sequence{'s' * (rows > 1)}", "context, tokens", CONTEXTS, points)
            for rows, points in by_context.items()
        ],
        f"Decode step against context\n{about}",
        args.out / "step_time_context.svg",
    )
    draw(
        [(f"context {BATCH_CONTEXT}", "sequences in the step", BATCHES, by_batch)],
        f"Decode step against batch size\n{about}",
        args.out / "step_time_batch.svg",
    )


if __name__ == "__main__":
    main()
