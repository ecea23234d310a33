"""Folders as Mistral publishes them: params.json in place of config.json, and consolidated*.safetensors with their own
names and their own order of rows. This module translates both to Hugging Face's; `vocabulary_files` reads tekken.json.

The format is that of https://github.com/mistralai/mistral-inference (`args.py`, `transformer.py`).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.errors import LoadError

_TOP_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
_LAYER = re.compile(r"layers\.(\d+)\.(.*)\.weight")
_NOT_BUILT = {
    "quantization": "quantized weights", "vision_encoder": "vision encoders", "multimodal": "vision and audio encoders",
    "llama_4_scaling": "queries scaled by position", "moe": "mixture-of-experts layers", "lora": "LoRA weights",
}  # fmt: skip


class MistralName(NamedTuple):
    """A tensor's Hugging Face name. `rotary_heads` is the number of heads whose rows are interleaved; 0: none."""

    hf_name: str
    rotary_heads: int = 0


def consolidated_files(names: list[str]) -> list[str]:
    """Return the weight files of this format among the file names of a folder."""
    return sorted(n for n in names if re.fullmatch(r"consolidated(-\d+-of-\d+)?\.safetensors", n))


def mistral_config(source: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return params.json in the form of config.json. Raises `LoadError` if a key is missing or asks for something that
    is not built."""
    for key, what in _NOT_BUILT.items():
        if params.get(key):
            raise LoadError(f"{source} has {key!r}: {what} in Mistral's own format are not built.")
    try:
        config = {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "vocab_size": params["vocab_size"],
            "hidden_size": params["dim"],
            "intermediate_size": params["hidden_dim"],
            "num_hidden_layers": params["n_layers"],
            "num_attention_heads": params["n_heads"],
            "num_key_value_heads": params.get("n_kv_heads", params["n_heads"]),
            "head_dim": params.get("head_dim", params["dim"] // params["n_heads"]),
            "rms_norm_eps": params["norm_eps"],
        }
        rope = _rope(params)
    except KeyError as e:
        raise LoadError(f"{source} has no {e.args[0]!r}: it is not one of Mistral's models.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as e:
        raise LoadError(f"{source} is damaged: a setting has the wrong type or value ({e}); fetch it again.") from None
    window = params.get("sliding_window")
    if isinstance(window, list):
        raise LoadError(f"{source} has a sliding_window for each layer, which is not built.")
    # The default in mistral-inference is the length that the caller allocates. Models without the key have 32,768.
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or 32768
    return config | {
        "hidden_act": "silu",
        "sliding_window": window,
        "max_position_embeddings": length,
        "rope_parameters": rope,
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def _rope(params: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(params.get("rope_theta") or 10000.0)}
    yarn = params.get("yarn")
    if not yarn:
        return rope
    scale = {} if yarn.get("apply_scale", True) else {"attention_factor": 1.0}
    return rope | scale | {
        "rope_type": "yarn", "factor": yarn["factor"],
        "beta_fast": yarn.get("beta", 32), "beta_slow": yarn.get("alpha", 1),
        "original_max_position_embeddings": yarn["original_max_position_embeddings"],
    }  # fmt: skip


def mistral_name(name: str, config: Mapping[str, Any]) -> MistralName:
    """Return the Hugging Face name of a tensor. Unknown names stay as they are, and the loader refuses them later as
    weights that the model does not take."""
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return MistralName(_TOP_NAMES.get(name, name))
    heads = {"attention.wq": config["num_attention_heads"], "attention.wk": config["num_key_value_heads"]}
    return MistralName(f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight", heads.get(match[2], 0))
