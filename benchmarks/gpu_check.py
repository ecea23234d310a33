"""Everything about the GPU backend that only a GPU can tell: `scripts/gpu-check` prepares what this needs and runs it.

    python benchmarks/gpu_check.py [--out FILE.md] [--only PART ...] [--smoke]

Parts: `kernels` (their tests, on the device), `parity` (answers of a GPU and of the CPU on the same random weights),
`invariance` (the same request alone, among others, in chunks and after preemption: bit for bit), `model` (an
8B-shaped model: start, decode, prefill, where a step's time goes), `transformers` (the same work on the same device).
Each part is a process of its own, so that one that fails costs no other. The result is the table of docs/gpu.md.
`--smoke` runs all of it in minutes on any machine, on a tiny model and the CPU where there is no GPU: the figures mean
nothing then, but the check itself is seen to work.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_limits import LLAMA_3_1_8B, Limits, Rates
from gpu_limits import rows as predicted_rows

from octavo.config import EngineArgs
from octavo.engine.core import EngineCore
from octavo.models.registry import describe
from octavo.request import EngineRequest, Prompt, SequenceOutput
from octavo.sampling_params import SamplingParams

Row = tuple[str, str, str]  # what, unit, measured

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PARTS = ("kernels", "parity", "invariance", "model", "transformers")
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


def request(name: str, prompt: list[int], num_out: int, **params: Any) -> EngineRequest:
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_out} | params
    return EngineRequest(name, Prompt(prompt), SamplingParams(**settings), [EOS], num_out, time.monotonic())


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


def kernels(smoke: bool) -> list[Row]:
    folder = "tests/ops/triton"
    # What compiles for GPUs that are not there says nothing of this one.
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "300", "-p", "no:cacheprovider", folder]
    command += ["--ignore", f"{folder}/test_compile.py", *(["-k", "rms_norm or take_rows"] if smoke else [])]
    if importlib.util.find_spec("xdist") is not None and not smoke:
        command += ["-n", str(min(8, os.cpu_count() or 1))]  # compiling takes most of the time
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    summary = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout.strip() else done.stderr[-200:]
    return [("kernel tests on the device", "", summary)]


def parity(smoke: bool) -> list[Row]:
    """Greedy tokens and the log-probabilities of the prompt, against the CPU's kernels."""
    found: list[Row] = []
    for name, config in list(SHAPES.items())[: 1 if smoke else None]:
        answers = {}
        for device in ("cpu", DEVICE.type):
            core = make_core(config, device, num_gpu_blocks_override=600, max_model_len=256, max_num_seqs=16)
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
        found.append((f"parity, {name}-shaped: log-probabilities of prompts differ by at most", "", f"{worst:.4f}"))
        found.append((f"parity, {name}-shaped: greedy tokens before a difference", "", f"{same} of {total}"))
    return found


def invariance(smoke: bool) -> list[Row]:
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
    cases = {
        "among others": run(num_others, num_gpu_blocks_override=4096),
        "in chunks": run(3, num_gpu_blocks_override=4096, max_num_batched_tokens=64, max_num_seqs=8),
        "call by call": run(1, num_gpu_blocks_override=4096, enforce_eager=True),
        "preempted": run(num_others, num_gpu_blocks_override=max(blocks, 32)),
        "swapped": run(num_others, num_gpu_blocks_override=max(blocks, 32), preemption_mode="swap", swap_space=1.0),
    }
    return [(f"same bits {name}", "", "yes" if found == alone else "NO") for name, found in cases.items()]


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


