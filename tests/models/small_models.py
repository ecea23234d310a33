"""Small models of every architecture, as `transformers` makes them, with random weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODEL_TYPES = {name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
# Its own type is that of the configuration of images and text.
MODEL_TYPES |= {
    "Emu3ForCausalLM": "emu3_text_model", "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text", "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Mistral4ForCausalLM": "mistral4",
}  # fmt: skip


class SmallModel(NamedTuple):
    architecture: str
    settings: dict[str, Any]
    reference_architecture: str = ""  # where transformers computes these settings in another class
    attention: str = "eager"

    def config(self) -> Any:
        name = self.reference_architecture or self.architecture
        # Configurations write into dictionaries that they are given, and some models share them.
        return AutoConfig.for_model(MODEL_TYPES[name], **copy.deepcopy(SPECIAL_TOKENS | self.settings))

    def reference(self, seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        # Some classes are not those that transformers chooses for the configuration's type.
        model_class = getattr(transformers, self.reference_architecture or self.architecture)
        reference = model_class._from_config(self.config(), attn_implementation=self.attention)
        reference = reference.float().eval()
        trained = ("correction_bias", "expert_bias", "layer_scalar")
        buffers = [(name, buffer) for name, buffer in reference.named_buffers() if name.endswith(trained)]
        with torch.no_grad():
            for name, parameter in [*reference.named_parameters(), *buffers]:
                # Larger than the usual initialisation, so that attention is far from uniform and biases count.
                if parameter.dim() > 1 or name.endswith(("bias", "sinks", "alpha_p", "alpha_n", "A_log")):
                    parameter.normal_(std=0.25 if parameter.dim() == 1 else 0.12)
                else:
                    parameter.uniform_(0.5, 1.5)
        reference.config.architectures = [self.architecture]
        return reference

    def save(self, reference: PreTrainedModel, folder: Path) -> None:
        """A checkpoint as Octavo reads it."""
        reference.save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(path.read_text().replace(type(reference).__name__, self.architecture))


def _model(name: str, like: str = "", /, **settings: Any) -> SmallModel:
    """Of a class whose configuration has the usual names for sizes."""
    name += "" if name.endswith("Model") else "ForCausalLM"
    return SmallModel(name, SIZES | settings, like and f"{like}ForCausalLM")


def _old(name: str, /, **settings: Any) -> SmallModel:
    """Of a class whose heads all have keys and values, and that mostly chooses the size of its feed-forward itself."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "num_hidden_layers", "num_attention_heads")}
    name += "" if name.endswith("Model") else "ForCausalLM"
    return SmallModel(name, sizes | {"hidden_size": 64, "max_position_embeddings": 256} | settings)


