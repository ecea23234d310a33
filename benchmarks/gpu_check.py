"""Everything about the GPU backend that only a GPU can tell: `scripts/gpu-check` prepares what this needs and runs it.

    python benchmarks/gpu_check.py [PART ...] [--results FOLDER] [--limit-s 450] [--smoke]

Parts, each of which takes less than eight minutes on a machine that has never compiled a kernel: `kernels` (their tests
on the device, and a request's bits alone, among others, in chunks, preempted), `parity` (answers of a GPU and of the
CPU on the same random weights, for every family), `pooling` (the same of models that pool, and texts a second),
`parallel` (several GPUs, where there are some: the answers of one,
the same bits in two runs, the end of a worker, steps and exchanges), `model` (an 8B-shaped model: decode, prefill,
where a step's time goes), `adapters` (what they add to such a model's steps), `transformers` (the same work on the same
device), `start` (with an empty cache of kernels, and again), `serve` (over HTTP, by `octavo bench serve`).

Each part is a process of its own. What it finds is in FOLDER/PART.json as soon as it is found, what it prints in
FOLDER/PART.log, and FOLDER/page.md has predictions, measurements and their ratios of all parts so far: parts may be run
one by one, again, or not at all. Compiled kernels are shared through FOLDER/triton, unless TRITON_CACHE_DIR is set.
FOLDER is $OUT, if that is set. `--smoke` runs all of it in minutes on any machine, on a tiny model and the CPU where
there is no GPU: the figures mean nothing then, but the check itself is seen to work.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any
from xml.etree import ElementTree

import gpu_pooling
import torch
from gpu_collectives import times_us
from gpu_limits import LLAMA_3_1_8B, Limits
from gpu_limits import rows as predicted_rows

from octavo.config import EngineArgs
from octavo.engine.core import EngineCore
from octavo.models.registry import describe
from octavo.ops.triton.schedule import MACHINES
from octavo.request import AdapterSource, EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import SamplingParams

Row = tuple[str, str, str]  # what, unit, measured

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PARTS = ("kernels", "parity", "pooling", "parallel", "model", "adapters", "transformers", "start", "serve")
EOS = 2
COPY, PRODUCT = "copy, read and written", "bfloat16 product, 8192 cubed"

_SMALL: dict[str, Any] = {
    "vocab_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": EOS,
    "dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
# The shapes of families: grouped heads; biases on query, key and value, or norms; few heads of 256.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": _SMALL | {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "Qwen2": _SMALL | {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 2432, "head_dim": 64,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "Qwen3": _SMALL | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 512, "intermediate_size": 1536, "head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "Gemma (heads of 256)": _SMALL | {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256,
        "num_attention_heads": 4, "num_key_value_heads": 1,
    },
}  # fmt: skip


def config_folder(config: dict[str, Any]) -> str:
    """A folder with this config.json. Dummy weights need nothing else."""
    folder = tempfile.mkdtemp(prefix="octavo-gpu-check-")
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def make_core(config: dict[str, Any], device: str, **flags: Any) -> EngineCore:
    args = {"load_format": "dummy", "seed": 1, "device": device, "enable_prefix_caching": False} | flags
    folder = config_folder(config)
    return EngineCore(EngineArgs(model=folder, tokenizer=folder, **args).create_engine_config())


def request(
    name: str, prompt: list[int], num_out: int, adapter: AdapterSource | None = None, **params: Any
) -> EngineRequest:
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_out} | params
    asked = Prompt(prompt, adapter=None if adapter is None else adapter.identity)
    return EngineRequest(name, asked, SamplingParams(**settings), [EOS], num_out, time.monotonic(), adapter=adapter)


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def drain(core: EngineCore) -> dict[str, list[SequenceOutput]]:
    found: dict[str, list[SequenceOutput]] = {}
    while core.has_work:
        for output in core.step().outputs:
            if output.error:
                raise RuntimeError(output.error)
            found.setdefault(output.request_id, []).append(output)
    return found


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def free_memory() -> None:
    gc.collect()
    if HAS_GPU:
        torch.cuda.empty_cache()


# --- Parts -----------------------------------------------------------------------------------------------------------


def kernels(smoke: bool) -> Iterator[Row]:
    folder = "tests/ops/triton"
    # On this all promises of equal bits rest: it is told first.
    yield from _tests("rows do not depend on the others", [f"{folder}/test_linear.py", "-k", "test_rows_do_not_depend"])
    yield from invariance(smoke)
    # What compiles for GPUs that are not there says nothing of this one.
    others = ("test_compile.py", "test_reachable.py")
    chosen = [folder, *(f"--ignore={folder}/{name}" for name in others)]
    chosen += ["-k", "rms_norm or take_rows"] if smoke else []
    if importlib.util.find_spec("xdist") is not None and not smoke:
        chosen += ["-n", str(min(8, os.cpu_count() or 1))]  # compiling takes most of the time
    yield from _tests("kernel tests on the device", chosen)


def _tests(what: str, arguments: list[str]) -> Iterator[Row]:
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "--long", "--timeout", "300", "-p", "no:cacheprovider"]
        subprocess.run([*command, f"--junitxml={report.name}", *arguments], check=False)
        counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        with suppress(ElementTree.ParseError):
            for suite in ElementTree.parse(report.name).iter("testsuite"):
                counts = {key: count + int(suite.get(key, 0)) for key, count in counts.items()}
    yield what, "", ", ".join(f"{count} {key}" for key, count in counts.items())


def parity(smoke: bool) -> Iterator[Row]:
    """Greedy tokens and the log-probabilities of the prompt, against the CPU's kernels."""
    from tests.models.small_experts import ALL_MODELS

    small = {
        name: model.config().to_dict() | {"architectures": [model.architecture], "dtype": "bfloat16"}
        for name, model in ALL_MODELS.items()
        if name != "phi3"  # its heads of 12 elements are not built for GPUs
    }
    for name, config in list((SHAPES | small).items())[: 1 if smoke else None]:
        answers = {}
        for device in ("cpu", DEVICE.type):
            core = make_core(config, device, num_gpu_blocks_override=600, max_model_len=256, max_num_seqs=16)
            print(f"{name} on {device}: {core.executor.startup}", flush=True)
            for i in range(8):
                prompt = prompt_of(i, 20 + 17 * i, config["vocab_size"])
                core.add(request(f"{i}", prompt, 24, prompt_logprobs=0, logprobs=0))
            answers[device] = drain(core)
            del core
            free_memory()
        same = total = 0
        worst = 0.0
        for key, expected in answers["cpu"].items():
            actual = answers[DEVICE.type][key]
            # After the first token that differs the two go on with different texts.
            pairs = list(zip(tokens_of(actual), tokens_of(expected), strict=True))
            until = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            same, total = same + until, total + len(pairs)
            for a, b in zip(actual[0].prompt_logprobs or [], expected[0].prompt_logprobs or [], strict=True):
                worst = max(worst, abs(a.logprobs[0] - b.logprobs[0]))
        yield f"parity, {name}: log-probabilities of prompts differ by at most", "", f"{worst:.4f}"
        yield f"parity, {name}: greedy tokens before a difference", "", f"{same} of {total}"


