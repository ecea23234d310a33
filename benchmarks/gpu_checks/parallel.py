"""Several GPUs that share a model, or have one each: the answers of one, the same bits in two runs, the end of a
worker, times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_collectives import times_us
from gpu_limits import LLAMA_3_1_8B

from gpu_checks.engines import (
    DEVICE,
    HAS_GPU,
    SHAPES,
    Row,
    config_folder,
    drain,
    free_memory,
    make_core,
    prompt_of,
    request,
    timed_run,
)
from gpu_checks.serving import save_tokenizer
from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore

Answers = dict[str, list[tuple[list[int], list[float]]]]  # by request: of each token what its log-probability row has


def parallel(smoke: bool) -> Iterator[Row]:
    """Several workers, with a device each."""
    num_devices = torch.cuda.device_count() if HAS_GPU else 2
    sizes = [size for size in (2, 4, 8) if size <= num_devices]
    if not sizes:
        yield "several GPUs", "", "not checked: there is one"
        return
    config = SHAPES["Llama"]
    vocab, num_out = config["vocab_size"], 8 if smoke else 48
    layouts = [{"tensor_parallel_size": size} for size in sizes] + [{"pipeline_parallel_size": 2}]
    if num_devices >= 4:
        layouts.append({"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    few = {"max_model_len": 512, "max_num_seqs": 16, "num_gpu_blocks_override": 600}

    def answers(core: EngineCore, order: int) -> Answers:
        for i in range(8)[::order]:
            core.add(request(f"{i}", prompt_of(i, 20 + 17 * i, vocab), num_out, logprobs=1))
        entries = {
            key: [e for output in outputs for e in output.logprobs or []] for key, outputs in drain(core).items()
        }
        return {key: [(e.token_ids, e.logprobs) for e in of_one if e is not None] for key, of_one in entries.items()}

    core = make_core(config, DEVICE.type, **few)
    expected = answers(core, 1)
    del core
    free_memory()
    for layout in layouts:
        name = ", ".join(f"-{'tp' if flag.startswith('tensor') else 'pp'} {count}" for flag, count in layout.items())
        found = []
        for order in (1, -1):
            core, worker_group = make_team(config, few | layout)
            found.append(answers(core, order))
            if order == 1:
                worker_group.close()
        yield from _compared(name, found, expected)
        core.add(request("last", prompt_of(1, 20, vocab), 400))
        core.step()
        worker_group.processes[0].kill()
        begun = time.perf_counter()
        try:
            drain(core)
            yield f"{name}: the end of a worker is noticed", "", "NO"
        except (RuntimeError, OSError):
            yield f"{name}: the end of a worker is noticed after", "s", f"{time.perf_counter() - begun:.2f}"
        worker_group.close()
        del core, worker_group
        free_memory()
    for layout in [{"data_parallel_size": 2}, {"data_parallel_size": 2, "tensor_parallel_size": 2}]:
        if layout["data_parallel_size"] * layout.get("tensor_parallel_size", 1) > num_devices:
            continue
        name = "-dp 2, -tp 2" if len(layout) > 1 else "-dp 2"
        with make_engines(config, few | layout) as llm:
            prompts = [prompt_of(i, 20 + 17 * i, vocab) for i in range(8)]
            found = [_answers_of_engines(llm, prompts, num_out, order) for order in (1, -1)]
        yield from _compared(name, found, expected)
    if smoke or not HAS_GPU:
        return
    for size in (1, *sizes):
        with make_engines(LLAMA_3_1_8B, {"max_model_len": 4096, "max_num_seqs": 64, "data_parallel_size": size}) as llm:
            prompts = [prompt_of(i, 512, LLAMA_3_1_8B["vocab_size"]) for i in range(64 * size)]
            begun = time.perf_counter()
            _answers_of_engines(llm, prompts, 64, 1)
            rate = 64 * len(prompts) / (time.perf_counter() - begun)
            yield f"output, -dp {size}, 64 requests of 512 tokens each", "tok/s", f"{rate:.0f}"
    for size in (1, *sizes):
        core, worker_group = make_team(
            LLAMA_3_1_8B, {"max_model_len": 4096, "max_num_seqs": 64, "tensor_parallel_size": size}
        )
        for batch in (1, 64):
            _, step_s = timed_run(core, batch, 512, 64, LLAMA_3_1_8B["vocab_size"])
            yield f"decode step, -tp {size}, {batch} rows", "ms", f"{step_s * 1e3:.2f}"
        if worker_group is not None:
            worker_group.close()
        del core, worker_group
        free_memory()
    for size in sizes:
        for times in times_us(size, 4096):
            for way in ("one", "two", "graph"):
                yield f"sum of {times['rows']} rows of 4096 over {size}, {way}", "us", f"{times[way]:.1f}"


def make_team(config: dict[str, Any], flags: dict[str, Any]) -> tuple[EngineCore, Any]:
    """A core, and its team if there are several workers."""
    core = make_core(config, DEVICE.type, **flags)
    return core, getattr(core.executor, "worker_group", None)


def make_engines(config: dict[str, Any], flags: dict[str, Any]) -> LLM:
    """Engines of processes of their own, or one in this one."""
    folder = config_folder(config)
    save_tokenizer(Path(folder), config["vocab_size"])
    common = {"load_format": "dummy", "seed": 1, "device": DEVICE.type, "enable_prefix_caching": False}
    return LLM(folder, **common | flags)


def _answers_of_engines(llm: LLM, prompts: list[list[int]], num_out: int, order: int) -> Answers:
    """`order` is 1, or -1 for the last prompt first, so that other engines get it."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out, logprobs=1)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts[::order]]
    outputs = llm.generate(asked, params, use_tqdm=False)[::order]
    rows = {f"{i}": output.outputs[0].logprobs or [] for i, output in enumerate(outputs)}
    return {key: [([*row], [one.logprob for one in row.values()]) for row in of_one] for key, of_one in rows.items()}


def _compared(name: str, found: list[Answers], expected: Answers) -> Iterator[Row]:
    """Two runs of several devices, and what one has answered."""
    same = total = 0
    for key, of_one in expected.items():
        pairs = [(a[0][0], b[0][0]) for a, b in zip(found[0][key], of_one, strict=True)]
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += len(pairs)
    yield f"{name}: greedy tokens of one device before a difference", "", f"{same} of {total}"
    yield f"{name}: same bits in two runs, in another order", "", "yes" if found[0] == found[1] else "NO"
