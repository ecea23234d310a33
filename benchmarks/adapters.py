"""What adapters cost: the time of decode steps on the default model, 64 requests at once.

    python benchmarks/adapters.py [--model FILE] [--rank 16] [--adapters 16] [--rounds 12] [--calls]

Compared are a server without LoRA, one with LoRA whose requests are all of the base model, one adapter for all
requests, and many mixed at random. The adapters are random, on all linear layers. The kinds of steps take turns, a few
steps at a time, so that other programs disturb all of them alike; the figures are medians, and ratios of one run.
`--calls` gives what the native calls of a step take by themselves, each the least of its times, which other programs
disturb less still.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest

PROMPT_TOKENS = 32
STEPS_AT_ONCE = 8


def runner_of(llm: LLM) -> Any:
    return llm.core.executor.worker.runner  # type: ignore[union-attr]


def write_adapter(folder: Path, llm: LLM, rank: int, seed: int) -> None:
    """Random factors for every product but the output matrix, small enough to leave answers readable. None for the
    embedding."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for matrix in runner_of(llm).model.matrices:
        for module in matrix.modules:
            if matrix.is_embedding or module.name == "lm_head":
                continue
            name = f"base_model.model.{module.name}"
            a = generator.standard_normal((rank, matrix.num_in)) / matrix.num_in**0.5
            b = generator.standard_normal((module.num_out, rank)) * 0.02
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Load:
    """Requests that decode, of which a few steps are measured now and then."""

    def __init__(self, llm: LLM, adapters: list[LoRARequest | None], num_tokens: int, seed: int) -> None:
        self.llm, self.times = llm, list[float]()
        self.calls: list[tuple[str, float]] = []  # of a step, and the least nanoseconds that each has taken
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        generator = random.Random(seed)
        for adapter in adapters:
            prompt = {"prompt_token_ids": [generator.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]}
            source = None if adapter is None else llm.inputs.find_adapter(adapter)
            llm.core.add(llm.inputs.process(prompt, params, adapter=source))
        self._live = len(adapters)

    def warm_up(self) -> None:
        """Until all prompts are computed."""
        while self.llm.core.scheduler.queues.waiting or (self.llm.core.has_work and self._num_running() < self._live):
            self.llm.core.step()
        for _ in range(4):
            self.llm.core.step()

    def _num_running(self) -> int:
        return sum(seq.num_output_tokens > 0 for seq in self.llm.core.scheduler.queues.running)

    def measure(self) -> None:
        for _ in range(STEPS_AT_ONCE):
            begin = time.perf_counter()
            self.llm.core.step()
            self.times.append(time.perf_counter() - begin)

    def measure_calls(self) -> None:
        """Of the step that was measured last, once more: it writes what it wrote."""
        program = runner_of(self.llm).submitter.captured_steps[0].step.program
        for _ in range(STEPS_AT_ONCE):
            times = program.profile(self._live, self._live, self._live)
            least = [ns for _, ns in self.calls] or [float("inf")] * len(times)
            self.calls = [(name, min(ns, old)) for (name, ns), old in zip(times, least, strict=True)]

    def end(self) -> None:
        for request_id in list(self.llm.core.scheduler.queues.requests):
            self.llm.core.abort(request_id)


def print_calls(loads: dict[str, Load]) -> None:
    base = sum(ns for _, ns in loads["no LoRA"].calls)
    for name, load in loads.items():
        by_kernel = defaultdict[str, float](float)
        for kernel, ns in load.calls:
            by_kernel[kernel] += ns / 1e6
        whole = sum(by_kernel.values())
        parts = ", ".join(f"{kernel} {by_kernel[kernel]:.2f}" for kernel in ("linear", "shrink"))
        print(f"{name:12} {whole:7.2f} ms of calls, {100 * (1e6 * whole / base - 1):+6.1f}%: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", help="the default model without")
    parser.add_argument("--calls", action="store_true", help="times of the native calls by themselves")
    args = parser.parse_args()
    blocks = args.requests * (PROMPT_TOKENS + (args.rounds + 2) * STEPS_AT_ONCE + 64) // 16 + args.requests + 256
    common = {"max_num_seqs": args.requests, "num_gpu_blocks_override": blocks, "disable_log_stats": True}
    if args.model is not None:
        common |= {"model": args.model, "max_model_len": 1024}
    num_tokens = (args.rounds + 2) * STEPS_AT_ONCE + 64

    def with_lora() -> LLM:
        return LLM(enable_lora=True, max_loras=args.adapters, max_lora_rank=args.rank, **common)

    llms = {"no LoRA": LLM(**common), "base only": with_lora(), "one adapter": with_lora(), "mixed": with_lora()}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(i) for i in range(args.adapters)]
        for i, path in enumerate(paths):
            write_adapter(path, llms["base only"], args.rank, i)
        every = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
        mixed = random.Random(0).choices(every, k=args.requests)
        of_kind: dict[str, list[LoRARequest | None]] = {
            "no LoRA": [None] * args.requests, "base only": [None] * args.requests,
            "one adapter": [every[0]] * args.requests, "mixed": [*mixed],
        }  # fmt: skip
        for name in ("one adapter", "mixed"):  # read all from disk
            llms[name].generate(["x"] * len(every), SamplingParams(max_tokens=1), use_tqdm=False, lora_request=every)
        loads = {name: Load(llm, of_kind[name], num_tokens, 0) for name, llm in llms.items()}
        for load in loads.values():
            load.warm_up()
        for _ in range(args.rounds):
            for load in loads.values():
                load.measure()
                if args.calls:
                    load.measure_calls()
    if args.calls:
        print_calls(loads)
        return
    base = statistics.median(loads["no LoRA"].times)
    for name, load in loads.items():
        took = statistics.median(load.times)
        print(f"{name:12} {took * 1e3:7.2f} ms a step, {100 * (took / base - 1):+6.1f}%")


if __name__ == "__main__":
    main()
