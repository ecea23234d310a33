"""The parts of `scripts/gpu-check quick`: what to know first of a machine that has a GPU for eight minutes.

Each part is a process, so that what ends one costs the others nothing. Parts stand in the order of what they are worth,
and rows within a part too: whatever was cut off is what came last. Without a GPU (`--smoke`) all parts but the server
run Triton's interpreter on tiny shapes, and their times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from gpu_limits import DRAWN_GB_S, LLAMA_3_1_8B, QWEN3_EXPERTS, compile_s

from gpu_checks.engines import (
    DEVICE,
    EOS,
    HAS_GPU,
    SHAPES,
    Row,
    config_folder,
    drain,
    listed,
    make_core,
    prompt_of,
    request,
    timed_run,
    tokens_of,
    watched_compiling,
    whatever_fails,
)
from gpu_checks.serving import served
from gpu_checks.speed import COPY, PRODUCT, measured_rates
from octavo.config import EngineArgs
from octavo.engine.core import EngineCore

_REPEATS = 10
_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": EOS,
    "dtype": "bfloat16",
}  # fmt: skip
_TINY_EXPERTS = _TINY | {
    "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip

_TINY_FLAGS: dict[str, Any] = {
    "max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 2, "num_gpu_blocks_override": 64
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A part, and what its time is reckoned from. `num_variants` of kernels are those that no earlier part compiles."""

    rows: Callable[[bool], Iterator[Row]]
    num_variants: int
    weight_gb: float  # made on the host and brought to the device
    work_s: float  # of steps, requests and clients, once kernels and weights are there

    def planned_s(self, cores: int = 16) -> float:
        """Return the seconds on a machine that has compiled nothing."""
        return _PROCESS_S + compile_s(self.num_variants, cores) + self.weight_gb / DRAWN_GB_S + self.work_s


_PROCESS_S = 8.0  # beside what a start takes: imports and graphs of a process of its own


def make(config: dict[str, Any], smoke: bool, quantization: str | None = None, **flags: Any) -> EngineCore:
    """Return a core on the device; without one, on the interpreter's kernels and a device that is late."""
    if HAS_GPU:
        return make_core(config, DEVICE.type, quantization=quantization, **flags)
    assert smoke
    from octavo.execution.executor import LocalExecutor
    from octavo.ops import cuda
    from tests.execution.late_device import LateDevice

    folder = config_folder(config)
    built = EngineArgs(
        model=folder, tokenizer=folder, load_format="dummy", seed=1, device="cpu", enable_prefix_caching=False,
        reproducible_parallel=False, **flags,
    ).create_engine_config()  # fmt: skip
    # Flags that only GPUs take are refused where there is none.
    built = replace(built, model=replace(built.model, quantization=quantization))
    return EngineCore(built, LocalExecutor(built, LateDevice(0), cast(Any, cuda)))


def rates(smoke: bool) -> Iterator[Row]:
    copy_gbs, tflops = measured_rates(smoke)
    yield COPY, "GB/s", f"{copy_gbs:.1f}"
    yield PRODUCT, "TFLOP/s", f"{tflops:.3f}"


def rows_alone(smoke: bool) -> Iterator[Row]:
    """Bits of a product's rows, alone and among others: every class of rows, so every tile that the kernels choose."""
    for kind in ("bfloat16", "fp8", "int8", "int4"):
        yield from whatever_fails(f"rows alone and among others, {kind}", _rows_alone(kind, smoke))
    yield from whatever_fails("products of few bits", _few_bits(smoke))


