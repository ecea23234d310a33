"""Prints what it costs a single worker that its sums are those of several: milliseconds of a step with
--no-reproducible-parallel, with --reproducible-parallel, and their ratio.

    python benchmarks/reproducible_parallel.py [MODEL] [--load-format dummy] [--dtype bfloat16] [--quantization int8]
        [--hf-overrides JSON] [--seconds 2]

Both models are in one process, and take turns; a step is one replay of the recorded program over a filled cache, of as
many sequences at a context of 128, or one prompt of 512 tokens. Each figure is the best of many steps, since other
programs can only make a step slower.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from octavo import _cpu
from octavo.config import EngineArgs
from octavo.execution.executor import LocalExecutor
from octavo.execution.step_arrays import StepShape
from octavo.layers.attention import AttentionDescription
from octavo.step_plan import PlannedRow, StepPlan

BLOCK_SIZE, CONTEXT, PROMPT = 16, 128, 512
ROWS = (1, 16, 64)


class Model:
    """One of the two, with a cache for the largest of the steps."""

    def __init__(self, reproducible: bool, flags: dict[str, Any]) -> None:
        num_blocks = max(ROWS) * CONTEXT // BLOCK_SIZE
        config = EngineArgs(
            **flags, reproducible_parallel=reproducible, max_model_len=PROMPT, max_num_batched_tokens=PROMPT,
            max_num_seqs=max(ROWS), num_gpu_blocks_override=num_blocks, block_size=BLOCK_SIZE, disable_log_stats=True,
        ).create_engine_config()  # fmt: skip
        worker = LocalExecutor(config).worker
        self.runner = worker.runner
        attention = worker.runner.model.description.layers[0].attention  # type: ignore[attr-defined]
        assert isinstance(attention, AttentionDescription)
        self.summands = attention.shard.summands
        for cache in self.runner.submitter.caches:  # a page that was never written is read from one page of zeros
            for part in (cache.key, cache.value):
                part[:] = np.random.default_rng(2).standard_normal(part.shape[1:], np.float32).astype(part.dtype)
        table = self.runner.sequence_table
        blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        each = CONTEXT // BLOCK_SIZE
        table.blocks[0, : max(ROWS), :each] = blocks.reshape(-1, each)
        table.blocks[0, 0, : PROMPT // BLOCK_SIZE] = blocks[: PROMPT // BLOCK_SIZE]
        table.tokens[:] = np.random.default_rng(1).integers(0, 1000, table.tokens.shape)

    def stage(self, rows: int) -> StepShape:
        """Have the step's arrays hold decodes of `rows` sequences, or the prompt for 0."""
        [captured] = self.runner.submitter.captured_steps
        planned = [PlannedRow(row, CONTEXT - 1, 1, 1) for row in range(rows)] or [PlannedRow(0, 0, PROMPT, 1)]
        self.runner.sequence_table.gather(StepPlan(rows=planned), captured.host_arrays[0])
        return StepShape(rows or PROMPT, len(planned), len(planned), 0)

    def step_s(self, shape: StepShape) -> float:
        begin = time.perf_counter()
        self.runner.submitter.captured_steps[0].step.replay(shape)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the default model")
    for name in ("load-format", "dtype", "quantization"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--hf-overrides", type=json.loads, help="settings of the model's configuration")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for one pair of figures")
    args = parser.parse_args()
    flags = {name: value for name, value in vars(args).items() if name != "seconds" and value is not None}
    models = [Model(reproducible, flags) for reproducible in (False, True)]
    print(f"{_cpu.isa()}, {_cpu.num_threads()} threads, sums of {models[1].summands} segments")
    print(f"{'step':>12}{'without, ms':>13}{'with, ms':>10}{'ratio':>8}")
    for rows in (*ROWS, 0):
        shapes = [model.stage(rows) for model in models]
        best = [float("inf")] * 2
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end:
            for i, (model, shape) in enumerate(zip(models, shapes, strict=True)):
                best[i] = min(best[i], model.step_s(shape))
        name = f"{rows} rows" if rows else f"prompt {PROMPT}"
        print(f"{name:>12}{best[0] * 1e3:>13.2f}{best[1] * 1e3:>10.2f}{best[1] / best[0]:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