def pooling(smoke: bool) -> Iterator[Row]:
    """Vectors, their bits and how fast they are."""
    yield from gpu_pooling.rows(smoke, DEVICE.type)


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

    def answers(core: EngineCore, order: int) -> dict[str, list[tuple[list[int], list[float]]]]:
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
            core, team = make_team(config, few | layout)
            found.append(answers(core, order))
            if order == 1:
                team.close()
        same = total = 0
        for key, of_one in expected.items():
            pairs = [(a[0][0], b[0][0]) for a, b in zip(found[0][key], of_one, strict=True)]
            same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            total += len(pairs)
        yield f"{name}: greedy tokens of one device before a difference", "", f"{same} of {total}"
        yield f"{name}: same bits in two runs, in another order", "", "yes" if found[0] == found[1] else "NO"
        core.add(request("last", prompt_of(1, 20, vocab), 400))
        core.step()
        team.processes[0].kill()
        begun = time.perf_counter()
        try:
            drain(core)
            yield f"{name}: the end of a worker is noticed", "", "NO"
        except (RuntimeError, OSError):
            yield f"{name}: the end of a worker is noticed after", "s", f"{time.perf_counter() - begun:.2f}"
        team.close()
        del core, team
        free_memory()
    if smoke or not HAS_GPU:
        return
    for size in (1, *sizes):
        core, team = make_team(LLAMA_3_1_8B, {"max_model_len": 4096, "max_num_seqs": 64, "tensor_parallel_size": size})
        for batch in (1, 64):
            _, step_s = timed_run(core, batch, 512, 64, LLAMA_3_1_8B["vocab_size"])
            yield f"decode step, -tp {size}, {batch} rows", "ms", f"{step_s * 1e3:.2f}"
        if team is not None:
            team.close()
        del core, team
        free_memory()
    for size in sizes:
        for times in times_us(size, 4096):
            for way in ("one", "two", "graph"):
                yield f"sum of {times['rows']} rows of 4096 over {size}, {way}", "us", f"{times[way]:.1f}"


