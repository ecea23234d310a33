"""Small random-weight models give the same logits as `transformers` in float32, whatever the architecture's settings.

Checkpoints are written as safetensors by `transformers` and read by Octavo; logits are taken with a logits processor,
the way a user would, so the whole engine is between the weights and the numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from octavo import LLM, SamplingParams

VOCAB = 384
PROMPT_LENGTHS = (1, 7, 33, 70)


def sizes(heads: int, kv_heads: int, head_size: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | more


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

# The eight: head ratios 1, 3, 8; head sizes 64, 80, 128; tied and untied; biases; llama3 and linear scaling.
MODELS: dict[str, PretrainedConfig] = {
    "llama ratio 1, head 64, untied": LlamaConfig(**sizes(2, 2, 64, tie_word_embeddings=False)),
    "llama ratio 3, head 64, tied": LlamaConfig(**sizes(3, 1, 64, tie_word_embeddings=True)),
    "llama ratio 8, head 80, untied": LlamaConfig(**sizes(8, 1, 80, tie_word_embeddings=False)),
    "llama ratio 8, head 128, tied": LlamaConfig(**sizes(8, 1, 128, tie_word_embeddings=True)),
    "llama ratio 3, head 80, all biases": LlamaConfig(**sizes(6, 2, 80, attention_bias=True, mlp_bias=True)),
    "llama ratio 1, head 128, attention biases, tied": LlamaConfig(
        **sizes(2, 2, 128, attention_bias=True, tie_word_embeddings=True)
    ),
    "llama 3 rope scaling": LlamaConfig(**sizes(3, 1, 64, rope_parameters=LLAMA3_ROPE)),
    "linear rope scaling": LlamaConfig(**sizes(6, 2, 64, rope_parameters=LINEAR_ROPE, tie_word_embeddings=True)),
    "mistral with a sliding window": MistralConfig(**sizes(6, 2, 64, sliding_window=20)),
    "qwen2, biases on query, key and value": Qwen2Config(**sizes(6, 2, 64)),
    "qwen3, norms on query and key": Qwen3Config(**sizes(6, 2, 64)),
    "phi3, fused projections": Phi3Config(**sizes(6, 2, 16)),
    "granite, four multipliers": GraniteConfig(
        **sizes(
            6, 2, 16, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=2.0
        )
    ),
    "smollm3, layers without positions": SmolLM3Config(**sizes(6, 2, 16, no_rope_layers=[1, 0, 1])),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path, tiny_tokenizer: Path) -> None:
    config = MODELS[name]
    torch.manual_seed(list(MODELS).index(name))
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            # Larger than the usual initialisation, so that attention is far from uniform and biases count.
            scale = 0.2 if parameter_name.endswith("bias") else 0.08
            if parameter.dim() > 1 or parameter_name.endswith("bias"):
                parameter.normal_(std=scale)
            else:
                parameter.uniform_(0.5, 1.5)
    reference.save_pretrained(tmp_path)
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in PROMPT_LENGTHS]

    llm = LLM(
        str(tmp_path), tokenizer=str(tiny_tokenizer), dtype="float32", max_model_len=128, max_num_batched_tokens=40,
        num_gpu_blocks_override=64, check_invariants=True,
    )  # fmt: skip
    found: dict[tuple[int, ...], torch.Tensor] = {}

    def keep(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        found[(*prompt, *output)] = logits.clone()
        return logits

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logits_processors=[keep])
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    assert len(found) == len(prompts) * 8
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        for length in range(len(output.prompt_token_ids), len(tokens)):
            torch.testing.assert_close(found[tuple(tokens[:length])], expected[length - 1], atol=1e-4, rtol=0)
