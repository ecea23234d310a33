"""Prints what everything around the model costs: microseconds of a decode step by part, at several numbers of streams.

    python benchmarks/step_overhead.py [--streams 1,16,64,256] [--steps 200] [--weights-mb 80] [--sampled] [--profile]
    python benchmarks/step_overhead.py --prompt-len 128000    # what the admission of a long prompt costs instead

Scheduler, tables, sampler, wire and detokenizer are the engine's own; only the model computes nothing and the choice of
a token is read off a text. Each figure is the median over the steps. `core` adds up what a step waits for in a server,
`LLM` what it waits for in `LLM.generate`; `front end` runs beside the next step, in the server's own process.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.wire import StepOutputs as CoreOutputs
from octavo.engine.wire import decode_core_message, decode_frontend_message, encode_message
from octavo.entrypoints.http.streaming import ChunkWriter
from octavo.entrypoints.openai.completions import CompletionJob
from octavo.execution.block_mover import BlockMover
from octavo.execution.cpu_device import CpuDevice
from octavo.execution.device import ModelOutputs, StepModel
from octavo.execution.executor import PendingStep
from octavo.execution.runner import Runner
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.step_arrays import StepArrays, StepShape
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.loading.tokenizer import load_tokenizer
from octavo.metrics.prometheus import EngineMetrics
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.step_plan import StepPlan

TEXT = """Once upon a time a printer folded one large sheet three times, cut its edges, and had eight leaves: an octavo.
The reader of 1532 could carry it under his arm — unlike the great folios of the cathedral, it was "portable". Prices
fell from 12 to 3 shillings; naïve buyers, façades of learning and all, asked for more. `for page in book: read()`"""


class Parts:
    """Times of the parts of a step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        times = self.seconds.setdefault(name, [])

        def run(*args: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **more)
            times.append(time.perf_counter() - begin)
            return result

        return run

    def median_us(self, name: str) -> float:
        return 1e6 * statistics.median(self.seconds[name])


class ReadOps:
    """The operations of the sampler; every sequence reads the same text, from a place of its own."""

    def __init__(self, token_ids: list[int], max_num_seqs: int) -> None:
        places = np.arange(len(token_ids))[:, None] + 7 * np.arange(max_num_seqs)
        self._steps = itertools.cycle(np.array(token_ids, np.int64)[places % len(token_ids)])

    def argmax(self, logits: Any) -> Any:
        return next(self._steps)[: len(logits)]

    def sample(self, logits: Any, *settings: Any) -> Any:
        return self.argmax(logits)


