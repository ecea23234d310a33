"""Rates of the device, and times of a model's steps on it: alone, with adapters, and beside transformers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_limits import LLAMA_3_1_8B, Limits

from gpu_checks.engines import (
    DEVICE,
    HAS_GPU,
    SHAPES,
    Row,
    drain,
    free_memory,
    listed,
    make_core,
    prompt_of,
    request,
    timed_run,
    watched_compiling,
)
from octavo.engine.core import EngineCore
from octavo.models.registry import describe
from octavo.ops.triton.schedule import MACHINES
from octavo.request import AdapterSource

COPY, PRODUCT = "copy, read and written", "bfloat16 product, 8192 cubed"


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
        with watched_compiling() as compiled:
            total, step_s[batch] = timed_run(core, batch, num_in, num_out, vocab)
        if compiled:
            yield f"compiled after the start, {batch} rows", "kernels", listed(compiled)
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
    from octavo.lora.adapter_files import source
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
            with watched_compiling() as compiled:
                timed_run(core, batch, num_in, num_out, config["vocab_size"], asked)  # which reads them
            if compiled:
                yield f"adapters: compiled after the start, {kind}", "kernels", listed(compiled)
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