def make_team(config: dict[str, Any], flags: dict[str, Any]) -> tuple[EngineCore, Any]:
    """A core, and its team if there are several workers."""
    core = make_core(config, DEVICE.type, **flags)
    return core, getattr(core.executor, "team", None)


def invariance(smoke: bool) -> Iterator[Row]:
    """One request's tokens and log-probabilities, whatever is computed beside it and however it is cut up."""
    config = SHAPES["Llama"]
    vocab = config["vocab_size"]
    num_others, num_out = (5, 8) if smoke else (120, 48)
    probe = prompt_of(99, 150, vocab)

    def run(others: int, **flags: Any) -> list[tuple[list[int], list[float]]]:
        core = make_core(config, DEVICE.type, max_model_len=512, **({"max_num_seqs": 128} | flags))
        for i in range(others // 2):
            core.add(request(f"a{i}", prompt_of(i, 5 + 3 * i % 300, vocab), num_out))
        core.add(request("probe", probe, num_out, logprobs=2))
        for i in range(others - others // 2):
            core.add(request(f"b{i}", prompt_of(1000 + i, 7 + 5 * i % 300, vocab), num_out))
        outputs = drain(core)["probe"]
        del core
        free_memory()
        return [(entry.token_ids, entry.logprobs) for output in outputs for entry in output.logprobs or []]

    blocks = 4 * (num_others + 1) if smoke else 1400
    alone = run(0, num_gpu_blocks_override=4096)
    few: dict[str, Any] = {"num_gpu_blocks_override": max(blocks, 32)}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "among others": (num_others, {"num_gpu_blocks_override": 4096}),
        "in chunks": (3, {"num_gpu_blocks_override": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 8}),
        "call by call": (1, {"num_gpu_blocks_override": 4096, "enforce_eager": True}),
        "preempted": (num_others, few),
        "swapped": (num_others, few | {"preemption_mode": "swap", "swap_space": 1.0}),
    }
    for name, (others, flags) in cases.items():
        yield f"same bits {name}", "", "yes" if run(others, **flags) == alone else "NO"


def time_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds, the best of some, the device waited for."""
    best = float("inf")
    for _ in range(repeats + 1):
        if HAS_GPU:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if HAS_GPU:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def measured_rates(smoke: bool) -> tuple[float, float]:
    """What this device copies and multiplies, now: GB/s, TFLOP/s."""
    size, n = (1 << 24, 512) if smoke else (1 << 32, 8192)

    def copy_s() -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        destination = torch.empty_like(source)
        return time_of(lambda: destination.copy_(source))

    def product_s() -> float:
        x, y = (torch.randn(n, n, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        return time_of(lambda: x @ y)

    rates = 2 * size / copy_s() / 1e9, 2 * n**3 / product_s() / 1e12
    free_memory()
    return rates


def timed_run(
    core: EngineCore, batch: int, num_in: int, num_out: int, vocab: int, adapters: Sequence[AdapterSource] = ()
) -> tuple[float, float]:
    """(seconds in all, seconds of a step of decodes alone) of `batch` requests that come at once, over `adapters` in
    turn."""
    for i in range(batch):
        adapter = adapters[i % len(adapters)] if adapters else None
        core.add(request(f"{i}", prompt_of(i, num_in, vocab), num_out, adapter))
    begun = time.perf_counter()
    decode_s: list[float] = []
    while core.has_work:
        step_begun = time.perf_counter()
        stats = core.step().stats
        if stats.num_running == batch and stats.num_computed_tokens == batch:
            decode_s.append(time.perf_counter() - step_begun)
    total = time.perf_counter() - begun
    return total, sorted(decode_s)[len(decode_s) // 2] if decode_s else total / num_out


# Of which of the predictions' kernels a launch is, by what its name begins with.
KERNELS = {
    "_linear": "products", "_attention": "attention", "_merge": "attention", "_norm": "norms",
    "_rotary": "rotary and cache",
}  # fmt: skip


def kernel_times_us(core: EngineCore, batch: int, num_in: int, vocab: int) -> dict[str, float]:
    """Of a decode step, by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    for i in range(batch):
        core.add(request(f"p{i}", prompt_of(i, num_in, vocab), 64))
    for _ in range(24):
        core.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(20):
            core.step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total):
        kind = next((kind for begin, kind in KERNELS.items() if event.key.startswith(begin)), "the rest")
        found[kind] = found.get(kind, 0.0) + event.self_device_time_total / 20
        print(f"{event.self_device_time_total / 20:10.1f} us/step {event.count // 20:5d}x {event.key[:90]}", flush=True)
    drain(core)
    return found


