"""Time of a layer of experts against how many of them are active, beside the limit that reading their bytes sets.

    python benchmarks/experts.py [--format Q4_1] [--seconds 1.0] [--bandwidth-gbs 40]
    python benchmarks/experts.py --folder shape            # config.json, for --load-format dummy
    python benchmarks/experts.py --gguf shape.gguf --format Q4_1    # random weights, for us and others

The shape is that of Qwen3-30B-A3B, cut to 64 experts and 4 layers: 1.6 billion weights. The limit is the bytes of the
experts that the tokens chose, each read once, at the rate at which all threads together read memory in this run. The
layer is routing, grouping and both products, for random tokens; a layer's experts (300 million weights) fit no cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from octavo import _cpu
from octavo.ops import Routing, cpu
from octavo.quantization import StoredWeight

HIDDEN, INNER, NUM_EXPERTS, TOP_K, NUM_LAYERS, VOCAB = 2048, 768, 64, 8, 4, 151936
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
    "intermediate_size": 6144, "moe_intermediate_size": INNER, "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": VOCAB, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip


def best_s(call: Callable[[], object], seconds: float) -> float:
    """The shortest time of a call, tried for that long."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def bandwidth_gbs(seconds: float) -> float:
    """The better of a sum and of a product of one row with a matrix that no cache holds."""
    threads = _cpu.num_threads()
    numbers = np.ones(1 << 25)  # 256 MiB: no cache holds it
    parts = np.array_split(numbers, threads)
    with ThreadPoolExecutor(threads) as pool:
        sum_gbs = numbers.nbytes / best_s(lambda: list(pool.map(np.sum, parts)), seconds) / 1e9
    matrix = np.ones((1 << 15, 1 << 12), ml_dtypes.bfloat16)
    weight = cpu.pack_linear([StoredWeight("BF16", {"data": matrix}, matrix.shape)])
    row = np.ones((1, 1 << 12), ml_dtypes.bfloat16)
    return max(sum_gbs, weight.num_bytes / best_s(lambda: cpu.linear(row, weight), seconds) / 1e9)


def random_floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)


def stored(rng: np.random.Generator, kind: str, n: int, k: int) -> StoredWeight:
    values = random_floats(rng, n, k)
    if kind in ("BF16", "INT8"):
        return StoredWeight(kind, {"data": values.astype(ml_dtypes.bfloat16)}, (n, k))
    import gguf

    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return StoredWeight(kind, {"data": data}, (n, k))


def measure(kind: str, seconds: float, bandwidth: float | None) -> None:
    rng = np.random.default_rng(0)
    print(f"packing {NUM_EXPERTS} experts of {kind} ...", flush=True)
    # Copies of few experts: what they hold does not matter, where they lie does.
    gates, downs = ([stored(rng, kind, n, k) for _ in range(4)] for n, k in ((INNER, HIDDEN), (HIDDEN, INNER)))
    gate_up = cpu.stack_experts(
        (cpu.pack_linear([gates[e % 4], gates[(e + 1) % 4]], gated=True) for e in range(NUM_EXPERTS)), NUM_EXPERTS
    )
    down = cpu.stack_experts((cpu.pack_linear([downs[e % 4]]) for e in range(NUM_EXPERTS)), NUM_EXPERTS)
    expert_bytes = (gate_up.num_bytes + down.num_bytes) / NUM_EXPERTS
    rate = bandwidth or bandwidth_gbs(seconds)
    print(f"{_cpu.isa()}, {_cpu.num_threads()} threads, {rate:.1f} GB/s, {expert_bytes / 1e6:.2f} MB an expert")
    print("tokens  active experts      ms  limit ms  of the limit")
    for num_tokens in TOKENS:
        # Several draws in turn, so that a step does not find the experts of the last one in a cache.
        steps = []
        for _ in range(8):
            x = rng.standard_normal((num_tokens, HIDDEN), np.float32).astype(ml_dtypes.bfloat16)
            steps.append((x, rng.standard_normal((num_tokens, NUM_EXPERTS), np.float32)))
        active = sum(len(np.unique(cpu.route(logits, Routing(TOP_K))[0])) for _, logits in steps) / len(steps)

        def layers(steps: list[tuple[Any, Any]] = steps) -> None:
            for x, logits in steps:
                ids, weights = cpu.route(logits, Routing(TOP_K))
                cpu.experts(x, ids, weights, gate_up, down)

        found_ms = best_s(layers, seconds) / len(steps) * 1e3
        limit_ms = active * expert_bytes / rate / 1e6
        print(f"{num_tokens:6d}  {active:14.1f}  {found_ms:6.2f}  {limit_ms:8.2f}  {limit_ms / found_ms:11.0%}")


def write_gguf(path: Path, kind: str) -> None:
    import gguf

    rng, arch = np.random.default_rng(0), "qwen3moe"
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(INNER)
    # A vocabulary of numbers: the file is measured, not talked to.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"{i}" for i in range(VOCAB)])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:  # of experts, all alike
        data = np.stack([gguf.quants.quantize(random_floats(rng, *shape[-2:]), quantization)] * shape[0])
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantization)

    def add_ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    query, kv = CONFIG["num_attention_heads"] * CONFIG["head_dim"], CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    data = gguf.quants.quantize(random_floats(rng, VOCAB, HIDDEN), quantization)
    writer.add_tensor("token_embd.weight", data, raw_dtype=quantization)
    add_ones("output_norm", HIDDEN)
    for i in range(NUM_LAYERS):
        for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", 128), ("attn_k_norm", 128)):
            add_ones(f"blk.{i}.{name}", size)
        matrices = (("attn_q", query, HIDDEN), ("attn_k", kv, HIDDEN), ("attn_v", kv, HIDDEN),
                    ("attn_output", HIDDEN, query))  # fmt: skip
        for name, n, k in matrices:
            matrix = gguf.quants.quantize(random_floats(rng, n, k), quantization)
            writer.add_tensor(f"blk.{i}.{name}.weight", matrix, raw_dtype=quantization)
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", random_floats(rng, NUM_EXPERTS, HIDDEN))
        add(f"blk.{i}.ffn_gate_exps", NUM_EXPERTS, INNER, HIDDEN)
        add(f"blk.{i}.ffn_up_exps", NUM_EXPERTS, INNER, HIDDEN)
        add(f"blk.{i}.ffn_down_exps", NUM_EXPERTS, HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="Q4_1", choices=["BF16", "INT8", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each figure is tried")
    parser.add_argument("--bandwidth-gbs", type=float, help="instead of measuring it")
    parser.add_argument("--folder", type=Path, help="write config.json there and end")
    parser.add_argument("--gguf", type=Path, help="write such a file with random weights and end")
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    elif args.gguf is not None:
        write_gguf(args.gguf, args.format)
    else:
        measure(args.format, args.seconds, args.bandwidth_gbs)


if __name__ == "__main__":
    main()
