"""Small models of every architecture, as `transformers` makes them, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB = 384


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


class SmallModel(NamedTuple):
    config: PretrainedConfig  # of the reference
    architecture: str = ""  # that Octavo is told, where it is not the reference's

    def reference(self, seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        reference = AutoModelForCausalLM.from_config(self.config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                # Larger than the usual initialisation, so that attention is far from uniform and biases count.
                scale = 0.2 if name.endswith("bias") else 0.08
                if parameter.dim() > 1 or name.endswith("bias"):
                    parameter.normal_(std=scale)
                else:
                    parameter.uniform_(0.5, 1.5)
        if self.architecture:
            reference.config.architectures = [self.architecture]
        return reference

    def save(self, reference: PreTrainedModel, folder: Path) -> None:
        """A checkpoint as Octavo reads it."""
        reference.save_pretrained(folder)
        if self.architecture:
            path = folder / "config.json"
            written = path.read_text()
            changed = written.replace(type(reference).__name__, self.architecture)
            assert changed != written
            path.write_text(changed)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# Head ratios 1, 3, 8; head sizes 64, 80, 128; tied and untied; biases; llama3 and linear scaling; windows by layer.
MODELS: dict[str, SmallModel] = {
    "llama ratio 1, head 64, untied": SmallModel(LlamaConfig(**sizes(2, 2, 64, tie_word_embeddings=False))),
    "llama ratio 3, head 64, tied": SmallModel(LlamaConfig(**sizes(3, 1, 64, tie_word_embeddings=True))),
    "llama ratio 8, head 80, untied": SmallModel(LlamaConfig(**sizes(8, 1, 80, tie_word_embeddings=False))),
    "llama ratio 8, head 128, tied": SmallModel(LlamaConfig(**sizes(8, 1, 128, tie_word_embeddings=True))),
    "llama ratio 3, head 80, all biases": SmallModel(
        LlamaConfig(**sizes(6, 2, 80, attention_bias=True, mlp_bias=True))
    ),
    "llama ratio 1, head 128, attention biases, tied": SmallModel(
        LlamaConfig(**sizes(2, 2, 128, attention_bias=True, tie_word_embeddings=True))
    ),
    "llama 3 rope scaling": SmallModel(LlamaConfig(**sizes(3, 1, 64, rope_parameters=LLAMA3_ROPE))),
    "linear rope scaling": SmallModel(
        LlamaConfig(**sizes(6, 2, 64, rope_parameters=LINEAR_ROPE, tie_word_embeddings=True))
    ),
    "mistral with a sliding window": SmallModel(MistralConfig(**sizes(6, 2, 64, sliding_window=20))),
    # transformers computes Mistral's layer_types in a class of their own.
    "mistral with mixed layer types": SmallModel(
        MinistralConfig(**sizes(6, 2, 64, sliding_window=20, layer_types=MIXED)), "MistralForCausalLM"
    ),
    "qwen2, biases on query, key and value": SmallModel(Qwen2Config(**sizes(6, 2, 64))),
    "qwen2, windows after max_window_layers": SmallModel(
        Qwen2Config(**sizes(6, 2, 16, use_sliding_window=True, sliding_window=20, max_window_layers=1))
    ),
    "qwen3, norms on query and key": SmallModel(Qwen3Config(**sizes(6, 2, 64))),
    "qwen3, mixed layer types": SmallModel(
        Qwen3Config(**sizes(6, 2, 64, use_sliding_window=True, sliding_window=20, layer_types=MIXED))
    ),
    "phi3, fused projections": SmallModel(Phi3Config(**sizes(6, 2, 16))),
    "phi3 with a sliding window": SmallModel(Phi3Config(**sizes(6, 2, 16, sliding_window=20))),
    "granite, four multipliers": SmallModel(
        GraniteConfig(
            **sizes(
                6, 2, 16, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2,
                logits_scaling=2.0,
            )
        )
    ),
    "smollm3, layers without positions": SmallModel(SmolLM3Config(**sizes(6, 2, 16, no_rope_layers=[1, 0, 1]))),
    "smollm3, windows on layers without positions": SmallModel(
        SmolLM3Config(**sizes(6, 2, 16, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=20))
    ),
    "smollm3, mixed layer types": SmallModel(
        SmolLM3Config(
            **sizes(6, 2, 16, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=20, layer_types=MIXED)
        )
    ),
}  # fmt: skip
