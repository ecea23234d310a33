"""Which kernels a start compiles, and which ones steps of any size could ask for: JSON, from a process of its own.

`python -m tests.ops.triton.reachable MODEL FORMAT CAPABILITY SIZE [adapters] [stages]` outlines two layers of one of
`MODELS`, whose matrices are in the format, as the first of so many workers, for a GPU that is not there (`compiling`).
With `stages` each layer is a stage. Nothing is compiled: Triton is asked which variant of a kernel each launch would
be."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from octavo.pooling_params import PoolingConfig

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
# As wide as Llama-3.1-8B (once with the vocabulary of Llama 2), gpt-oss-20b (sinks, windows, clamped experts),
# Qwen3-30B-A3B (but a token has one expert, so that the most tokens find tiles of few rows), Bloom-7.1B (ALiBi) and
# DeepSeek V3.2 (an index chooses keys).
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama_2": _LLAMA | {"vocab_size": 32000},
    "gpt-oss": _LLAMA | {
        "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    "qwen3-moe": _LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 1,
        "norm_topk_prob": True, "mlp_only_layers": [0],
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"], "vocab_size": 250880, "hidden_size": 4096, "n_layer": 2, "n_head": 32,
        "dtype": "bfloat16",
    },
    "deepseek-v3.2": {
        "architectures": ["DeepseekV32ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
        "max_position_embeddings": 163840, "dtype": "bfloat16",
    },
    "qwen3-vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {"vocab_size": 151936, "num_key_value_heads": 8, "num_hidden_layers": 2, "dtype": "bfloat16"},
    },
    "gemma-3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"num_hidden_layers": 6, "sliding_window": 1024, "dtype": "bfloat16"},
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "d_model": 1280, "decoder_layers": 2,
        "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "vocab_size": 51866, "max_source_positions": 1500,
        "max_target_positions": 448, "dtype": "bfloat16",
    },
    "bert": {
        "architectures": ["BertForSequenceClassification"], "vocab_size": 30522, "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12, "max_position_embeddings": 512,
        "num_labels": 3,
    },
    "mpnet": {
        "architectures": ["MPNetModel"], "vocab_size": 30527, "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 2, "num_attention_heads": 12, "max_position_embeddings": 514, "layer_norm_eps": 1e-5,
    },
    "modernbert": {
        "architectures": ["ModernBertForTokenClassification"], "vocab_size": 50368, "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 4, "num_attention_heads": 12, "num_labels": 3,
    },
}  # fmt: skip
POOLING = {
    "bert": PoolingConfig("classify", "CLS", 3), "mpnet": PoolingConfig("embed", "MEAN", 768),
    "modernbert": PoolingConfig("token_classify", "ALL", 3),
}  # fmt: skip
SEEING = ("qwen3-vl", "gemma-3")
MAX_TOKENS, MAX_SEQS = 8192, 400


class _Formats:
    """A checkpoint's tensors, as far as outlines ask."""

    def __init__(self, matrix_format: str) -> None:
        self._format = matrix_format

    def __contains__(self, name: str) -> bool:
        return True

    def is_untransposed(self, name: str, untransposed_shape: tuple[int, ...] | None = None) -> bool:
        return False

    def matrix_format(self, name: str) -> str:
        return self._format

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Take any shape."""


def main() -> None:
    model, matrix_format, capability, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from octavo.ops.triton import launch
    from tests.ops.triton.compiling import MULTIPROCESSORS, Driver

    driver.set_active(Driver(capability))
    launch._capability = lambda device: divmod(capability, 10)
    launch._num_multiprocessors = lambda device: MULTIPROCESSORS[capability]

    from types import SimpleNamespace

    from octavo.execution.compile_ahead import outline_runners
    from octavo.execution.dummy_steps import DummySteps
    from octavo.layers.tensor_parallel import Shard
    from octavo.models.registry import describe
    from octavo.models.sharding import stage_layers, with_shard
    from octavo.ops import cuda_collectives, load_cuda
    from octavo.ops.triton import outline

    found: set[tuple[str, str]] = set()

    def note(self: Any, key: Any, *args: Any) -> None:
        found.add((self.__name__, str(key)))

    JITFunction._do_compile = note
    num_stages = 2 if "stages" in sys.argv[5:] else 1
    config: Any = SimpleNamespace(
        model=SimpleNamespace(dtype="bfloat16", max_model_len=8192, pooling=POOLING.get(model)),
        cache=SimpleNamespace(block_size=16, dtype="bfloat16"),
        scheduler=SimpleNamespace(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
        media=model in SEEING or None, sound=model == "whisper" or None, lora=None, prompt_embeds=None,
        draft=None,
        stages=lambda description: stage_layers(description, num_stages),
    )  # fmt: skip
    if "adapters" in sys.argv[5:]:
        config.lora = SimpleNamespace(
            max_loras=2, max_rank=16, max_cpu_loras=2, dtype="bfloat16", target_modules=None, memory_bytes=None
        )
    weights: Any = _Formats(matrix_format)
    cuda_collectives._size = size
    description = describe(MODELS[model], pooling=POOLING.get(model))
    description = with_shard(description, Shard(0, size), reproducible=False)
    with outline.outlining(outline._compile):
        stages = [
            DummySteps(runner)
            for runner in outline_runners(config, description, weights, load_cuda(), range(num_stages))
        ]
        for steps in stages:
            steps.warm_up()
        at_start = set(found)
        edges = [edge + d for edge in (*range(128, 2048, 64), MAX_TOKENS) for d in (-1, 0, 1)]
        for num_tokens in sorted({*range(1, 130), *edges, *np.arange(300, MAX_TOKENS, 371).tolist()}):
            if num_tokens <= MAX_TOKENS:
                for num_seqs in {1, num_tokens // 2, min(num_tokens, MAX_SEQS)} - {0}:
                    num_seqs = min(num_seqs, MAX_SEQS)
                    for adapted in {False, config.lora is not None}:
                        for steps in stages:
                            steps.run(num_tokens, num_seqs, num_tokens, adapted)  # all of them may be guesses
    names = sorted({name for name, _ in found})
    late = sorted({name for name, _ in found - at_start})
    print(json.dumps({"kernels": names, "variants": len(at_start), "late": late}))


if __name__ == "__main__":
    main()