def _few_bits(smoke: bool) -> Iterator[Row]:
    """Products of what is unpacked by assembly, which the interpreter does not run, against those of float64."""
    from octavo.ops.triton import products
    from octavo.ops.triton.pack import pack_codes
    from octavo.quantization.codes import Codes
    from octavo.quantization.gguf_blocks import IQ4_NUMBERS

    generator = torch.Generator(DEVICE).manual_seed(6)
    num_out, num_in = (64, 256) if smoke else (1024, 4096)
    scales = torch.rand(num_out, num_in // 32, generator=generator, device=DEVICE).half().float()
    for what, bits, table in (("indices into a table", 4, IQ4_NUMBERS), ("8-bit codes", 8, None)):
        codes = torch.randint(0, 1 << bits, (num_out, num_in), generator=generator, device=DEVICE).to(torch.uint8)
        matrix = Codes(bits, 32, codes, scales, table=table)
        weight, values, worst = pack_codes([matrix]), matrix.dequantize().double(), 0.0
        for num_rows in (1, 16 if smoke else 128):
            x = torch.randn(num_rows, num_in, generator=generator, device=DEVICE).to(torch.bfloat16)
            expected = x.double() @ values.T
            difference = products.linear(x, weight, "float32").double() - expected
            worst = max(worst, float(difference.abs().max() / expected.abs().max()))
        found = f"{worst:.5f}" if worst < 0.02 else f"DIFFER: {worst:.5f}"
        yield f"products of {what}: largest difference from float64, of the largest", "", found


def _rows_alone(kind: str, smoke: bool) -> Iterator[Row]:
    from octavo.ops.triton import products
    from octavo.ops.triton.pack import pack_linear
    from octavo.ops.triton.schedule import ROW_CLASSES
    from octavo.quantization import StoredWeight
    from octavo.quantization.array_functions import converted

    if not HAS_GPU:
        from tests.ops.triton import tensor_cores

        tensor_cores.install()  # sums in the order of the device
    # The narrowest and the widest product of an 8B, which get different tiles.
    sizes, classes, repeats = [(4096, 4096), (28672, 4096)], ROW_CLASSES, _REPEATS
    if smoke:
        sizes, classes, repeats = [(64, 96)], (16, 32, 64), 2
    generator, numbers = torch.Generator(DEVICE).manual_seed(5), np.random.default_rng(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)

    stored = "BF16" if kind == "bfloat16" else kind.upper()
    differing: list[str] = []
    for num_out, num_in in sizes:
        data = converted(numbers.standard_normal((num_out, num_in), np.float32) / 64, "bfloat16")
        weight = pack_linear([StoredWeight(stored, {"data": data}, (num_out, num_in))])
        for num_rows in classes:
            probe = draw(1, num_in)
            alone = products.linear(products.quantize(probe, weight), weight, "float32")[0]
            bad = 0
            for repeat in range(repeats):
                x = draw(num_rows, num_in) * 2.0 ** (repeat % 3)
                at = (repeat * 7919) % num_rows  # another place of the tile each time
                x[at] = probe[0]
                bad += not torch.equal(products.linear(products.quantize(x, weight), weight, "float32")[at], alone)
            if bad:
                differing.append(f"{num_out} channels, {num_rows} rows: {bad} of {repeats}")
    what = f"rows alone and among others, {kind}: {len(sizes) * len(classes)} products, {repeats} times each"
    yield what, "", "DIFFER: " + "; ".join(differing) if differing else "same bits"


def answers(smoke: bool) -> Iterator[Row]:
    """An engine from end to end: the CPU's answers, and its own among others and in chunks."""
    config = _TINY if smoke else SHAPES["Llama"]
    count, num_out = (2, 3) if smoke else (8, 24)
    flags: dict[str, Any] = {"num_gpu_blocks_override": 600, "max_model_len": 256, "max_num_seqs": 16}
    flags |= {"max_num_seqs": 2, "max_num_batched_tokens": 16} if smoke else {}

    def run(core: EngineCore, names: list[int]) -> dict[int, tuple[list[int], list[float]]]:
        for i in names:
            prompt = prompt_of(i, 9 + (7 if smoke else 17) * i, config["vocab_size"])
            core.add(request(f"{i}", prompt, num_out, prompt_logprobs=0, logprobs=0))
        found = drain(core)
        return {
            i: (
                tokens_of(found[f"{i}"]),
                [entry.logprobs[0] for entry in found[f"{i}"][0].prompt_logprobs or []]
                + [value for output in found[f"{i}"] for entry in output.logprobs or [] for value in entry.logprobs],
            )
            for i in names
        }

    core = make(config, smoke, **flags)
    with watched_compiling() as compiled:
        found = run(core, [*range(count)])
        alone = run(core, [count - 1])
    del core
    yield "one engine: same bits among others", "", "yes" if alone[count - 1] == found[count - 1] else "NO"
    if compiled:
        yield "one engine: compiled after the start", "kernels", listed(compiled)
    expected = run(make_core(config, "cpu", reproducible_parallel=False, **flags), [*range(count)])
    same = total = 0
    worst = 0.0
    for i, (tokens, logprobs) in expected.items():
        # After the first token that differs the two go on with different texts.
        until = next((at for at, pair in enumerate(zip(tokens, found[i][0], strict=True)) if pair[0] != pair[1]), None)
        same, total = same + (len(tokens) if until is None else until), total + len(tokens)
        num_prompt = len(logprobs) - len(tokens)
        pairs = zip(logprobs[:num_prompt], found[i][1][:num_prompt], strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    yield "one engine: greedy tokens of the CPU before a difference", "", f"{same} of {total}"
    yield "one engine: log-probabilities of prompts differ by at most", "", f"{worst:.4f}"


def streams(kind: str) -> Callable[[bool], Iterator[Row]]:
    """The part that measures an 8B-shaped model with weights of a kind."""

    def rows(smoke: bool) -> Iterator[Row]:
        return _streams(kind, smoke)

    return rows


def _streams(kind: str, smoke: bool) -> Iterator[Row]:
    config = _TINY if smoke else LLAMA_3_1_8B
    vocab = config["vocab_size"]
    num_in, num_out, at_once = (5, 3, (1, 2)) if smoke else (512, 128, (1, 32, 128))
    flags: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
    if smoke:
        flags = _TINY_FLAGS
    begun = time.perf_counter()
    core = make(config, smoke, None if kind == "bfloat16" else kind, **flags)
    yield f"{kind}: engine core ready", "s", f"{time.perf_counter() - begun:.1f}"
    for phase, seconds in core.executor.startup.items():
        if seconds > 1:
            yield f"{kind}: of it {phase}", "s", f"{seconds:.1f}"

    def decode(count: int) -> Iterator[Row]:
        with watched_compiling() as compiled:
            total, step_s = timed_run(core, count, num_in, num_out, vocab)
        yield f"{kind}: decode step, {count} streams", "ms", f"{step_s * 1e3:.2f}"
        yield f"{kind}: output, {count} streams, 512 in, 128 out", "tok/s", f"{count * num_out / total:.0f}"
        if compiled:
            yield f"{kind}: compiled after the start, {count} streams", "kernels", listed(compiled)

    def prompt(length: int) -> Iterator[Row]:
        core.add(request("p", prompt_of(length, length if not smoke else length // 128, vocab), 1))
        begun = time.perf_counter()
        drain(core)
        yield f"{kind}: prompt of {length}", "ms", f"{1e3 * (time.perf_counter() - begun):.1f}"

    def first_tokens(count: int) -> Iterator[Row]:
        for i in range(count):
            core.add(request(f"f{i}", prompt_of(i, num_in, vocab), 4))
        begun = time.perf_counter()
        came: dict[str, float] = {}
        while core.has_work:
            for output in core.step().outputs:
                came.setdefault(output.request_id, time.perf_counter() - begun)
        in_order = sorted(came.values())
        yield f"{kind}: first token at 32 streams, median", "ms", f"{1e3 * in_order[(count - 1) // 2]:.1f}"
        yield f"{kind}: first token at 32 streams, last", "ms", f"{1e3 * in_order[-1]:.1f}"

    def offline() -> Iterator[Row]:
        count, length = (2, 4) if smoke else (256, 128)
        total, _ = timed_run(core, count, length, length, vocab)
        yield f"{kind}: output, 256 at once, 128 in, 128 out", "tok/s", f"{count * length / total:.0f}"

    for count in at_once:
        yield from whatever_fails(f"{kind}: {count} streams", decode(count))
    for length in (512, 4096):
        yield from whatever_fails(f"{kind}: prompt of {length}", prompt(length))
    yield from whatever_fails(f"{kind}: first tokens", first_tokens(2 if smoke else 32))
    yield from whatever_fails(f"{kind}: 256 at once", offline())


def http(smoke: bool) -> Iterator[Row]:
    loads = ((1, 2), (2, 4)) if smoke else ((1, 4), (32, 96), (128, 256))
    for what, unit, value in served(smoke, loads):
        yield f"http: {what}", unit, value


def experts(smoke: bool) -> Iterator[Row]:
    """Twelve layers of Qwen3-30B-A3B's: 128 experts, of which a token has eight."""
    config = _TINY_EXPERTS if smoke else QWEN3_EXPERTS
    vocab = config["vocab_size"]
    num_in, num_out, at_once = (5, 3, (1, 2)) if smoke else (512, 64, (1, 32, 128))
    flags: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 8192, "max_num_seqs": 128}
    if smoke:
        flags = _TINY_FLAGS
    begun = time.perf_counter()
    core = make(config, smoke, **flags)
    yield "experts: engine core ready", "s", f"{time.perf_counter() - begun:.1f}"
    for count in at_once:
        with watched_compiling() as compiled:
            _, step_s = timed_run(core, count, num_in, num_out, vocab)
        yield f"experts: decode step, {count} streams", "ms", f"{step_s * 1e3:.2f}"
        if compiled:
            yield f"experts: compiled after the start, {count} streams", "kernels", listed(compiled)
    length, count = (20, 1) if smoke else (2048, 4)
    total, _ = timed_run(core, count, length, 1, vocab)
    yield f"experts: prefill, prompts of {length}", "tok/s", f"{count * length / total:.0f}"


# Variants: of `reachable`'s llama and qwen3-moe, by Triton 3.9; weights as they are made, in bfloat16.
QUICK: dict[str, Part] = {
    "rates": Part(rates, 0, 0.0, 3.0),
    "rows": Part(rows_alone, 44, 0.0, 5.0),
    "answers": Part(answers, 40, 0.0, 4.0),
    "bfloat16": Part(streams("bfloat16"), 37, 16.0, 12.0),
    "fp8": Part(streams("fp8"), 24, 16.0, 10.0),
    "int4": Part(streams("int4"), 24, 16.0, 12.0),
    "http": Part(http, 0, 16.0, 30.0),
    "experts": Part(experts, 30, 16.0, 8.0),
}


def planned_s(cores: int = 16) -> dict[str, float]:
    """Return the seconds of each part on a machine that has compiled nothing."""
    return {name: part.planned_s(cores) for name, part in QUICK.items()}
