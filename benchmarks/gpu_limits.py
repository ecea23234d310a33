"""What a GPU is expected to take for a decoder served in bfloat16, kernel by kernel: the predictions of
benchmarks/results/2026-11-30-gpu-predictions.md.

    python benchmarks/gpu_limits.py [--device h100|h200|a100] [--copy-gbs 3000] [--tflops 700] [--steps]

Products take what the model of `octavo.ops.triton.schedule` says, by which the kernels choose their tiles. Attention is
followed program by program, and other launches have a fixed cost. A kernel of a graph begins some time after the one
before it has ended. The assumptions are `MACHINES` there and the constants here. `scripts/gpu-check` measures what is
predicted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

from octavo.models.description import ModelDescription
from octavo.models.inventory import required_tensors
from octavo.models.registry import describe
from octavo.ops.triton import schedule
from octavo.ops.triton.schedule import MACHINES, Machine

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip

# Twelve of the 48 layers of Qwen3-30B-A3B.
QWEN3_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [],
    "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
QUICK_KINDS = ("bfloat16", "fp8", "int4")  # kinds of weights that `scripts/gpu-check quick` measures
# Indices into a table, and the same weights as codes of eight bits: MXFP4, NF4 and IQ4_NL; NVFP4.
FEW_BITS = ("indices", "8-bit codes", "indices, a scale for 16", "8-bit codes, a scale for 16")
# Bits of a weight with its scales, by kind.
WEIGHT_BITS = {"bfloat16": 16.0, "fp8": 8.0, "int4": 4.5, **dict(zip(FEW_BITS, (4.5, 8.5, 5.0, 9.0), strict=True))}
# Instructions of a product's loop for each weight that it unpacks: counted once, by hand, in what Triton 3.9 compiles
# for 9.0.
_INSTRUCTIONS = {"int4": 6.4, **dict(zip(FEW_BITS, (8.3, 6.1, 8.3, 6.1), strict=True))}
_UNPACKED_ROWS = 128  # tokens of the widest tile, for which weights are unpacked once

# Of a step, beside its layers: its inputs resolved, the plan, embedding, rows, norm, argmax, what is kept and copied.
KERNELS_PER_STEP = 14
KERNELS_PER_EXPERTS_LAYER = 14
SMALL_KERNEL_S = 2.0e-6  # loads that wait for memory once or twice, and a store
# The matrix rate that prefill's products reach of a large product's, and attention's beside it.
PREFILL_SHARE, PREFILL_ATTENTION_SHARE = 0.70, 0.45


@dataclass(frozen=True, slots=True)
class Item:
    """What a program does from when it gets a piece of work until it is free for the next: it waits, then streams."""

    memory_bytes: float = 0.0  # read from memory
    cache_bytes: float = 0.0  # read through the cache, those of memory included
    flops: float = 0.0
    in_flight: float = 64e3  # bytes that it has asked for at a time
    alone_s: float = 0.0  # that overlaps nothing of its own: filling its pipeline, finding its work, writing


def duration_s(machine: Machine, dealt: Iterable[tuple[Item, int]], slots: int) -> float:
    """When all are done, if `slots` programs run at a time and fetch work in this order, some alike at a time."""
    queue: list[list[Any]] = [[item, count] for item, count in dealt if count]
    running: list[_Running] = []
    now, free = 0.0, slots
    while queue or running:
        while free and queue:
            item, count = queue[0]
            taken = min(free, count)
            running.append(_Running(item, taken, item.alone_s, 1.0))
            free -= taken
            queue[0][1] -= taken
            if not queue[0][1]:
                queue.pop(0)
        # Programs on one multiprocessor: they are handed out one to each first.
        beside = -(-sum(each.count for each in running) // machine.multiprocessors)
        working = [each for each in running if each.waits_s <= 0]
        paces = [_stream_s(machine, each.item, beside) for each in working]
        memory = sum(each.count * each.item.memory_bytes / pace for each, pace in zip(working, paces, strict=True))
        cached = sum(each.count * each.item.cache_bytes / pace for each, pace in zip(working, paces, strict=True))
        slower = max(1.0, memory / (machine.copy_gbs * 1e9), cached / (machine.cache_gbs * 1e9))
        waits = [each.waits_s for each in running if each.waits_s > 0]
        passed = min([*waits, *(each.left * pace * slower for each, pace in zip(working, paces, strict=True))])
        now += passed
        for each, pace in zip(working, paces, strict=True):
            each.left -= passed / (pace * slower)
        for each in running:
            each.waits_s -= passed
            free += each.count if each.left <= 1e-9 else 0
        running = [each for each in running if each.left > 1e-9]
    return now


@dataclass(slots=True)
class _Running:
    """Programs that have begun the same at the same time."""

    item: Item
    count: int
    waits_s: float  # before it streams
    left: float  # of that, of 1


def _stream_s(machine: Machine, item: Item, beside: int) -> float:
    """Seconds of an item, if only what is on its multiprocessor were in its way."""
    return max(
        beside * item.flops / machine.flops,
        beside * item.cache_bytes / (machine.port_gbs * 1e9),
        item.cache_bytes / (item.in_flight / machine.latency_s),
        1e-9,
    )


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One layer's: heads of `head_size`, and the tile of keys that a program looks at, with elements of two bytes."""

    num_kv_heads: int
    head_size: int
    block_n: int = 64
    num_stages: int = 3
    programs_per_multiprocessor: int = 2