ROPE = {"rope_theta": 10000.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = ROPE | {
    "rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2}
NARROW: dict[str, Any] = {"sliding_window": 20, "layer_types": MIXED}

MODELS: dict[str, SmallModel] = {
    "llama ratio 1, head 64, untied": _model("Llama", num_attention_heads=2, head_dim=64),
    "llama ratio 3, head 64, tied": _model(
        "Llama", num_attention_heads=3, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True
    ),
    "llama ratio 8, head 80": _model("Llama", num_attention_heads=8, num_key_value_heads=1, head_dim=80),
    "llama ratio 4, head 128": _model("Llama", num_attention_heads=4, num_key_value_heads=1, head_dim=128),
    "llama, all biases": _model("Llama", attention_bias=True, mlp_bias=True),
    "llama, gelu": _model("Llama", hidden_act="gelu"),
    "llama3 rope": _model("Llama", rope_parameters=LLAMA3),
    "linear rope": _model("Llama", rope_parameters=ROPE | {"rope_type": "linear", "factor": 4.0}),
    "yarn rope": _model("Llama", rope_parameters=YARN),
    "yarn rope, attention factor": _model("Llama", rope_parameters=YARN | {"attention_factor": 1.2, "truncate": False}),
    "dynamic rope": _model("Llama", rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 4.0}),
    "proportional rope": _model(
        "Llama", rope_parameters=ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    ),
    "mistral with a sliding window": _model("Mistral", sliding_window=20),
    # transformers computes Mistral's layer_types in a class of their own.
    "mistral with mixed layer types": _model("Mistral", "Ministral", **NARROW),
    "ministral": _model("Ministral", sliding_window=20),
    "ministral 3": _model(
        "Ministral3", rope_parameters=YARN | {
            "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    ),
    "cwm": _model("Cwm", mlp_bias=True, rope_parameters=LLAMA3, sliding_window=20),
    "seed oss": _model("SeedOss", attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "emu 3": _model("Emu3"),
    "qwen2": _model("Qwen2"),
    "qwen2, windows after max_window_layers": _model(
        "Qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": _model("Qwen3"),
    "qwen3, mixed layer types": _model("Qwen3", use_sliding_window=True, **NARROW),
    "phi3": _model("Phi3", head_dim=12),
    "phi3, window, longrope": _model(
        "Phi3", sliding_window=20, hidden_size=64, max_position_embeddings=512, original_max_position_embeddings=256,
        rope_parameters=LONG,
    ),
    "granite": _model("Granite", hidden_size=64, logits_scaling=2.0, **MULTIPLIERS),
    "granite swa": _model(
        "GraniteSWA", hidden_size=64, logits_scaling=2.0, sliding_window=20, num_hidden_layers=3,
        layer_types=[*MIXED, "full_attention"], layer_rope_theta=[500.0, 10000.0, 0.0], **MULTIPLIERS,
    ),
    "hyperclova x": _model("HyperCLOVAX", logits_scaling=0.5, **MULTIPLIERS),
    "hyperclova x, no norms after": _model("HyperCLOVAX", use_post_norm=False),
    "smollm3, layers without positions": _model("SmolLM3", hidden_size=64, no_rope_layers=[1, 0]),
    "smollm3, windows on layers without positions": _model(
        "SmolLM3", hidden_size=64, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=20
    ),
    "smollm3, mixed layer types": _model(
        "SmolLM3", hidden_size=64, no_rope_layers=[1, 0], use_sliding_window=True, **NARROW
    ),
    "helium": _model("Helium", hidden_size=64, attention_bias=True, mlp_bias=True),
    "ernie 4.5": _model("Ernie4_5", use_bias=True),
    "glm": _model("Glm"),
    "glm 4": _model("Glm4"),
    "apertus": _model("Apertus", hidden_size=64, rope_parameters=LLAMA3),
    "hunyuan dense": _model("HunYuanDenseV1", attention_bias=True),
    "hunyuan dense, fixed alpha": _model(
        "HunYuanDenseV1", rope_parameters=ROPE | {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    ),
    "nanochat": _model("NanoChat", hidden_size=64),
    "nanochat, yarn": _model("NanoChat", hidden_size=64, rope_parameters=YARN),
    "bitnet": _model("BitNet", hidden_size=64),
    "olmo": _model("Olmo", hidden_size=64, clip_qkv=0.5),
    "olmo 2": _model("Olmo2", hidden_size=64),
    "olmo 3": _model("Olmo3", hidden_size=64, **NARROW),
    "exaone 4": _model("Exaone4", hidden_size=64, **NARROW),
    "exaone 4, no windows": _model(
        "Exaone4", hidden_size=64, sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "gemma": _model("Gemma"),
    "gemma 2": _model(
        "Gemma2", query_pre_attn_scalar=20, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **NARROW
    ),
    "gemma 3": _model("Gemma3", query_pre_attn_scalar=20, **NARROW),
    "vaultgemma": _model("VaultGemma", query_pre_attn_scalar=20, attn_logit_softcapping=2.0, **NARROW),
    "arcee": _model("Arcee", mlp_bias=True, attention_bias=True),
    "nemotron": _model("Nemotron", hidden_size=64),
    "jais 2": _model("Jais2"),
    "starcoder 2": _model("Starcoder2", hidden_size=64, sliding_window=20),
    "persimmon": _old("Persimmon", intermediate_size=56),
    "phi": _model("Phi", hidden_size=64, qk_layernorm=True),
    "gpt-neox": _old("GPTNeoX", intermediate_size=56),
    "gpt-neox, sequential, no bias": _old(
        "GPTNeoX", intermediate_size=56, use_parallel_residual=False, attention_bias=False
    ),
    "gpt-neox japanese": _old("GPTNeoXJapanese"),
    "gpt-j": _old("GPTJ", rotary_dim=8, n_inner=56),
    "codegen": _old("CodeGen", rotary_dim=8),
    "cohere": _model("Cohere", hidden_size=64, use_qk_norm=True, logit_scale=2.0),
    "cohere 2": _model("Cohere2", hidden_size=64, logit_scale=2.0, **NARROW),
    "stablelm": _model("StableLm", hidden_size=64, qk_layernorm=True, use_qkv_bias=True),
    "stablelm, parallel": _model("StableLm", hidden_size=64, use_parallel_residual=True),
    "falcon 7b": _old("Falcon"),
    "falcon 40b": _old("Falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon 11b, one norm": _old(
        "Falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon, alibi, sequential": _old(
        "Falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True
    )._replace(attention="sdpa"),  # the other adds its biases twice
    "bloom": _old("Bloom"),
    "mpt": _old("Mpt", attn_config={"clip_qkv": 0.5}),
    "gpt2": _old("GPT2LMHeadModel", scale_attn_by_inverse_layer_idx=True),
    "gpt bigcode": _old("GPTBigCode"),
    "gpt bigcode, not multi-query": _old("GPTBigCode", multi_query=False),
    "opt": _old("OPT", word_embed_proj_dim=64, ffn_dim=56),
    "opt, projections, norms after": _old("OPT", word_embed_proj_dim=32, do_layer_norm_before=False),
    "gpt neo": _old("GPTNeo", window_size=20, attention_types=[[["local", "global"], 1]]),
    "biogpt": _old("BioGpt", intermediate_size=56),
    "biogpt, embeddings as small as they are": _old("BioGpt", intermediate_size=56, scale_embedding=False),
    "xglm": _old("XGLM", ffn_dim=56),
    "openai gpt": _old("OpenAIGPTLMHeadModel"),
    "ctrl": _old("CTRLLMHeadModel", dff=56),
    "modernbert decoder": _old("ModernBertDecoder", intermediate_size=56, local_attention=40, num_hidden_layers=3),
}  # fmt: skip