def model(smoke: bool) -> Iterator[Row]:
    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    vocab = config["vocab_size"]
    num_in, num_out, prefill_len = (24, 8, 64) if smoke else (512, 128, 2048)
    batches = (1, 2) if smoke else (1, 32, 64, 128, 256)
    copy_gbs, tflops = measured_rates(smoke)
    machine = replace(MACHINES["h100"], copy_gbs=copy_gbs, tflops=tflops)
    limits = Limits(describe(config), machine)
    yield COPY, "GB/s", f"{copy_gbs:.1f}"
    yield PRODUCT, "TFLOP/s", f"{tflops:.3f}"
    begun = time.perf_counter()
    flags = {"num_gpu_blocks_override": 600} if smoke else {}
    core = make_core(
        config, DEVICE.type, max_model_len=256 if smoke else 8192, max_num_seqs=256 if not smoke else 8,
        max_num_batched_tokens=128 if smoke else 8192, **flags,
    )  # fmt: skip
    yield "engine core ready, with the kernels that were there", "s", f"{time.perf_counter() - begun:.1f}"
    step_s = {}
    for batch in batches:
        total, step_s[batch] = timed_run(core, batch, num_in, num_out, vocab)
        yield f"decode step, {batch} rows", "ms", f"{step_s[batch] * 1e3:.2f}"
        if batch == 1:
            share = 100 * limits.weights_s() / step_s[batch]
            yield "decode, 1 row: share of the copy bandwidth", "%", f"{share:.1f}"
        yield f"output, {batch} at once, {num_in} in, {num_out} out", "tok/s", f"{batch * num_out / total:.0f}"
    count = 8192 // prefill_len if not smoke else 2
    total, _ = timed_run(core, count, prefill_len, 1, vocab)
    yield f"prefill, prompts of {prefill_len}", "tok/s", f"{count * prefill_len / total:.0f}"
    share = 100 * limits.prefill_share(count * prefill_len, prefill_len // 2, total)
    yield "prefill: share of the matrix rate", "%", f"{share:.1f}"
    if HAS_GPU and not smoke:
        # The kernels' times of a profile beside a step without one: tracing a graph takes time between kernels.
        times = kernel_times_us(core, 64, num_in, vocab)
        for kind, us in times.items():
            yield f"decode step, 64 rows: {kind}", "us", f"{us:.1f}"
        outside = 100 * (1 - sum(times.values()) / (1e6 * step_s[64]))
        yield "decode step, 64 rows: outside kernels", "%", f"{outside:.1f}"


def adapters(smoke: bool) -> Iterator[Row]:
    """Decode steps of rank 16 on all linear layers, beside those of a server without adapters."""
    from octavo.lora.files import source
    from tests.lora.random_adapters import write_adapter_of

    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (size * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    sizes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    modules = {f"model.layers.{i}.{name}": of for i in range(config["num_hidden_layers"]) for name, of in sizes.items()}
    batch, count, num_in, num_out = (4, 2, 24, 8) if smoke else (64, 8, 512, 64)
    flags: dict[str, Any] = {"max_model_len": 256 if smoke else 1024, "max_num_seqs": batch}
    flags |= {"num_gpu_blocks_override": 600} if smoke else {}
    step_s: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_adapter_of(Path(folder) / f"{i}", i, 16, modules, 0.01) for i in range(count)]
        sources = [source(path.name, str(path)) for path in paths]
        served = {"enable_lora": True, "max_loras": count, "max_cpu_loras": count}
        kinds: dict[str, tuple[dict[str, Any], list[AdapterSource]]] = {
            "without --enable-lora": ({}, []), "the base": (served, []), "one adapter": (served, sources[:1]),
            f"{count} adapters": (served, sources),
        }  # fmt: skip
        core, last = None, None
        for kind, (more, asked) in kinds.items():
            if core is None or more != last:
                core = None
                free_memory()
                core, last = make_core(config, DEVICE.type, **flags, **more), more
            timed_run(core, batch, num_in, num_out, config["vocab_size"], asked)  # which reads them
            _, step_s[kind] = timed_run(core, batch, num_in, num_out, config["vocab_size"], asked)
            yield f"adapters: decode step, {batch} rows, {kind}", "ms", f"{step_s[kind] * 1e3:.2f}"
            if not more:
                continue
            over = 100 * (step_s[kind] / step_s["without --enable-lora"] - 1)
            yield f"adapters: {kind}, over a server without", "%", f"{over:.1f}"


def transformers(smoke: bool) -> Iterator[Row]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    num_in, num_out = (24, 8) if smoke else (512, 128)
    batches = (1, 2) if smoke else (1, 32, 128)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        reference = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        torch.set_default_dtype(torch.float32)
    for batch in batches:
        prompts = torch.tensor([prompt_of(i, num_in, config["vocab_size"]) for i in range(batch)], device=DEVICE)

        def generate(prompts: torch.Tensor = prompts) -> None:
            reference.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=num_out,
                min_new_tokens=num_out, pad_token_id=0,
            )  # fmt: skip

        total = time_of(generate, repeats=1)
        yield f"transformers: output, {batch} at once", "tok/s", f"{batch * num_out / total:.0f}"