def measured_rates(smoke: bool) -> Rates:
    """What this device copies and multiplies, now."""
    size, n = (1 << 24, 512) if smoke else (1 << 32, 8192)

    def copy_s() -> float:
        source = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        destination = torch.empty_like(source)
        return time_of(lambda: destination.copy_(source))

    def product_s() -> float:
        x, y = (torch.randn(n, n, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        return time_of(lambda: x @ y)

    rates = Rates(2 * size / copy_s() / 1e9, 2 * n**3 / product_s() / 1e12)
    free_memory()
    return rates


def timed_run(core: EngineCore, batch: int, num_in: int, num_out: int, vocab: int) -> tuple[float, float]:
    """(seconds in all, seconds of a step of decodes alone) of `batch` requests that come at once."""
    for i in range(batch):
        core.add(request(f"{i}", prompt_of(i, num_in, vocab), num_out))
    begun = time.perf_counter()
    decode_s: list[float] = []
    while core.has_work:
        step_begun = time.perf_counter()
        stats = core.step().stats
        if stats.num_running == batch and stats.num_computed_tokens == batch:
            decode_s.append(time.perf_counter() - step_begun)
    total = time.perf_counter() - begun
    return total, sorted(decode_s)[len(decode_s) // 2] if decode_s else total / num_out


def outside_kernels(core: EngineCore, batch: int, num_in: int, vocab: int) -> float:
    """Percent of the time of decode steps in which no kernel of theirs runs."""
    from torch.profiler import ProfilerActivity, profile

    for i in range(batch):
        core.add(request(f"p{i}", prompt_of(i, num_in, vocab), 64))
    for _ in range(24):
        core.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            core.step()
        torch.cuda.synchronize()
        wall_us = (time.perf_counter() - begun) * 1e6
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == "CUDA")
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    for event in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:24]:
        print(f"{event.self_device_time_total / 20:10.1f} us/step {event.count // 20:5d}x {event.key[:90]}", flush=True)
    drain(core)
    return 100 * (1 - busy / wall_us)


def model(smoke: bool) -> list[Row]:
    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    vocab = config["vocab_size"]
    num_in, num_out, prefill_len = (24, 8, 64) if smoke else (512, 128, 2048)
    batches = (1, 2) if smoke else (1, 32, 128, 256)
    rates = measured_rates(smoke)
    limits = Limits(describe(config), rates)
    found: list[Row] = [(COPY, "GB/s", f"{rates.copy_gbs:.1f}"), (PRODUCT, "TFLOP/s", f"{rates.tflops:.3f}")]
    begun = time.perf_counter()
    flags = {"num_gpu_blocks_override": 600} if smoke else {}
    core = make_core(
        config, DEVICE.type, max_model_len=256 if smoke else 8192, max_num_seqs=256 if not smoke else 8,
        max_num_batched_tokens=128 if smoke else 8192, **flags,
    )  # fmt: skip
    found.append(
        ("engine core ready (weights made, cache sized, graphs captured)", "s", f"{time.perf_counter() - begun:.1f}")
    )
    for phase, seconds in core.executor.startup.items():
        found.append((f"of it {phase}", "s", f"{seconds:.1f}"))
    timed_run(core, 2, num_in, num_out, vocab)
    for batch in batches:
        total, step = timed_run(core, batch, num_in, num_out, vocab)
        found.append(
            (f"output, {batch} at once, {num_in} in, {num_out} out", "tok/s", f"{batch * num_out / total:.0f}")
        )
        found.append((f"decode step, {batch} rows", "ms", f"{step * 1e3:.2f}"))
        if batch == 1:
            found.append(("decode, 1 row: share of the copy bandwidth", "%", f"{100 * limits.weights_s() / step:.0f}"))
    if HAS_GPU and not smoke:
        found.append(
            ("of a decode step of 64 rows outside kernels", "%", f"{outside_kernels(core, 64, num_in, vocab):.1f}")
        )
    count = 8192 // prefill_len if not smoke else 2
    total, _ = timed_run(core, count, prefill_len, 1, vocab)
    rate = count * prefill_len / total
    share = limits.prefill_s(count * prefill_len, prefill_len // 2) * 0.62 / total  # operations over the measured rate
    found.append((f"prefill, prompts of {prefill_len}", "tok/s", f"{rate:.0f}"))
    found.append(("prefill: share of the matrix rate", "%", f"{100 * share:.0f}"))
    return found


def transformers(smoke: bool) -> list[Row]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = SHAPES["Llama"] if smoke else LLAMA_3_1_8B
    num_in, num_out = (24, 8) if smoke else (512, 128)
    batches = (1, 2) if smoke else (1, 32, 128)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        reference = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        torch.set_default_dtype(torch.float32)
    found: list[Row] = []
    for batch in batches:
        prompts = torch.tensor([prompt_of(i, num_in, config["vocab_size"]) for i in range(batch)], device=DEVICE)

        def generate(prompts: torch.Tensor = prompts) -> None:
            reference.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=num_out,
                min_new_tokens=num_out, pad_token_id=0,
            )  # fmt: skip

        total = time_of(generate, repeats=1)
        found.append((f"transformers: output, {batch} at once", "tok/s", f"{batch * num_out / total:.0f}"))
    return found


# --- The table -------------------------------------------------------------------------------------------------------


def device_name() -> str:
    if not HAS_GPU:
        return "no GPU"
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def table(found: list[Row]) -> str:
    """Markdown, with what `gpu_limits` predicts for the rates that were measured."""
    measured = {what: value for what, _, value in found}
    predicted: dict[str, str] = {}
    if COPY in measured and HAS_GPU:
        rates = Rates(float(measured[COPY]), float(measured[PRODUCT]))
        limits = Limits(describe(LLAMA_3_1_8B), rates)
        predicted = {what: f"{value:.1f}" for what, _, value in predicted_rows(limits)}
    lines = [f"Measured on {device_name()}.", "", "| | predicted | measured | |", "|---|---|---|---|"]
    lines += [f"| {what} | {predicted.get(what, '')} | {value} | {unit} |" for what, unit, value in found]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table here, after each part")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if not HAS_GPU and not args.smoke:
        parser.error("there is no CUDA device; --smoke shows that the check itself works")
    if args.part:
        print("ROWS " + json.dumps(globals()[args.part](args.smoke)), flush=True)
        return 0
    found: list[Row] = []
    failed = []
    for part in args.only:
        begun = time.monotonic()
        command = [sys.executable, __file__, "--part", part, *(["--smoke"] if args.smoke else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        rows = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
        print("\n".join(line for line in done.stdout.splitlines() if not line.startswith("ROWS ")))
        print(f"== {part}: status {done.returncode}, {time.monotonic() - begun:.0f} s", flush=True)
        if done.returncode or not rows:
            failed.append(part)
            found.append((f"{part}: failed", "", f"status {done.returncode}"))
        else:
            found += [tuple(row) for row in json.loads(rows[-1].removeprefix("ROWS "))]
        if args.out:
            args.out.write_text(table(found))
    print(table(found))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
