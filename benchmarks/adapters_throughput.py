"""What adapters cost in output tokens a second, by this engine or by vLLM: the same script for both.

    python benchmarks/adapters_throughput.py FOLDER [--engine octavo|vllm] [--requests 64] [--tokens 128] [--rounds 3]

FOLDER holds a Llama in Hugging Face's layout. All requests are asked for at once: of the base model on an engine
without LoRA, then on one with it; with one adapter of rank 16 on all linear layers; over 16 of them. Rounds take turns,
and the best of each counts. vLLM's Python wants -P, or it takes kernels.py beside this file for a package of that name.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 16
ADAPTERS = 16
PROMPT_TOKENS = 32


def write_adapter(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Random factors for the linear layers of a Llama."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (num_out, num_in) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            a = generator.standard_normal((RANK, num_in)) / num_in**0.5
            tensors[f"{module}.lora_A.weight"] = a.astype(np.float32)
            b = generator.standard_normal((num_out, RANK)) * 0.02
            tensors[f"{module}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [name.split(".")[1] for name in shapes]
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=["octavo", "vllm"], default="octavo")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.engine == "vllm":
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
    else:
        from octavo import LLM, LoRARequest, SamplingParams

    common: dict[str, Any] = {
        "model": str(args.model), "dtype": "bfloat16", "max_num_seqs": args.requests, "max_model_len": 1024,
        "enable_prefix_caching": False,
    }  # fmt: skip
    if args.engine == "vllm":
        common["gpu_memory_utilization"] = 0.2  # of the machine's memory: there are two engines
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    generator = random.Random(0)
    prompts = [
        {"prompt_token_ids": [generator.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]}
        for _ in range(args.requests)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((args.model / "config.json").read_text())
        adapters = []
        for i in range(ADAPTERS):
            write_adapter(Path(folder) / str(i), config, i)
            adapters.append(LoRARequest(str(i), i + 1, str(Path(folder) / str(i))))
        with_lora = LLM(enable_lora=True, max_loras=ADAPTERS, max_lora_rank=RANK, **common)
        kinds: dict[str, tuple[Any, list[Any] | None]] = {
            "no LoRA": (LLM(**common), None), "base only": (with_lora, None),
            "one adapter": (with_lora, [adapters[0]] * args.requests),
            "mixed": (with_lora, generator.choices(adapters, k=args.requests)),
        }  # fmt: skip
        warm = SamplingParams(temperature=0, max_tokens=1)
        with_lora.generate(prompts[:ADAPTERS], warm, use_tqdm=False, lora_request=adapters[: args.requests])
        best = dict.fromkeys(kinds, float("inf"))
        for _ in range(args.rounds):
            for name, (llm, asked) in kinds.items():
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
                best[name] = min(best[name], time.perf_counter() - begin)
    base = best["no LoRA"]
    for name, took in best.items():
        rate = args.requests * args.tokens / took
        print(f"{args.engine}: {name:12} {rate:7.0f} tokens/s, {100 * (took / base - 1):+6.1f}% of time", flush=True)


if __name__ == "__main__":
    main()