def start(smoke: bool) -> Iterator[Row]:
    """Of a core, in a process of its own: nothing compiled yet, then everything."""
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            command = [sys.executable, __file__, "--ready", *(["--smoke"] if smoke else [])]
            begun = time.perf_counter()
            done = subprocess.run(
                command, env=os.environ | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
            )
            yield (
                f"engine core ready, {kind}, interpreter and imports included",
                "s",
                f"{time.perf_counter() - begun:.1f}",
            )
            for phase, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                yield f"of it {phase}, {kind}", "s", f"{seconds:.1f}"


def ready(smoke: bool) -> None:
    """Start a core and print the seconds of its phases."""
    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    flags = {"num_gpu_blocks_override": 600, "max_model_len": 256} if smoke else {"max_model_len": 8192}
    core = make_core(config, DEVICE.type, max_num_seqs=8 if smoke else 256, **flags)
    print(json.dumps(core.executor.startup))


def serve(smoke: bool) -> Iterator[Row]:
    """Output over HTTP, and the times of tokens, at some numbers of requests at once."""
    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    folder = config_folder(config)
    save_tokenizer(Path(folder))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    octavo = [sys.executable, "-m", "octavo.entrypoints.cli.main"]
    flags = ["--model", folder, "--load-format", "dummy", "--device", DEVICE.type, "--port", port]
    flags += ["--num-gpu-blocks-override", "600", "--max-model-len", "256"] if smoke else ["--max-model-len", "8192"]
    server = subprocess.Popen([*octavo, "serve", *flags])
    try:
        begun = time.perf_counter()
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with status {server.returncode}")
            time.sleep(0.1)
        yield "server ready", "s", f"{time.perf_counter() - begun:.1f}"
        num_in, num_out = (24, 8) if smoke else (512, 128)
        for at_once, prompts in ((1, 2), (2, 4)) if smoke else ((1, 8), (32, 128), (128, 512), (256, 768)):
            result = Path(folder) / f"{at_once}.json"
            lengths = ["--random-input-len", str(num_in), "--random-output-len", str(num_out), "--ignore-eos"]
            load = ["--num-prompts", str(prompts), "--max-concurrency", str(at_once), "--num-warmups", str(at_once)]
            measure = [*octavo, "bench", "serve", "--port", port, "--dataset-name", "random", "--json", str(result)]
            subprocess.run([*measure, *lengths, *load, "--disable-tqdm"], check=True)
            found = json.loads(result.read_text())
            yield f"served: output, {at_once} at once", "tok/s", f"{found['output_throughput']:.0f}"
            for what in ("ttft", "tpot"):
                yield f"served: median {what.upper()}, {at_once} at once", "ms", f"{found[f'median_{what}_ms']:.1f}"
    finally:
        server.terminate()
        server.wait()


