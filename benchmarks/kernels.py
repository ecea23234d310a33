"""Prints what the native kernels reach: GB/s and GFLOP/s of the products of SmolLM2-135M (of K types:
Llama-3.2-1B), and attention's times.

    python benchmarks/kernels.py [--dtype bfloat16|float32|Q4_1|...]
                                 [--only linear|attention|latent|call|pack|superblocks|instructions]

Weights and caches rotate through more memory than the caches of a processor hold, as they do in a model's step. Each
figure is the best of several runs, since other programs can only make a run slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo import _cpu
from octavo.ops import LayerKVCache, cpu, cpu_pack
from octavo.ops.cpu_memory import zeros
from octavo.quantization import StoredWeight, layout_of, unpack
from octavo.quantization.formats import BLOCK_TYPES
from octavo.quantization.unpacking import as_stored

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)]
NUM_LAYERS = 30
# Those of Llama-3.2-1B, for formats whose superblocks do not divide the rows of the former.
WIDE_SHAPES = [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048, 128256)]
WIDE_LAYERS = 16
GATED = [SHAPES[2], WIDE_SHAPES[2]]
ROWS = [1, 6, 16, 64, 256]
# (bits, group, minima) of matrices that come from these formats.
INTEGERS = {"Q4_0": (4, 32, False), "Q4_1": (4, 32, True), "Q8_0": (8, 32, False)}
# Formats that keep a file's superblocks, of 256 elements, and where in them the float16 units lie.
SUPERBLOCKS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
# Others whose codes are indices into a table, and where their float16 scales lie.
TABLES: dict[str, tuple[int, ...]] = {"IQ4_NL": (0,), "MXFP4": (), "NVFP4": ()}
OUTPUTS = {
    "Q4_0": "Q8_0",
    "Q4_1": "Q8_0",
    "Q4_K": "Q6_K",
    "Q5_K": "Q6_K",
    "Q3_K": "Q6_K",
    "Q2_K": "Q6_K",
    "IQ4_XS": "Q6_K",
}  # of a model's output matrix, where it has another format
CACHES = ["int8", "float8_e4m3fn", "float8_e5m2"]  # beside those of the dtype
ONLY = ["linear", "attention", "latent", "call", "pack", "superblocks", "instructions"]
ROTATED_BYTES = 200e6
ROTATED_COPIES = 30
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
RANDOM = np.random.default_rng(0)


def random(*shape: int, dtype: str = "float32") -> NDArray[Any]:
    return RANDOM.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def pack(matrix: NDArray[Any], gated: bool = False) -> cpu.PackedWeight:
    form = "F32" if matrix.dtype == np.float32 else "BF16"
    parts = np.split(matrix, 2) if gated else [matrix]
    return cpu.pack_linear([StoredWeight(form, {"data": part}, part.shape) for part in parts], None, gated)


def best_time_s(call: Callable[[int], object], seconds: float, batch: int = 1) -> float:
    """The best mean over `batch` consecutive calls; `call` gets a running number."""
    call(0)
    best, number, end = float("inf"), 0, time.perf_counter() + seconds
    while number < 3 * batch or time.perf_counter() < end:
        begin = time.perf_counter()
        for i in range(batch):
            call(number + i)
        best = min(best, (time.perf_counter() - begin) / batch)
        number += batch
    return best


def random_integers(n: int, k: int, bits: int, group: int, minima: bool, gated: bool) -> cpu.PackedWeight:
    """A packed matrix of random codes, all of whose scales and minima are one small number."""
    blocks, code_bytes = -(-k // _cpu.QBLOCK), _cpu.PANEL * _cpu.QBLOCK * bits // 8
    scale_bytes = _cpu.PANEL * (_cpu.QBLOCK // group) * 2
    block = np.full(code_bytes + scale_bytes + _cpu.PANEL * 4 * minima, 0x20, np.uint8)
    data = zeros(-(-n // _cpu.PANEL) * blocks * len(block)).reshape(-1, len(block))
    data[:] = block
    data[:, :code_bytes] = RANDOM.integers(0, 256, (1, code_bytes), np.uint8)
    form = _cpu.WEIGHT_INT4 if bits == 4 else _cpu.WEIGHT_INT8
    return cpu.packed_weight(data.reshape(-1), (n, k), form, None, gated, group, minima)


def random_blocks(n: int, k: int, name: str, gated: bool, is_expanded: bool = False) -> cpu.PackedWeight:
    """A packed matrix of random blocks with one unit. `is_expanded`: in the layout that products see of it, and without
    a table."""
    block = BLOCK_TYPES[name]
    row = RANDOM.integers(0, 256, (k // block.block_size, block.block_bytes), np.uint8)
    for place in (SUPERBLOCKS | TABLES)[name]:
        row[:, place : place + 2] = np.array([0.01], np.float16).view(np.uint8)
    if name == "MXFP4":
        row[:, 0] = 120
    rows = n // 2 if gated else n
    part = StoredWeight(name, {"data": np.repeat(row.reshape(1, -1), rows, axis=0)}, (rows, k))
    if is_expanded and layout_of(name).table is not None:
        codes = unpack(part)
        part = as_stored(codes.widened(codes.layout.without_table))
    with patch.object(cpu_pack, "_KEPT", {} if is_expanded else cpu_pack._KEPT):
        return cpu.pack_linear([part] * (2 if gated else 1), None, gated)


def bench_linear(name: str, seconds: float) -> None:
    """As in a model's step: one replay over many matrices, inputs of integer matrices quantized already. The last line
    is all matrices of the model in turn, as tokens per second; its output matrix (`OUTPUTS`) multiplies one row of a
    prompt (64 rows and more)."""
    print(f"\nlinear, {name}\n{'K':>6}{'N':>7}" + "".join(f"{f'{r} rows':>22}" for r in ROWS))

    shapes, num_layers = (WIDE_SHAPES, WIDE_LAYERS) if name in SUPERBLOCKS else (SHAPES, NUM_LAYERS)

    def make(k: int, n: int, name: str = name) -> cpu.PackedWeight:
        gated = (k, n) in GATED
        if name in SUPERBLOCKS:
            return random_blocks(n, k, name, gated)
        if name in INTEGERS:
            return random_integers(n, k, *INTEGERS[name], gated=gated)
        return pack(random(n, k, dtype=name), gated)

    def replay(packed: list[cpu.PackedWeight], output: list[cpu.PackedWeight]) -> list[float]:
        """Seconds of one replay at each number of rows."""
        program = cpu.Program()
        inputs = {}
        for k in {weight.in_features for weight in packed}:
            x = random(max(ROWS), k)
            inputs[k] = program.input(cpu.quantize(x, make(k, 32)) if name not in DTYPES else x.astype(DTYPES[name]))
        for part, per_sample in ((packed, False), (output, True)):
            with program.record(per_sample):
                for weight in part:
                    multiply = cpu.linear_silu_and_mul if weight.gated else cpu.linear
                    multiply(inputs[weight.in_features], weight, out_dtype="float32")
        return [
            best_time_s(lambda _, rows=rows: program.run(rows, 0, rows if rows < 64 else 1), seconds) for rows in ROWS
        ]

    for k, n in shapes:
        packed = [make(k, n)]
        num_bytes = packed[0].num_bytes
        copies = max(1, round(ROTATED_BYTES / num_bytes))
        packed += [make(k, n) for _ in range(copies - 1)]
        line = f"{k:>6}{n:>7}"
        for rows, taken in zip(ROWS, replay(packed, []), strict=True):
            line += f"{num_bytes * copies / taken / 1e9:>9.1f} GB/s{2 * rows * k * n * copies / taken / 1e9:>6.0f} GF"
        print(line, flush=True)
    packed = [make(k, n) for _ in range(num_layers) for k, n in shapes[:4]]
    times = replay(packed, [make(*shapes[4], name=OUTPUTS.get(name, name))])
    print("        model" + "".join(f"{rows / t:>16.0f} tok/s" for rows, t in zip(ROWS, times, strict=True)))


def bench_superblocks(seconds: float) -> None:
    """Superblocks and tables as they lie against the layout that products see of them: medians of the ratios of runs in
    turn."""
    print("\nsuperblocks and tables, times relative to those of their expanded layouts")
    for name in SUPERBLOCKS | TABLES:
        for k, n in [(2048, 2048), (8192, 1024)]:
            x = random(64, k)
            programs, held, sizes = [], [], []  # programs name addresses
            for is_expanded in (False, True):
                packed = [random_blocks(n, k, name, False, is_expanded) for _ in range(ROTATED_COPIES)]
                inputs = cpu.Program.input(cpu.quantize(x, packed[0]))
                held.append((packed, inputs))
                programs.append(cpu.Program())
                with programs[-1].record(False):
                    for weight in packed:
                        cpu.linear(inputs, weight, out_dtype="float32")
                sizes.append(packed[0].num_bytes)
            line = f"{name}{k:>6}{n:>6}{sizes[0] * 8 / n / k:>8.4f} bits ({sizes[1] * 8 / n / k:.1f})"
            for rows in (1, 16, 64):
                ratios, times, end = [], [], time.perf_counter() + seconds
                while len(ratios) < 5 or time.perf_counter() < end:
                    begin = time.perf_counter()
                    programs[0].run(rows, 0, rows)
                    middle = time.perf_counter()
                    programs[1].run(rows, 0, rows)
                    times.append((middle - begin) / ROTATED_COPIES)
                    ratios.append((middle - begin) / (time.perf_counter() - middle))
                line += f"{median(ratios):>8.2f} at {rows} ({sizes[0] / median(times) / 1e9:.1f} GB/s)"
            print(line, flush=True)


def bench_instructions(name: str, seconds: float) -> None:
    """The best set of instructions against the next best one: billions of products a second and thread of either, and
    the ratio of times, the least of runs in turn."""
    k, n, copies, sets = 2048, 8192, 6, _cpu.available_isas()[:2]
    packed = [
        random_blocks(n, k, name, False) if name in SUPERBLOCKS else random_integers(n, k, *INTEGERS[name], False)
        for _ in range(copies)
    ]
    x = cpu.Program.input(cpu.quantize(random(256, k), packed[0]))
    programs = {}  # plans are of the set that was chosen
    for isa in sets:
        _cpu.set_isa(isa)
        programs[isa] = cpu.Program()
        with programs[isa].record(False):
            for weight in packed:
                cpu.linear(x, weight, out_dtype="float32")
    line = f"{name}, {sets[1]} and {sets[0]}"
    for rows in (8, 13, 16, 32, 64, 256):
        least = dict.fromkeys(sets, float("inf"))
        for _ in range(6):
            for isa in sets:
                _cpu.set_isa(isa)
                run = programs[isa].run
                taken = best_time_s(lambda _, run=run, rows=rows: run(rows, 0, rows), seconds / 6)
                least[isa] = min(least[isa], taken)
        rates = [rows * k * n * copies / least[isa] / 1e9 / _cpu.num_threads() for isa in reversed(sets)]
        line += f"{rows:>6}: {rates[0]:.0f}, {rates[1]:.0f} ({rates[0] / rates[1]:.2f})"
    _cpu.set_isa(sets[0])
    print(line, flush=True)


def fill_cache(cache: LayerKVCache, dtype: str) -> None:
    """With numbers like those of a model: random ones, or bytes with one scale."""
    if dtype in DTYPES:
        few = random(1 << 16, dtype=dtype)
        for part in cache.arrays:
            part.reshape(-1)[:] = np.resize(few, part.size)
        return
    few = RANDOM.integers(0, 256, 1 << 16).astype(np.uint8)
    for part in cache.arrays:
        part.view(np.uint8).reshape(-1)[:] = np.resize(few, part.size)
    scales = np.ascontiguousarray(np.full(2, 0.02, ml_dtypes.bfloat16)).view(np.uint8)
    cache.key.view(np.uint8)[:, :, -1] = scales


def bench_attention(
    dtype: str, seconds: float, cache_dtype: str | None = None, kv_heads: int = 3, ratio: int = 3, head_size: int = 64
) -> None:
    cache_dtype = cache_dtype or dtype
    print(f"\nattention, {dtype}, cache of {cache_dtype}, {kv_heads} x {ratio} heads of {head_size}")
    for num_seqs, queries, context in [
        (1, 1, 192), (1, 1, 512), (1, 1, 2048), (1, 1, 8192), (1, 1, 32768), (16, 1, 192), (16, 1, 512), (16, 1, 4096),
        (64, 1, 192), (64, 1, 1024), (1, 128, 128), (1, 512, 512), (1, 512, 4096), (1, 2048, 2048),
    ]:  # fmt: skip
        per_seq = -(-context // 16)
        one = cpu.allocate_kv_cache(1, 16, kv_heads, head_size, cache_dtype)
        cache_bytes = num_seqs * context * sum(part.nbytes for part in one.arrays) // 16
        layers = max(1, min(30, round(ROTATED_BYTES / cache_bytes)))
        caches: list[LayerKVCache] = []
        for _ in range(layers):
            caches.append(cpu.allocate_kv_cache(num_seqs * per_seq, 16, kv_heads, head_size, cache_dtype))
            fill_cache(caches[-1], cache_dtype)
        tables = RANDOM.permutation(num_seqs * per_seq).astype(np.int32).reshape(num_seqs, per_seq)
        starts = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(queries)
        lens = np.full(num_seqs, context, np.int32)
        query = random(num_seqs * queries, kv_heads * ratio, head_size, dtype=dtype)
        taken = best_time_s(
            lambda i: cpu.paged_attention(query, caches[i % layers], tables, starts, lens, 0.125),  # noqa: B023
            seconds,
        )
        pairs = num_seqs * (queries * context - queries * (queries - 1) / 2)
        flops = 4 * pairs * kv_heads * ratio * head_size
        print(
            f"{num_seqs:>4} seqs x {queries:>4} rows, {context:>5} keys: {taken * 1e6:>9.1f} us"
            f"{cache_bytes / taken / 1e9:>8.1f} GB/s{flops / taken / 1e9:>8.1f} GFLOP/s",
            flush=True,
        )


def bench_latent(dtype: str, seconds: float, heads: int = 16, latent: int = 512, rotated: int = 64) -> None:
    """Attention of DeepSeek-V2-Lite as it is computed, on compressed vectors ("absorbed"), and with keys and values
    made of them for each step ("plain"): all kernels whose work differs."""
    plain, values = 128, 128
    print(f"\nlatent attention, {dtype}, {heads} heads, {latent} + {rotated} elements a token")
    key_of, value_of = (
        cpu.stack_experts([pack(random(n, k, dtype=dtype)) for _ in range(heads)], heads)
        for n, k in ((latent, plain), (values, latent))
    )
    up = pack(random(heads * (plain + values), latent, dtype=dtype))
    for num_seqs, queries, context in [
        (1, 1, 1024), (1, 1, 8192), (16, 1, 1024), (1, 128, 128), (1, 512, 512), (1, 512, 4096), (1, 2048, 2048),
    ]:  # fmt: skip
        per_seq = -(-context // 16)
        compressed = cpu.allocate_kv_cache(num_seqs * per_seq, 16, 1, rotated, dtype, latent)
        # As its kernel has one size for both, values are as wide as keys.
        full = cpu.allocate_kv_cache(num_seqs * per_seq, 16, heads, plain + rotated, dtype)
        few = random(1 << 16, dtype=dtype)
        for cache in (compressed, full):
            for part in (cache.key, cache.value):
                part.reshape(-1)[:] = np.resize(few, part.size)
        tables = RANDOM.permutation(num_seqs * per_seq).astype(np.int32).reshape(num_seqs, per_seq)
        starts = np.arange(num_seqs + 1, dtype=np.int32) * np.int32(queries)
        lens = np.full(num_seqs, context, np.int32)
        query = random(num_seqs * queries, heads, plain + rotated, dtype=dtype)
        vectors = random(num_seqs * context, latent, dtype=dtype)

        def absorbed(_: int) -> None:
            met = cpu.linear_by_head(query[:, :, rotated:], key_of)  # noqa: B023
            rows = query[:, :, :rotated]  # noqa: B023
            cpu.linear_by_head(cpu.latent_attention(met, rows, compressed, tables, starts, lens, 0.1), value_of)  # noqa: B023

        def made(_: int) -> None:
            cpu.linear(vectors, up)  # noqa: B023
            cpu.paged_attention(query, full, tables, starts, lens, 0.1)  # noqa: B023

        times = [best_time_s(call, seconds) for call in (absorbed, made)]
        print(
            f"{num_seqs:>4} seqs x {queries:>4} rows, {context:>5} keys: absorbed {times[0] * 1e3:>8.2f} ms, plain "
            f"{times[1] * 1e3:>8.2f} ms",
            flush=True,
        )


def bench_calls(dtype: str, seconds: float) -> None:
    print(f"\none row, {dtype}: time of a call, Python included")
    hidden, bias = random(1, 576, dtype=dtype), random(576, dtype=dtype)
    weight, logits = np.ones(576, DTYPES[dtype]), random(1, 49152)
    small = pack(random(32, 32, dtype=dtype))
    x = random(1, 32, dtype=dtype)
    one, zero, none = np.ones(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.int64)
    words = RANDOM.integers(-(2**31), 2**31, (1, 1536)).astype(np.int32)
    for name, call in {
        "numpy.empty alone": lambda i: np.empty((1, 576), DTYPES[dtype]),
        "linear 32 x 32": lambda i: cpu.linear(x, small),
        "rms_norm 576": lambda i: cpu.rms_norm(hidden, weight, 1e-5),
        "layer_norm 576": lambda i: cpu.layer_norm(hidden, weight, bias, 1e-5),
        "gelu 576": lambda i: cpu.activation(hidden, "gelu"),
        "add 576": lambda i: cpu.add(hidden, hidden, 0.0),
        "argmax 49152": lambda i: cpu.argmax(logits),
        "mask_tokens 49152": lambda i: cpu.mask_tokens(logits, words, none),
        "sample, greedy": lambda i: cpu.sample(logits, zero, none, one, zero, np.zeros(1)),
    }.items():
        print(f"{name:>20}: {best_time_s(call, seconds, 200) * 1e6:6.2f} us", flush=True)


def bench_packing(dtype: str) -> None:
    weights = [random(n, k, dtype=dtype) for k, n in SHAPES[:4] * 30 + SHAPES[4:]]
    total = sum(w.nbytes for w in weights)
    begin = time.perf_counter()
    packed = [pack(w) for w in weights]
    taken = time.perf_counter() - begin
    print(f"\npacking {len(packed)} matrices of {dtype}, {total / 1e6:.0f} MB: {taken * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=[*DTYPES, *INTEGERS, *SUPERBLOCKS], help="default: all")
    parser.add_argument("--only", choices=ONLY)
    parser.add_argument("--kv-cache-dtype", choices=["bfloat16", *CACHES], help="of attention; default: all")
    parser.add_argument("--seconds", type=float, default=0.2, help="time for one figure")
    args = parser.parse_args()
    print(f"{_cpu.isa()}, {_cpu.num_threads()} threads")
    if args.only == "superblocks":
        return bench_superblocks(args.seconds)
    if args.only == "instructions":
        for name in [args.dtype] if args.dtype in (*INTEGERS, *SUPERBLOCKS) else [*INTEGERS, *SUPERBLOCKS]:
            bench_instructions(name, args.seconds)
        return None
    for name in [args.dtype] if args.dtype else [*DTYPES, *INTEGERS, *SUPERBLOCKS]:
        if name in DTYPES:
            if args.only in (None, "pack"):
                bench_packing(name)
            if args.only in (None, "call"):
                bench_calls(name, args.seconds)
        if args.only in (None, "linear"):
            bench_linear(name, args.seconds)
        if name in DTYPES and args.only in (None, "attention"):
            for cache_dtype in [args.kv_cache_dtype] if args.kv_cache_dtype else [name, *CACHES]:
                bench_attention(name, args.seconds, cache_dtype)
        if name in DTYPES and args.only in (None, "latent"):
            bench_latent(name, args.seconds)


if __name__ == "__main__":
    main()