_FIND_WORK_S = 1.0e-6  # an item's place in the plan, its query, its blocks
_MERGE_S = 2.5e-6  # partial sums written, counted, read, merged
_ROWS = 64  # of a tile: the query heads of a key/value head, and padding


def splits_of(num_keys: int) -> list[int]:
    """Keys of each split, as the attention kernel cuts them."""
    sizes: list[int] = []
    while num_keys > 0:
        sizes.append(min(num_keys, 256 << min(len(sizes) // 16, 4)))
        num_keys -= sizes[-1]
    return sizes


def wants_split(cost: int, block_n: int, num_items: int, total: int, num_programs: int) -> bool:
    """Whether a sequence, of which a program has to do `cost` tiles of `block_n` keys, is worth cutting into its
    splits, beside `num_items` that cost `total` in all. It is if, less what partial sums take, it alone would take
    twice what a program does on average, or if items like it would leave programs idle in their last turn for half of
    that. The kernel decides by the same rule."""
    idle = -num_items % num_programs
    gain = cost - schedule.SPLIT_OVERHEAD // block_n
    return 2 * idle * gain > total or gain * num_programs > 2 * total


def attention_s(machine: Machine, shape: DecodeAttention, keys: Sequence[int], splits: bool | None = None) -> float:
    """One token each of sequences with `keys`, of which those are split that are worth it, or all or none."""
    slots = machine.multiprocessors * shape.programs_per_multiprocessor
    total = sum(count // shape.block_n + 1 for count in keys) * shape.num_kv_heads
    split, whole = dict[int, int](), dict[int, int]()
    merges = False
    for count in keys:
        worth_it = wants_split(count // shape.block_n + 1, shape.block_n, len(keys) * shape.num_kv_heads, total, slots)
        if (worth_it if splits is None else splits) and len(splits_of(count)) > 1:
            merges = True
            for size in splits_of(count):
                split[size] = split.get(size, 0) + shape.num_kv_heads
        else:
            whole[count] = whole.get(count, 0) + shape.num_kv_heads
    dealt = [(_keys_item(machine, shape, size), split[size]) for size in sorted(split, reverse=True)]
    dealt += [(_keys_item(machine, shape, size), number) for size, number in whole.items()]
    return duration_s(machine, dealt, slots) + (_MERGE_S if merges else 0.0)


def _keys_item(machine: Machine, shape: DecodeAttention, num_keys: int) -> Item:
    """What a program does with some keys of one head."""
    num_bytes = num_keys * 2 * shape.head_size * 2
    return Item(
        memory_bytes=num_bytes,
        cache_bytes=num_bytes,
        # Softmax takes about as long as the two products, and overlaps only other programs'.
        flops=2 * 4 * _ROWS * shape.head_size * num_keys,
        in_flight=(shape.num_stages - 1) * shape.block_n * 2 * shape.head_size * 2,
        alone_s=_FIND_WORK_S + machine.latency_s,
    )


@dataclass(frozen=True)
class Kernel:
    """Launches of a step that are alike. What `between_s` leaves out is in `seconds`."""

    name: str
    launches: int
    seconds: float  # of each


class Limits:
    """Times in seconds. Weights are of a kind of `WEIGHT_BITS`, other elements have two bytes; all layers are as the
    first."""

    def __init__(self, model: ModelDescription, machine: Machine, weights: str = "bfloat16") -> None:
        self.weights = weights
        self.machine, self.num_layers, self.hidden_size = machine, len(model.layers), model.hidden_size
        embedding = self.output_elements = model.vocab_size * model.hidden_size
        # A step reads a row or so of the embedding, and all of the output matrix.
        self.matrix_elements = sum(prod(tensor.shape) for tensor in required_tensors(model) if tensor.is_matrix)
        self.matrix_elements -= 0 if model.tie_word_embeddings else embedding
        attention, feed_forward = model.layers[0].attention, model.layers[0].feed_forward
        self.query_size = attention.num_heads * attention.head_size
        self.shape = DecodeAttention(attention.num_kv_heads, attention.head_size)
        kv_size = 2 * attention.num_kv_heads * attention.head_size
        inner = feed_forward.intermediate_size
        self.products = {
            "qkv": (self.query_size + kv_size, self.hidden_size, self.num_layers),
            "attention's output": (self.hidden_size, self.query_size, self.num_layers),
            "gate and up": (2 * inner, self.hidden_size, self.num_layers),
            "down": (self.hidden_size, inner, self.num_layers),
            "output matrix": (model.vocab_size, self.hidden_size, 1),
        }

    def weights_s(self) -> float:
        """Of a copy of as many bytes as the matrices have."""
        return WEIGHT_BITS[self.weights] / 8 * self.matrix_elements / (self.machine.copy_gbs * 1e9)

    def decode_kernels(self, batch: int, context: int) -> list[Kernel]:
        """One token each for `batch` sequences of `context` tokens."""
        found = [
            Kernel(name, launches, _product_s(self.machine, batch, num_out, num_in, self.weights))
            for name, (num_out, num_in, launches) in self.products.items()
        ]
        row_s = batch * self.hidden_size * 2 / (self.machine.copy_gbs * 1e9)
        attended = attention_s(self.machine, self.shape, [context] * batch)
        return [
            *found,
            Kernel("attention", self.num_layers, attended),
            Kernel("norms", 2 * self.num_layers + 1, SMALL_KERNEL_S + 2 * row_s),
            Kernel("rotary and cache", self.num_layers, SMALL_KERNEL_S + 4 * row_s),
            Kernel("the rest", KERNELS_PER_STEP, SMALL_KERNEL_S),
        ]

    def decode_step_s(self, batch: int, context: int) -> float:
        kernels = self.decode_kernels(batch, context)
        return sum(kernel.launches * (kernel.seconds + self.machine.between_s) for kernel in kernels)

    def between_s(self) -> float:
        """Of a decode step, in which no kernel runs."""
        return self.machine.between_s * sum(kernel.launches for kernel in self.decode_kernels(1, 1))

    def prefill_operations(self, num_tokens: int, context: int) -> tuple[float, float]:
        """Of products, the output matrix left out, and of attention over `context` keys on average."""
        products = 2 * num_tokens * (self.matrix_elements - self.output_elements)
        return products, 4 * num_tokens * context * self.query_size * self.num_layers

    def prefill_s(self, num_tokens: int, context: int) -> float:
        """`num_tokens` of prompts that see `context` keys on average."""
        products, attention = self.prefill_operations(num_tokens, context)
        rate = self.machine.tflops * 1e12
        products /= 2 if self.weights == "fp8" else 1  # which the tensor cores multiply twice as fast
        return products / (rate * PREFILL_SHARE) + attention / (rate * PREFILL_ATTENTION_SHARE)

    def prefill_share(self, num_tokens: int, context: int, seconds: float) -> float:
        """Of the matrix rate, that a prefill in `seconds` has reached."""
        return sum(self.prefill_operations(num_tokens, context)) / (self.machine.tflops * 1e12 * seconds)

    def output_rate(self, batch: int, num_in: int, num_out: int) -> float:
        """Output tokens a second, prefill included, of `batch` requests that come at once."""
        steps = num_out * self.decode_step_s(batch, num_in + num_out // 2)
        return batch * num_out / (self.prefill_s(batch * num_in, num_in // 2) + steps)


@cache
def _product_s(machine: Machine, num_rows: int, num_out: int, num_in: int, weights: str = "bfloat16") -> float:
    """With the tile that the kernel chooses; four bits are followed in the tiles of bfloat16, which have as many
    channels."""
    import torch

    from octavo.ops.triton.linear import choose_tile

    capability = (9, 0) if machine.is_hopper else (8, 0)
    dtype = torch.float8_e4m3fn if weights == "fp8" else torch.bfloat16
    tile, channels = choose_tile(
        capability, machine.multiprocessors, num_rows, num_out, dtype.itemsize * num_in, dtype, 8
    )  # fmt: skip
    row_bytes = int(num_in * WEIGHT_BITS[weights] / 8)
    # A multiprocessor issues an instruction for 128 threads in a cycle; its port, by `Machine`, has 42.7 bytes a cycle.
    cycles = _INSTRUCTIONS.get(weights, 0.0) * num_out * num_in * -(-num_rows // _UNPACKED_ROWS) / 128
    issue_s = cycles / machine.multiprocessors * 42.7 / (machine.port_gbs * 1e9)
    # The model counts two operations for two bytes of bfloat16, and of FP8 at twice the rate.
    machine = replace(machine, tflops=machine.tflops * row_bytes / (dtype.itemsize * num_in))
    return max(issue_s, schedule.product_s(machine, num_rows, num_out, row_bytes, tile, channels))


# A variant of a kernel takes 0.7 s to compile (the 37 of an 8B in bfloat16 for 9.0, Triton 3.9, one thread: 25 s), of
# which Python holds its lock for some 15%. Triton 3.6 has gcc build a launcher of 0.5 s for two of five.
_VARIANT_S, _LAUNCHER_S, _HELD = 0.7, 0.2, 0.15
_VARIANTS_OF_8B = 37
# A start imports and opens the device, and in the end measures and captures steps. Weights come from memory: threads
# copy them to pinned pages, which the device reads. The three are assumptions: `scripts/gpu-check quick` measures their
# sum, with weights that it draws.
_OPEN_S, _CAPTURE_S, _WEIGHT_GB_S = 4.0, 3.0, 10.0
DRAWN_GB_S = 2.0  # of random weights, which `scripts/gpu-check` draws


def compile_s(num_variants: int, cores: int) -> float:
    """Return the seconds that compiling takes on so many processors."""
    return num_variants * (_VARIANT_S + _LAUNCHER_S) * (_HELD + (1 - _HELD) / cores)


def ready_s(
    num_variants: int, weight_gb: float, cores: int = 16, has_archive: bool = False, gb_s: float = _WEIGHT_GB_S
) -> float:
    """Return the seconds from the start of a process to an engine that is ready, with weights that come at `gb_s`.
    Kernels are compiled beside the loading of weights, unless an archive has them."""
    compiling_s = 0.0 if has_archive else compile_s(num_variants, cores)
    return _OPEN_S + max(weight_gb / gb_s, compiling_s) + _CAPTURE_S


def quick_rows(machine: Machine, has_archive: bool = False) -> dict[str, float]:
    """What `scripts/gpu-check quick` measures -> prediction; `has_archive` says that kernels are compiled before."""
    found: dict[str, float] = {}
    for kind in QUICK_KINDS:
        limits = Limits(describe(LLAMA_3_1_8B), machine, kind)
        found[f"{kind}: engine core ready"] = ready_s(_VARIANTS_OF_8B, 16.0, has_archive=has_archive, gb_s=DRAWN_GB_S)
        for batch in (1, 32, 128):
            found[f"{kind}: decode step, {batch} streams"] = 1e3 * limits.decode_step_s(batch, 576)
            found[f"{kind}: output, {batch} streams, 512 in, 128 out"] = limits.output_rate(batch, 512, 128)
            if kind == "bfloat16":
                found[f"http: served: output, {batch} at once"] = limits.output_rate(batch, 512, 128)
        for length in (512, 4096):
            # A prompt reads all weights, however short it is.
            seconds = max(limits.prefill_s(length, length // 2), limits.decode_step_s(1, length))
            found[f"{kind}: prompt of {length}"] = 1e3 * seconds
        # Steps have 8,192 tokens at most, so half of 32 prompts are in the first.
        found[f"{kind}: first token at 32 streams, median"] = 1e3 * limits.prefill_s(16 * 512, 256)
        found[f"{kind}: first token at 32 streams, last"] = 1e3 * limits.prefill_s(32 * 512, 256)
        found[f"{kind}: output, 256 at once, 128 in, 128 out"] = limits.output_rate(256, 128, 128)
    found |= {f"experts: decode step, {batch} streams": 1e3 * experts_step_s(machine, batch) for batch in (1, 32, 128)}
    return found


def experts_step_s(machine: Machine, batch: int) -> float:
    """Return the seconds of a decode step of `QWEN3_EXPERTS`: weights of the experts that a batch reaches, at the rate
    of a copy, and launches."""
    config = QWEN3_EXPERTS
    hidden, layers, num_experts = config["hidden_size"], config["num_hidden_layers"], config["num_experts"]
    reached = num_experts * (1 - (1 - config["num_experts_per_tok"] / num_experts) ** batch)
    attention = hidden * config["head_dim"] * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    experts = reached * 3 * hidden * config["moe_intermediate_size"]
    elements = layers * (attention + experts) + config["vocab_size"] * hidden
    launches = KERNELS_PER_EXPERTS_LAYER * layers + KERNELS_PER_STEP
    return 2 * elements / (machine.copy_gbs * 1e9) + launches * (SMALL_KERNEL_S + machine.between_s)


def rows(limits: Limits) -> list[tuple[str, str, float]]:
    """(what, unit, prediction) of everything that `scripts/gpu-check` measures of the 8B model."""
    step = limits.decode_step_s(1, 576)
    found = [("decode, 1 row: share of the copy bandwidth", "%", 100 * limits.weights_s() / step)]
    batches = (1, 32, 64, 128, 256)
    found += [(f"decode step, {batch} rows", "ms", 1e3 * limits.decode_step_s(batch, 576)) for batch in batches]
    for kind in FEW_BITS:
        of_kind = Limits(describe(LLAMA_3_1_8B), limits.machine, kind)
        found += [(f"{kind}: step, {batch} rows", "ms", 1e3 * of_kind.decode_step_s(batch, 576)) for batch in (1, 128)]
    between = 100 * limits.between_s() / limits.decode_step_s(64, 576)
    found.append(("decode step, 64 rows: outside kernels", "%", between))
    kernels = {kernel.name: 1e6 * kernel.launches * kernel.seconds for kernel in limits.decode_kernels(64, 576)}
    products = sum(kernels[name] for name in limits.products)
    for name, us in {"products": products, **kernels}.items():
        found.append((f"decode step, 64 rows: {name}", "us", us))
    for batch in (1, 32, 64, 128, 256):
        found.append((f"output, {batch} at once, 512 in, 128 out", "tok/s", limits.output_rate(batch, 512, 128)))
    seconds = limits.prefill_s(8192, 1024)
    found.append(("prefill, prompts of 2048", "tok/s", 8192 / seconds))
    found.append(("prefill: share of the matrix rate", "%", 100 * limits.prefill_share(8192, 1024, seconds)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=MACHINES, default="h100")
    parser.add_argument("--copy-gbs", type=float)
    parser.add_argument("--tflops", type=float)
    parser.add_argument("--steps", action="store_true", help="decode steps by rows and keys, and each one's kernels")
    args = parser.parse_args()
    known = MACHINES[args.device]
    machine = replace(known, copy_gbs=args.copy_gbs or known.copy_gbs, tflops=args.tflops or known.tflops)
    limits = Limits(describe(LLAMA_3_1_8B), machine)
    print(f"Llama-3.1-8B in bfloat16 at {machine.copy_gbs:.0f} GB/s and {machine.tflops:.0f} TFLOP/s")
    if not args.steps:
        for what, unit, value in rows(limits):
            print(f"{what:50}{value:10.1f} {unit}")
        return
    names = [kernel.name for kernel in limits.decode_kernels(1, 1)]
    print("".join(f"{name:>20}" for name in ("rows", "keys", "step, ms", *(f"{name}, us" for name in names))))
    for context in (577, 4096, 32768):
        for batch in (1, 16, 32, 64, 128, 256):
            kernels = limits.decode_kernels(batch, context)
            cells = [f"{1e3 * limits.decode_step_s(batch, context):.2f}", *(f"{1e6 * k.seconds:.1f}" for k in kernels)]
            print("".join(f"{cell:>20}" for cell in (batch, context, *cells)))


if __name__ == "__main__":
    main()