def save_tokenizer(folder: Path) -> None:
    """A byte-level one: whatever a model of random weights says is text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# --- The page --------------------------------------------------------------------------------------------------------


def device_name() -> str:
    if not HAS_GPU:
        return "no GPU"
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def write_part(results: Path, part: str, rows: list[Row], state: str) -> None:
    entry = {"part": part, "device": device_name(), "state": state, "rows": rows}
    (results / f"{part}.json").write_text(json.dumps(entry, indent=1))


def page(results: Path) -> str:
    """Markdown, of all parts that have left anything. Predictions are for the rates that were measured."""
    parts = [json.loads(file.read_text()) for part in PARTS if (file := results / f"{part}.json").exists()]
    measured = {what: value for part in parts for what, _, value in part["rows"]}
    predicted: dict[str, float] = {}
    on_gpu = [part["device"] for part in parts if part["device"] != "no GPU"]
    if COPY in measured and on_gpu:
        known = MACHINES["a100" if "A100" in on_gpu[0] else "h200" if "H200" in on_gpu[0] else "h100"]
        machine = replace(known, copy_gbs=float(measured[COPY]), tflops=float(measured[PRODUCT]))
        predicted = {what: value for what, _, value in predicted_rows(Limits(describe(LLAMA_3_1_8B), machine))}
    lines = []
    for part in parts:
        lines += [f"## {part['part']}: {part['state']}", "", f"On {part['device']}.", ""]
        lines += ["| | predicted | measured | ratio | |", "|---|---|---|---|---|"]
        for what, unit, value in part["rows"]:
            expected = predicted.get(what)
            cells = ["", ""] if expected is None else [f"{expected:.1f}", f"{float(value) / expected:.2f}"]
            lines.append(f"| {what} | {cells[0]} | {value} | {cells[1]} | {unit} |")
        lines.append("")
    return "\n".join(lines)


def run_part(part: str, results: Path, smoke: bool, limit_s: float) -> bool:
    """In a process of its own -> whether it came to its end. What it prints goes to its log too."""
    (results / f"{part}.json").unlink(missing_ok=True)
    command = [sys.executable, "-u", __file__, "--part", part, "--results", str(results)]
    begun = time.monotonic()
    with (results / f"{part}.log").open("wb") as log:
        # A session of its own, so that what it has started ends with it.
        child = subprocess.Popen(
            [*command, *(["--smoke"] if smoke else [])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        timer = Timer(limit_s, lambda: os.killpg(child.pid, signal.SIGKILL))
        timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            log.write(line)
            log.flush()
        status = child.wait()
        timer.cancel()
    took = f"{time.monotonic() - begun:.0f} s"
    file = results / f"{part}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    ended = f"ended after {took}" if status == -signal.SIGKILL else f"failed with status {status} after {took}"
    write_part(results, part, rows, f"done in {took}" if status == 0 else ended)
    (results / "page.md").write_text(page(results))
    print(f"== {part}: status {status}, {took}", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--results", type=Path, default=Path(os.environ.get("OUT", "gpu-check-results")))
    parser.add_argument("--limit-s", type=float, default=450, help="of each part, which is ended then")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--ready", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not HAS_GPU and not args.smoke:
        parser.error("there is no CUDA device; --smoke shows that the check itself works")
    if args.ready:
        ready(args.smoke)
        return 0
    if args.part:
        rows: list[Row] = []
        for row in globals()[args.part](args.smoke):
            rows.append(row)
            write_part(args.results, args.part, rows, "under way")
            print(*row, flush=True)
        return 0
    args.results.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(args.results.absolute() / "triton"))
    parts = args.parts or PARTS
    failed = [part for part in parts if not run_part(part, args.results, args.smoke, args.limit_s)]
    print(page(args.results))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