class NoModel(CpuDevice):
    """A device whose captured step computes nothing.

    It reads as many bytes as a model has weights, so that Python finds its own things as little in the caches as it
    does between two real steps: they take several times as long then.
    """

    def __init__(self, ops: ReadOps, vocab_size: int, max_num_seqs: int, num_weight_bytes: int) -> None:
        super().__init__()
        self._ops = ops
        self._weights = np.ones(num_weight_bytes // 8)
        logits = np.zeros((max_num_seqs, vocab_size), np.float32)
        self.outputs = ModelOutputs(logits, logits, logits, ops.argmax(logits))

    def capture(self, model: StepModel, inputs: StepArrays[Any]) -> Any:
        return self

    def replay(self, used: StepShape) -> None:
        self._weights.sum()
        self.outputs = replace(self.outputs, argmax_tokens=self._ops.argmax(self.outputs.logits))


class NoModelExecutor:
    """An executor with the runner, the tables and the sampler of the engine, and logits in which nothing is special."""

    runs_ahead, num_stages = False, 1
    weight_bytes, cache_bytes = 80_000_000, 0  # for the cost model of steps

    def __init__(self, config: EngineConfig, token_ids: list[int], num_weight_bytes: int = 0) -> None:
        limits, max_model_len, block_size = config.scheduler, config.model.max_model_len, config.cache.block_size
        self.cache_groups = group_layers([LayerCacheSpec("full", 1, 16, 16)])
        self.num_blocks = [limits.max_num_seqs * -(-max_model_len // block_size)]
        self.num_host_blocks = [0]
        ops: Any = ReadOps(token_ids, limits.max_num_seqs)
        model: Any = SimpleNamespace(vocab_size=config.model.vocab_size)
        self.device = NoModel(ops, config.model.vocab_size, limits.max_num_seqs, num_weight_bytes)
        table = SequenceTable(limits.max_num_seqs, max_model_len, block_size, self.cache_groups)
        self.runner = Runner(model, ops, self.device, table, limits.max_num_batched_tokens)
        self.runner.use_caches([], BlockMover(ops, self.device, [[]], [0]))
        self.runner.submitter.capture()

    def submit(self, plan: StepPlan) -> PendingStep:
        return self.runner.submit(plan)


def bench(num_streams: int, num_steps: int, num_weight_bytes: int, sampled: bool, profile: bool) -> dict[str, float]:
    """Microseconds by part."""
    args = EngineArgs(
        max_model_len=2048,
        max_num_seqs=max(num_streams, 1),
        enable_prefix_caching=True,
        speculative_config={"method": "none"},  # a step has one row for each stream
    )
    config = args.create_engine_config()
    tokenizer = load_tokenizer(config.model.checkpoint)
    text = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    executor = NoModelExecutor(config, text, num_weight_bytes)
    whole: Any = executor
    core = EngineCore(config, whole)
    inputs = InputProcessor(config, tokenizer)
    metrics = EngineMetrics("bench", config.model.max_model_len)
    outputs = OutputProcessor(tokenizer, metrics)
    outputs_of_llm = OutputProcessor(tokenizer)
    params = SamplingParams(
        max_tokens=1500,
        ignore_eos=True,
        temperature=0.7 if sampled else 0.0,
        top_p=0.9 if sampled else 1.0,
        output_kind=RequestOutputKind.DELTA,
    )
    about = {"id": "cmpl-0", "created": 0, "model": "bench", "system_fingerprint": "fp"}
    writer = ChunkWriter("text_completion", about, CompletionJob.text_field, wants_usage=False)
    for i in range(num_streams):
        request = inputs.process({"prompt_token_ids": [i + 1, *text[:40]]}, params)
        core.add(request)
        outputs.add(request)
        of_llm = msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs_of_llm.add(msgspec.structs.replace(request, params=of_llm))

    def write(results: list[Any]) -> list[bytes]:
        return [writer.text(completion.index, completion.text) for result in results for completion in result.outputs]

    def step() -> None:
        made: CoreOutputs = core.step()
        data = encode(made)
        received = decode(data)
        outputs_of_llm.process(made.outputs)
        results, _ = process(received.outputs)
        write_chunks(results)
        metrics.record_step(received.stats)

    parts = Parts()
    encode, decode = parts.timed("encode", encode_message), parts.timed("decode", decode_core_message)
    process, write_chunks = parts.timed("text", outputs.process), parts.timed("chunks", write)
    while core.scheduler.take_stats().num_running < num_streams:  # prompts
        outputs_of_llm.process(core.step().outputs)
    for _ in range(20):
        step()
    scheduler: Any = core.scheduler
    runner: Any = executor.runner
    device: Any = executor.device
    whole = core
    scheduler.schedule = parts.timed("schedule", scheduler.schedule)
    runner.submit = parts.timed("submit", runner.submit)
    runner.collect = parts.timed("collect", runner.collect)
    device.replay = parts.timed("compute", device.replay)
    scheduler.apply_result = parts.timed("update", scheduler.apply_result)
    scheduler.take_stats = parts.timed("stats", scheduler.take_stats)
    whole.step = parts.timed("step", core.step)
    outputs_of_llm.process = parts.timed("LLM_text", outputs_of_llm.process)  # type: ignore[method-assign]
    for times in parts.seconds.values():
        times.clear()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    for _ in range(num_steps):
        step()
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    found = {name: parts.median_us(name) for name in parts.seconds}
    step_us = found["step"] - found["compute"]
    found["submit"] -= found["compute"]
    found["core"] = step_us + found["encode"]
    found["LLM"] = step_us + found["LLM_text"]
    found["front_end"] = found["decode"] + found["text"] + found["chunks"]
    return found


def bench_admission(prompt_len: int, num_requests: int = 7) -> dict[str, float]:
    """Milliseconds of the front end (`process`, `encode`), of the core between steps (`decode`, `add`), and of steps:
    the first of a prompt, and one in which a prompt that has its prefix in the cache waits for room."""
    args = EngineArgs(max_model_len=prompt_len + 64, max_num_seqs=2, enable_prefix_caching=True)
    args.hf_overrides = {"max_position_embeddings": prompt_len + 64}
    config = args.create_engine_config()
    tokenizer = load_tokenizer(config.model.checkpoint)
    inputs = InputProcessor(config, tokenizer)
    whole: Any = NoModelExecutor(config, list(range(2, 50)))
    whole.num_blocks = [whole.num_blocks[0] * 3 // 4]  # one prompt, and half of another
    core = EngineCore(config, whole)
    parts = Parts()
    parts_of = {"process": inputs.process, "encode": encode_message, "decode": decode_frontend_message}
    process, encode, decode = (parts.timed(name, function) for name, function in parts_of.items())
    add, first_step = parts.timed("add", core.add), parts.timed("first_step", core.step)
    tokens = np.random.default_rng(0).integers(3, config.model.vocab_size, (num_requests, prompt_len)).tolist()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for ids in tokens:
        request = decode(encode(process({"prompt_token_ids": ids}, params)))
        add(request)
        first_step()
        while core.scheduler.has_work:
            core.step()
    # A prompt that runs leaves the beginning of the last one in the cache, and too little room for the rest.
    core.add(inputs.process({"prompt_token_ids": tokens[0]}, SamplingParams(max_tokens=60, ignore_eos=True)))
    while not core.step().outputs:
        pass
    core.add(inputs.process({"prompt_token_ids": tokens[-1]}, params))
    core.step()  # hashes
    waiting_step = parts.timed("waiting_step", core.step)
    for _ in range(num_requests):
        waiting_step()
    return {name: parts.median_us(name) / 1000 for name in parts.seconds}


CORE = ("schedule", "submit", "collect", "update", "stats", "encode", "core")
COLUMNS = (*CORE, "LLM_text", "LLM", "decode", "text", "chunks", "front_end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--weights-mb", type=float, default=80, help="read in each step; 0 leaves the caches alone")
    parser.add_argument("--sampled", action="store_true", help="temperature and top_p instead of greedy")
    parser.add_argument("--profile", action="store_true", help="print where Python spends the time of each run")
    parser.add_argument("--prompt-len", type=int, help="time the admission of prompts of so many tokens, not steps")
    args = parser.parse_args()
    if args.prompt_len:
        for name, ms in bench_admission(args.prompt_len).items():
            print(f"{name:>12} {ms:8.2f} ms", flush=True)
        return
    print(f"{'streams':>7}" + "".join(f"{name:>10}" for name in COLUMNS) + "   (microseconds a step)")
    for streams in map(int, args.streams.split(",")):
        found = bench(streams, args.steps, round(args.weights_mb * 1e6), args.sampled, args.profile)
        print(f"{streams:>7}" + "".join(f"{found[name]:>10.1f}" for name in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
