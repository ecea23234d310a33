"""Every GGUF architecture: a small model of `transformers`, written as llama.cpp's converter writes it, has its logits.

Names of tensors are those of the `gguf` package; what the converter does to them besides is said in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.loading.checkpoint import resolve
from octavo.loading.file_weights import open_weights
from octavo.loading.gguf_architectures import ARCHITECTURES
from octavo.loading.recording import RecordingWeights
from octavo.models.registry import build, describe
from octavo.ops import Ops
from tests.models import test_gguf_encoders
from tests.models.driving import all_logits
from tests.models.small_models import SIZES, SPECIAL_TOKENS, VOCAB
from tests.seeds import seed_of

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, Any], Tensors]  # of tensors by their Hugging Face names, and config.json


def permuted(tensors: Tensors, config: Any) -> Tensors:
    """Rows of q and k alternate between the halves of a head."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        part = next((p for p in ("q_proj", "k_proj") if f".{p}." in name), None)
        if part is None:
            return tensor
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    return {name: change(name, tensor) for name, tensor in tensors.items()}


def rotary_halves(tensors: Tensors, config: Any) -> Tensors:
    """Of what rotates of a head of q and k, the even rows and then the odd ones."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not any(f".{part}." in name for part in ("q_proj", "k_proj")):
            return tensor
        heads, num_turned = tensor.reshape(-1, config.head_dim, *tensor.shape[1:]), config.head_dim // 2
        parts = heads[:, :num_turned:2], heads[:, 1:num_turned:2], heads[:, num_turned:]
        return torch.cat(parts, dim=1).reshape(tensor.shape)

    return {name: change(name, tensor) for name, tensor in tensors.items()}


def one_more(tensors: Tensors, config: Any) -> Tensors:
    """Weights of norms are stored as they are multiplied."""
    return {n: t + 1 if "norm" in n and n.endswith("weight") else t for n, t in tensors.items()}


def turned(tensors: Tensors, config: Any) -> Tensors:
    ends = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {n: t.T if n.endswith(ends) else t for n, t in tensors.items()}


def by_part(tensors: Tensors, config: Any) -> Tensors:
    """All queries, all keys, all values, where the model has those of a head together."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        by_head = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)

    return {n: change(t) if "query_key_value" in n else t for n, t in tensors.items()}


def by_part_of_groups(tensors: Tensors, config: Any) -> Tensors:
    heads, groups = config.num_attention_heads, config.num_kv_heads if config.new_decoder_architecture else 1

    def change(tensor: torch.Tensor) -> torch.Tensor:
        grouped = tensor.reshape(groups, heads // groups + 2, -1, *tensor.shape[1:])
        parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])

    return {n: change(t) if "query_key_value" in n else t for n, t in tensors.items()}


def stacked_norms(tensors: Tensors, config: Any) -> Tensors:
    """One tensor of the norms of all heads."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        head, dot, rest = name.partition("norms.")
        if not dot:
            found[name] = tensor
        elif rest.startswith("0."):
            count = config.num_attention_heads if "q_layernorm" in name else config.num_key_value_heads
            found[f"{head}weight"] = torch.stack([tensors[f"{head}norms.{i}.weight"] for i in range(count)])
    return found


def one_qkv(tensors: Tensors, config: Any) -> Tensors:
    """As files of Phi 2 from before its code was in transformers have it."""
    found = {n: t for n, t in tensors.items() if not any(f".{p}_proj." in n for p in "qkv")}
    for i in range(config.num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = [tensors[f"model.layers.{i}.self_attn.{p}_proj.{kind}"] for p in "qkv"]
            found[f"transformer.h.{i}.mixer.Wqkv.{kind}"] = torch.cat(parts)
    return found


def split_experts(tensors: Tensors, config: Any) -> Tensors:
    """Gate and up of all experts, which `transformers` has side by side, and routers under the names of checkpoints."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                found[name.replace("gate_up_proj", f"{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor.squeeze(0) if "shared_expert_gate" in name else tensor
    return found


def split_latent(tensors: Tensors, config: Any) -> Tensors:
    """Keys' matrices, turned, and values' of all heads; biases of routers under the names of checkpoints."""
    found: Tensors = {}
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    for name, tensor in tensors.items():
        if "kv_b_proj" in name:
            keys, values = tensor.reshape(config.num_attention_heads, sum(sizes), -1).split(sizes, 1)
            found[name.replace("kv_b", "k_b")], found[name.replace("kv_b", "v_b")] = keys.transpose(1, 2), values
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return found


def split_gpt_oss(tensors: Tensors, config: Any) -> Tensors:
    """Gate and up alternate; matrices are [inputs, outputs]; sinks have no kind."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        kind = "bias" if name.endswith("bias") else "weight"
        if "experts" not in name:
            found[name + ".weight" if name.endswith("sinks") else name] = tensor
            continue
        layer = name.split(".experts")[0]
        matrix = tensor if kind == "bias" else tensor.transpose(1, 2)
        if "down_proj" in name:
            found[f"{layer}.experts.down_proj.{kind}"] = matrix
        else:
            for part, first in (("gate", 0), ("up", 1)):
                found[f"{layer}.experts.{part}_proj.{kind}"] = matrix[:, first::2]
    return found


def states(tensors: Tensors, config: Any) -> Tensors:
    """Rates of decay instead of the logarithms of their negatives; convolutions have no dimension of one."""
    found = {n: -torch.exp(t) if n.endswith("A_log") else t for n, t in tensors.items()}
    return {n: t.squeeze(1) if "conv" in n and n.endswith("weight") and t.dim() == 3 else t for n, t in found.items()}


def states_2(tensors: Tensors, config: Any) -> Tensors:
    """Mamba 2's besides: a number of a head is a row, norms have a row for each group."""
    groups = first_of(config, ["mamba_n_groups", "n_groups"])
    found: Tensors = {}
    for name, tensor in states(tensors, config).items():
        if name.endswith((".A_log", ".D")):
            tensor = tensor[:, None]
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            tensor = tensor.reshape(groups, -1)
        found[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return found


def folded(tensors: Tensors, config: Any) -> Tensors:
    """Falcon-H1's multipliers are part of the weights."""
    both, inner = config.attention_in_multiplier, config.mamba_d_ssm
    group = config.mamba_n_groups * config.mamba_d_state
    sizes = (inner, inner, group, group, config.mamba_n_heads)
    rows = torch.cat([torch.full((n,), m) for n, m in zip(sizes, config.ssm_multipliers, strict=True)])
    factors = {
        "down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0], "q_proj": both,
        "k_proj": both * config.key_multiplier, "v_proj": both, "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier, "in_proj": config.ssm_in_multiplier * rows[:, None],
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    return {n: t * factors.get(n.split(".")[-2], 1.0) for n, t in tensors.items()}


def split_shared(tensors: Tensors, config: Any) -> Tensors:
    """Granite's gate and up of the shared expert, which is the only one where there are no others."""
    found: Tensors = {}
    shared = "mlp.shared_expert" if config.num_local_experts else "mlp"
    for name, tensor in tensors.items():
        layer, dot, rest = name.partition("shared_mlp.")
        if not dot:
            found[name] = tensor
        elif rest.startswith("output"):
            found[f"{layer}{shared}.down_proj.weight"] = tensor
        else:
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[f"{layer}{shared}.{part}_proj.weight"] = half
    return found


def split_delta(tensors: Tensors, config: Any) -> Tensors:
    """Queries, keys and values of all heads, and gates; the weights of norms are stored as they are multiplied."""
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    heads = config.linear_num_key_heads
    shared = config.linear_num_value_heads // heads * values
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        if "in_proj_qkvz" in name:
            by_head = tensor.reshape(heads, -1, tensor.shape[1]).split([keys, keys, shared, shared], 1)
            *qkv, gate = (part.reshape(-1, tensor.shape[1]) for part in by_head)
            found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat(qkv), gate
        else:
            found[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return states(found, config)


def by_turns(tensors: Tensors, config: Any) -> Tensors:
    """Qwen 3.5's value heads: the first ones of all key heads, then the second ones."""
    keys, share, size = config.linear_num_key_heads, 2, config.linear_value_head_dim
    assert config.linear_num_value_heads == share * keys

    def heads(tensor: torch.Tensor, of: int) -> torch.Tensor:
        return tensor.reshape(keys, share, of, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)

    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        if ".in_proj_qkv." in name or ".conv1d." in name:
            start = 2 * keys * config.linear_key_head_dim
            tensor = torch.cat([tensor[:start], heads(tensor[start:], size)])
        elif ".in_proj_z." in name:
            tensor = heads(tensor, size)
        elif name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
            tensor = heads(tensor, 1)
        elif "linear_attn.out_proj" in name:
            tensor = heads(tensor.T, size).T
        found[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return states(found, config)


def parts_of_heads(tensors: Tensors, config: Any) -> Tensors:
    """Gemma 4's divisors of frequencies, which say what rotates, and names that the converter gives scales."""
    rope = config.rope_parameters["full_attention"]
    head_size = max(tensor.numel() for name, tensor in tensors.items() if "q_norm" in name)
    num_rotated = int(head_size * rope["partial_rotary_factor"] / 2)
    found = {"rope_freqs.weight": torch.tensor([1.0] * num_rotated + [1e30] * (head_size // 2 - num_rotated))}
    for name, tensor in tensors.items():
        layer = name.removeprefix("model.layers.").split(".")[0]
        if name.endswith("router.scale"):
            name = f"blk.{layer}.ffn_gate_inp.scale"
        elif name.endswith("per_expert_scale"):
            name = f"blk.{layer}.ffn_down_exps.scale"
        elif name.endswith("layer_scalar") or ".experts." in name:
            name = f"{name}.weight"
        found[name] = tensor
    return found


def stacked_streams(tensors: Tensors, config: Any) -> Tensors:
    """Gemma 3n's matrices of the further streams; scales are called weights."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.startswith("model.altup_"):
            stack, number, _ = name.rsplit(".", 2)
            if number == "0":
                parts = [tensors[f"{stack}.{i}.weight"] for i in range(config.altup_num_inputs - 1)]
                found[f"{stack}.weight"] = torch.stack(parts)
        else:
            found[f"{name}.weight" if name.endswith("_scale") else name] = tensor
    return found


def under_common_names(tensors: Tensors, config: Any) -> Tensors:
    """Experts, as the converter calls those of all models before it looks for their names."""
    renamed = {
        "block_sparse_moe.experts": "mlp.experts", "feed_forward.experts": "mlp.experts",
        "mixer.experts": "mlp.experts", "e_score_correction_bias": "e_score_correction.bias",
        "expert_bias": "expert_bias.bias", "mlp.router.weight": "block_sparse_moe.gate.weight",
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
        "mlp.gate.moe_statics": "mlp.moe_statics",
    }  # fmt: skip
    found = {}
    for name, tensor in tensors.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        found[f"{name}.weight" if name.endswith("experts.up_proj") else name] = tensor
    return found


def of_backbone(tensors: Tensors, config: Any) -> Tensors:
    """Under the names of checkpoints, which transformers 5 changes."""
    names = {"model.embed": "backbone.embed", "model.layers.": "backbone.layers.", "model.norm": "backbone.norm"}
    found = {}
    for name, tensor in tensors.items():
        old = next((old for old in names if name.startswith(old) and "mlp.experts" not in name), "")
        found[names.get(old, "") + name.removeprefix(old)] = tensor
    return found


def with_activations_as_metadata(tensors: Tensors, config: Any) -> Tensors:
    """Of Apertus."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    numbers = {name: [float(t) for key, t in tensors.items() if key.endswith(f"act_fn.{name}")] for name in names}
    config.xielu = numbers
    return {name: tensor for name, tensor in tensors.items() if ".act_fn." not in name}


def stacked_dbrx(tensors: Tensors, config: Any) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        if "experts.mlp." in name:
            stack = tensor.reshape(config.ffn_config.moe_num_experts, -1, config.d_model)
            found[f"{name}.weight"] = stack.transpose(1, 2) if name.endswith("w2") else stack
        else:
            found[name] = tensor
    return found


class Case(NamedTuple):
    architecture: str
    config: transformers.PretrainedConfig
    metadata: dict[str, Any] = {}  # beyond what most have  # noqa: RUF012
    changes: tuple[Change, ...] = ()


SMALL = SIZES | SPECIAL_TOKENS
FULL = SMALL | {"num_key_value_heads": 4, "head_dim": 16, "hidden_size": 64}
WIDE = SMALL | {"hidden_size": 64}
WINDOW = {"attention.sliding_window": 20}
ROPE_HALF = {"partial_rotary_factor": 0.5, "rope_type": "default", "rope_theta": 10000.0}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 20}
_NO_PAD = {key: value for key, value in FULL.items() if key != "head_dim"}
_NO_HEAD = {key: value for key, value in WIDE.items() if key != "head_dim"}
_SHORT = {key: value for key, value in _NO_PAD.items() if key != "intermediate_size"}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)],
}  # fmt: skip


def _gpt2(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 1,
            "eos_token_id": 2} | more  # fmt: skip


_LATENT = {
    "hidden_size": 64, "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
_LATENT_SIZES = {k: v for k, v in SMALL.items() if k != "head_dim"} | _LATENT
_LATENT_KEYS = {
    "attention.q_lora_rank": 40, "attention.kv_lora_rank": 24, "rope.dimension_count": 8, "attention.head_count_kv": 1,
    "attention.key_length": 32, "attention.value_length": 24, "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
}  # fmt: skip
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_ROUTED_KEYS = {
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 24, "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
}  # fmt: skip

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
_MOE_KEYS = _EXPERT_KEYS | {"expert_feed_forward_length": 24}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 2.0
}  # fmt: skip
_MULTIPLIER_KEYS = {"embedding_scale": 3.0, "residual_scale": 0.6, "attention.scale": 0.2, "logit_scale": 2.0}
_HYBRID = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 32}
_HYBRID_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.inner_size": 96, "ssm.time_step_rank": 6,
}  # fmt: skip
_DELTA_KEYS = {
    "ssm.conv_kernel": 4, "ssm.state_size": 12, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 80,
    "rope.dimension_count": 6, "full_attention_interval": 2,
}  # fmt: skip
_GEMMA_4 = SMALL | {
    "hidden_size": 64, "num_hidden_layers": 4, "sliding_window": 20, "head_dim": 8, "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "intermediate_size": 40,
}  # fmt: skip
_GEMMA_4_KEYS = {
    "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 8,
    "attention.value_length_swa": 8, "rope.dimension_count": 16, "rope.dimension_count_swa": 8,
    "rope.freq_base": 1000000.0, "rope.freq_base_swa": 10000.0,
    "attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False, True, False],
}  # fmt: skip
_MIXED = ["linear_attention", "full_attention"]
_48 = SMALL | {"hidden_size": 48, "head_dim": 12}
_NEMOTRON = {k: v for k, v in SMALL.items() if k != "num_hidden_layers"} | {
    "ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 32,
}  # fmt: skip

CASES: dict[str, Case] = {
    "mamba": Case(
        "mamba", transformers.MambaConfig(vocab_size=VOCAB, hidden_size=24, state_size=6, num_hidden_layers=2),
        {"ssm.conv_kernel": 4, "ssm.inner_size": 48, "ssm.state_size": 6, "ssm.time_step_rank": 2,
         "attention.head_count": 0, "feed_forward_length": 0}, (states,),
    ),
    "falcon mamba": Case(
        "mamba", transformers.FalconMambaConfig(vocab_size=VOCAB, hidden_size=24, state_size=6, num_hidden_layers=2),
        {"ssm.conv_kernel": 4, "ssm.inner_size": 48, "ssm.state_size": 6, "ssm.time_step_rank": 2,
         "ssm.dt_b_c_rms": True, "attention.head_count": 0, "feed_forward_length": 0}, (states,),
    ),
    "mamba 2": Case(
        "mamba2", transformers.Mamba2Config(
            vocab_size=VOCAB, hidden_size=24, num_heads=4, head_dim=12, state_size=9, n_groups=2, num_hidden_layers=2,
            chunk_size=32,
        ),
        {"ssm.conv_kernel": 4, "ssm.inner_size": 48, "ssm.state_size": 9, "ssm.time_step_rank": 4,
         "ssm.group_count": 2, "attention.head_count": 0, "feed_forward_length": 0}, (states_2,),
    ),
    "jamba": Case(
        "jamba", transformers.JambaConfig(
            **_48 | {"num_hidden_layers": 4}, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=6, **_EXPERTS
        ),
        _EXPERT_KEYS | {"ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 6, "ssm.time_step_rank": 3,
                        "attention.head_count_kv": [0, 2, 0, 2]}, (states, under_common_names, split_experts),
    ),
    "falcon-h1": Case(
        "falcon-h1", transformers.FalconH1Config(
            **_48, mamba_d_ssm=96, lm_head_multiplier=0.5, embedding_multiplier=3.0, mlp_multipliers=[0.7, 1.4],
            key_multiplier=0.6, attention_out_multiplier=0.8, attention_in_multiplier=1.2, ssm_in_multiplier=0.9,
            ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.7], ssm_out_multiplier=1.3, **_HYBRID,
        ),
        _HYBRID_KEYS, (folded, states_2),
    ),
    "falcon-h1 with norms": Case(
        "falcon-h1", transformers.FalconH1Config(
            **_48, mamba_d_ssm=96, mamba_rms_norm=True, mamba_norm_before_gate=False, **_HYBRID
        ),
        _HYBRID_KEYS, (states_2,),
    ),
    "granite moe": Case(
        "granitemoe", transformers.GraniteMoeConfig(**_NO_HEAD, **_MULTIPLIERS, **_LOCAL),
        _EXPERT_KEYS | _MULTIPLIER_KEYS, (permuted, under_common_names, split_experts),
    ),
    "granite moe shared": Case(
        "granitemoe", transformers.GraniteMoeSharedConfig(
            **_NO_HEAD, **_MULTIPLIERS, **_LOCAL, shared_intermediate_size=40
        ),
        _EXPERT_KEYS | _MULTIPLIER_KEYS | {"expert_shared_feed_forward_length": 40},
        (permuted, under_common_names, split_experts, split_shared),
    ),
    "granite hybrid": Case(
        "granitehybrid", transformers.GraniteMoeHybridConfig(
            **_48, **_MULTIPLIERS, **_LOCAL, **_HYBRID, shared_intermediate_size=40, layer_types=_MIXED
        ),
        _EXPERT_KEYS | _MULTIPLIER_KEYS | _HYBRID_KEYS | {
            "expert_shared_feed_forward_length": 40, "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False
        }, (permuted, under_common_names, split_experts, split_shared, states_2),
    ),
    "granite hybrid without experts": Case(
        "granitehybrid", transformers.GraniteMoeHybridConfig(
            **_48, **_HYBRID, num_local_experts=0, shared_intermediate_size=40, layer_types=_MIXED
        ),
        _HYBRID_KEYS | {"feed_forward_length": 40, "attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False},
        (permuted, split_shared, states_2),
    ),
    "bamba": Case(
        "granitehybrid", transformers.BambaConfig(**_48, **_HYBRID, attn_layer_indices=[1]),
        _HYBRID_KEYS | {"attention.head_count_kv": [0, 2], "rope.scaling.finetuned": True, "rope.dimension_count": 6},
        (permuted, states_2),
    ),
    "nemotron h": Case(
        "nemotron_h", transformers.NemotronHConfig(
            **_NEMOTRON, layers_block_type=["mlp", "linear_attention", "mlp", "full_attention"]
        ),
        _HYBRID_KEYS | {"attention.head_count_kv": [0, 0, 0, 2], "feed_forward_length": [56, 0, 56, 0]},
        (of_backbone, states_2),
    ),
    "nemotron h with experts": Case(
        "nemotron_h_moe", transformers.NemotronHConfig(
            **_NEMOTRON, layers_block_type=["moe", "linear_attention", "moe", "full_attention"], n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
            routed_scaling_factor=1.5,
        ),
        _HYBRID_KEYS | _MOE_KEYS | {
            "attention.head_count_kv": [0, 0, 0, 2], "feed_forward_length": [24, 0, 24, 0],
            "expert_shared_feed_forward_length": 40, "expert_shared_count": 1, "expert_weights_norm": True,
            "expert_weights_scale": 1.5, "expert_group_count": 1,
        }, (under_common_names, split_experts, of_backbone, states_2),
    ),
    "lfm 2": Case(
        "lfm2", transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], block_multiple_of=8),
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2], "feed_forward_length": 40}, (states,),
    ),
    "lfm 2 moe": Case(
        "lfm2moe", transformers.Lfm2MoeConfig(
            **SMALL, **_EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1, moe_intermediate_size=24
        ),
        _MOE_KEYS | {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2], "leading_dense_block_count": 1,
                     "expert_gating_func": 2}, (states, under_common_names, split_experts),
    ),
    "qwen3 next": Case(
        "qwen3next", transformers.Qwen3NextConfig(
            **_48, **_EXPERTS, moe_intermediate_size=24, shared_expert_intermediate_size=40, linear_key_head_dim=12,
            linear_value_head_dim=20, linear_num_key_heads=2, linear_num_value_heads=4, layer_types=_MIXED,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
        _MOE_KEYS | _DELTA_KEYS | {"expert_shared_feed_forward_length": 40}, (split_experts, split_delta),
    ),
    "qwen 3.5": Case(
        "qwen35", transformers.Qwen3_5TextConfig(
            **_48, linear_key_head_dim=12, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4,
            layer_types=_MIXED,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
        _DELTA_KEYS | {"ssm.inner_size": 48, "rope.dimension_sections": [1, 1, 1, 0]}, (by_turns,),
    ),
    "qwen 3.5 moe": Case(
        "qwen35moe", transformers.Qwen3_5MoeTextConfig(
            **_48, **_EXPERTS, moe_intermediate_size=24, shared_expert_intermediate_size=40, linear_key_head_dim=12,
            linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4, layer_types=_MIXED,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
        _MOE_KEYS | _DELTA_KEYS | {
            "ssm.inner_size": 48, "expert_shared_feed_forward_length": 40, "rope.dimension_sections": [1, 1, 1, 0]
        },
        (split_experts, by_turns),
    ),
    "dots 1": Case(
        "dots1", transformers.Dots1Config(**WIDE, **_ROUTED, n_shared_experts=2, routed_scaling_factor=1.5),
        _ROUTED_KEYS | {"expert_shared_count": 2, "expert_weights_norm": False}, (split_experts, under_common_names),
    ),
    "glm 4 moe": Case(
        "glm4moe", transformers.Glm4MoeConfig(
            **WIDE, **_ROUTED, use_qk_norm=True, attention_bias=True, n_shared_experts=1, routed_scaling_factor=1.5,
            rope_parameters=ROPE_HALF,
        ),
        _ROUTED_KEYS | {"expert_shared_count": 1, "expert_weights_norm": True, "rope.dimension_count": 8,
                        "block_count": 3, "nextn_predict_layers": 1},
        (split_experts, under_common_names),
    ),
    "ernie 4.5 moe": Case(
        "ernie4_5-moe", transformers.Ernie4_5_MoeConfig(
            **WIDE, moe_num_experts=4, moe_k=2, moe_num_shared_experts=2, moe_intermediate_size=24, use_bias=False
        ),
        _MOE_KEYS | {"expert_shared_count": 2, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
        (split_experts, under_common_names),
    ),
    "hunyuan": Case("hunyuan-dense", transformers.HunYuanDenseV1Config(**SMALL)),
    "hunyuan moe": Case(
        "hunyuan-moe", transformers.HunYuanMoEV1Config(**SMALL, num_experts=4, moe_topk=2),
        _EXPERT_KEYS | {"expert_shared_feed_forward_length": 56, "expert_feed_forward_length": 56}, (split_experts,),
    ),
    "minimax m2": Case(
        "minimax-m2", transformers.MiniMaxM2Config(**WIDE, **_LOCAL, rotary_dim=8),
        _EXPERT_KEYS | {"expert_feed_forward_length": 56, "expert_gating_func": 2, "rope.dimension_count": 8},
        (split_experts, under_common_names),
    ),
    "phi moe": Case(
        "phimoe", transformers.PhimoeConfig(
            **_NO_HEAD, **_LOCAL, attention_bias=True, lm_head_bias=True, sliding_window=None
        ),
        _EXPERT_KEYS | {"attention.sliding_window": 0}, (split_experts, under_common_names),
    ),
    "dbrx": Case(
        "dbrx", transformers.DbrxConfig(
            vocab_size=VOCAB, d_model=64, n_heads=4, n_layers=2, max_seq_len=256,
            attn_config={"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
            ffn_config={"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        _EXPERT_KEYS | {"attention.head_count_kv": 2, "attention.clamp_kqv": 0.5, "feed_forward_length": 24,
                        "rope.freq_base": 10000.0}, (stacked_dbrx,),
    ),
    "afmoe": Case(
        "afmoe", transformers.AfmoeConfig(
            **WIDE | {"num_hidden_layers": 4}, **_EXPERTS, mup_enabled=True, num_shared_experts=2, route_scale=1.5,
            num_dense_layers=1, moe_intermediate_size=24, sliding_window=20, global_attn_every_n_layers=4,
        ),
        WINDOW | _MOE_KEYS | {"expert_shared_count": 2, "leading_dense_block_count": 1, "expert_weights_scale": 1.5,
                              "expert_weights_norm": True, "expert_gating_func": 2},
        (split_experts, under_common_names),
    ),
    "exaone moe": Case(
        "exaone-moe", transformers.ExaoneMoeConfig(
            **WIDE | {"num_hidden_layers": 4}, **_EXPERTS, moe_intermediate_size=24, num_shared_experts=1,
            sliding_window=20, routed_scaling_factor=1.5,
        ),
        WINDOW | _MOE_KEYS | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_scale": 1.5,
                              "expert_weights_norm": True, "expert_gating_func": 2},
        (split_experts, under_common_names),
    ),
    "jais 2": Case("jais2", transformers.Jais2Config(**_NO_PAD, hidden_act="relu2"), {}, (permuted,)),
    "deepseek 2": Case(
        "deepseek2", transformers.DeepseekV2Config(**_LATENT_SIZES, **_ROUTED, routed_scaling_factor=1.5),
        _LATENT_KEYS | _ROUTED_KEYS | {"expert_shared_count": 2}, (split_experts, split_latent),
    ),
    "deepseek 2, older file, queries not compressed": Case(
        "deepseek2", transformers.DeepseekV2Config(
            **_LATENT_SIZES | {"q_lora_rank": None}, **_ROUTED, routed_scaling_factor=1.5
        ),
        {k: v for k, v in _LATENT_KEYS.items() if not k.endswith(("mla", "q_lora_rank"))} | _ROUTED_KEYS | {
            "expert_shared_count": 2, "attention.key_length": 24, "attention.value_length": 12,
            "attention.head_count_kv": 4,
        }, (split_experts,),
    ),
    "deepseek 2 that normalizes and whose queries grow (Mistral Large 3)": Case(
        "deepseek2", transformers.Mistral4Config(
            **_LATENT_SIZES, **_ROUTED, n_group=1, topk_group=1, routed_scaling_factor=1.5, rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
            },
        ),
        _LATENT_KEYS | _ROUTED_KEYS | {
            "expert_shared_count": 1, "expert_gating_func": 1, "expert_weights_norm": True,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0, "attention.temperature_scale": 0.3, "attention.temperature_length": 16,
        }, (split_experts, split_latent),
    ),
    "deepseek 3": Case(
        "deepseek2", transformers.DeepseekV3Config(
            **_LATENT_SIZES, **_ROUTED, n_group=4, topk_group=2, routed_scaling_factor=1.5, rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "mscale": 0.8, "mscale_all_dim": 0.8,
            },
        ),
        _LATENT_KEYS | _ROUTED_KEYS | {
            "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_norm": True, "expert_group_count": 4,
            "expert_group_used_count": 2, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 0.08,
        }, (split_experts, split_latent),
    ),
    "minicpm 3": Case(
        "minicpm3", transformers.MiniCPM3Config(**_LATENT_SIZES | {"v_head_dim": 16}, tie_word_embeddings=True),
        {k: v for k, v in _LATENT_KEYS.items() if not k.endswith("mla")} | {
            "attention.key_length": 24, "attention.head_count_kv": 4
        },
    ),
    "gpt-oss": Case(
        "gpt-oss", transformers.GptOssConfig(
            **SMALL | {"num_hidden_layers": 3}, num_local_experts=4, num_experts_per_tok=2, sliding_window=20,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "truncate": False,
            },
        ),
        WINDOW | {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 56, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        }, (split_gpt_oss,),
    ),
    "llama": Case("llama", transformers.LlamaConfig(**SMALL), {}, (permuted,)),
    "llama with biases": Case(
        "llama", transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True), {}, (permuted,)
    ),
    "llama with yarn": Case(
        "llama",
        transformers.LlamaConfig(
            **SMALL,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64
            },
        ),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        (permuted,),
    ),
    "mixtral": Case(
        "llama", transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        {"expert_count": 4, "expert_used_count": 2}, (permuted, split_experts),
    ),
    "qwen2moe": Case(
        "qwen2moe", transformers.Qwen2MoeConfig(
            **_NO_HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24,
         "expert_shared_feed_forward_length": 40}, (split_experts,),
    ),
    "qwen3moe": Case(
        "qwen3moe", transformers.Qwen3MoeConfig(
            **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}, (split_experts,),
    ),
    "olmoe": Case(
        "olmoe", transformers.OlmoeConfig(**_NO_HEAD, num_experts=4, num_experts_per_tok=2),
        {"expert_count": 4, "expert_used_count": 2}, (split_experts,),
    ),
    "qwen2": Case("qwen2", transformers.Qwen2Config(**SMALL)),
    "qwen3": Case("qwen3", transformers.Qwen3Config(**SMALL)),
    "qwen2 vl": Case("qwen2vl", transformers.Qwen2Config(**_NO_HEAD), {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3 vl": Case(
        "qwen3vl", transformers.Qwen3Config(**SMALL), {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}
    ),
    "qwen3 vl moe": Case(
        "qwen3vlmoe", transformers.Qwen3MoeConfig(
            **WIDE, **_EXPERTS, moe_intermediate_size=24, norm_topk_prob=True, decoder_sparse_step=1
        ),
        _MOE_KEYS | {"rope.dimension_sections": [3, 3, 2, 0]}, (split_experts,),
    ),
    "mistral 3": Case("mistral3", transformers.MistralConfig(**SMALL, sliding_window=None), {}, (permuted,)),
    "ministral 3": Case(
        "mistral3", transformers.Ministral3Config(**SMALL, rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        }),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
         "rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.yarn_beta_fast": 32.0,
         "rope.scaling.yarn_beta_slow": 1.0, "attention.temperature_scale": 0.3}, (permuted,),
    ),
    "apertus": Case(
        "apertus", transformers.ApertusConfig(**WIDE, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        {}, (with_activations_as_metadata,),
    ),
    "arcee": Case("arcee", transformers.ArceeConfig(**SMALL), {}, (permuted,)),
    "seed-oss": Case("seed_oss", transformers.SeedOssConfig(**SMALL, attention_bias=True, attention_out_bias=False)),
    "smollm3": Case(
        "smollm3", transformers.SmolLM3Config(**SMALL | {"num_hidden_layers": 4}), {}, (permuted,)
    ),
    "ernie": Case("ernie4_5", transformers.Ernie4_5Config(**SMALL, use_bias=False)),
    "granite": Case(
        "granite",
        transformers.GraniteConfig(
            **SMALL, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=2.0
        ),
        {"embedding_scale": 3.0, "residual_scale": 0.6, "attention.scale": 0.2, "logit_scale": 2.0},
        (permuted,),
    ),
    "gemma": Case("gemma", transformers.GemmaConfig(**SMALL), {}, (one_more,)),
    "gemma 2": Case(
        "gemma2", transformers.Gemma2Config(**SMALL, **_GEMMA),
        WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, (one_more,),
    ),
    "gemma 3n": Case(
        "gemma3n", transformers.Gemma3nTextConfig(
            **SMALL | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": [56] * 4},
            layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, sliding_window=20,
            hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, laurel_rank=12,
            activation_sparsity_pattern=[0.9, 0.0, 0.6, 0.0], final_logit_softcapping=3.0, tie_word_embeddings=True,
        ),
        {"attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False, True, False],
         "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 16, "final_logit_softcapping": 3.0,
         "altup.num_inputs": 4, "altup.active_idx": 0, "rope.freq_base": 1000000.0,
         "activation_sparsity_scale": [NormalDist().inv_cdf(0.9), -math.inf, NormalDist().inv_cdf(0.6), -math.inf]},
        (stacked_streams,),
    ),
    "gemma 4": Case(
        "gemma4", transformers.Gemma4TextConfig(
            **_GEMMA_4, final_logit_softcapping=3.0, num_kv_shared_layers=2, use_double_wide_mlp=True
        ),
        _GEMMA_4_KEYS | {
            "final_logit_softcapping": 3.0, "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 16,
            "feed_forward_length": [40, 40, 80, 80],
        },
        (parts_of_heads,),
    ),
    "gemma 4 with experts": Case(
        "gemma4", transformers.Gemma4TextConfig(
            **_GEMMA_4 | {"hidden_size_per_layer_input": 0}, attention_k_eq_v=True, num_global_key_value_heads=1,
            enable_moe_block=True, top_k_experts=2, num_experts=6, moe_intermediate_size=24,
        ),
        _GEMMA_4_KEYS | {
            "attention.head_count_kv": [2, 1, 2, 1], "expert_count": 6, "expert_used_count": 2,
            "expert_feed_forward_length": 24, "embedding_length_per_layer_input": 0,
        },
        (parts_of_heads,),
    ),
    "gemma 3": Case(
        "gemma3", transformers.Gemma3TextConfig(
            **SMALL | {"num_hidden_layers": 7}, **_GEMMA, rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        WINDOW | {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, (one_more,),
    ),
    "olmo": Case("olmo", transformers.OlmoConfig(**SMALL, clip_qkv=0.5), {
        "attention.clamp_kqv": 0.5, "attention.layer_norm_epsilon": 1e-5
    }, (permuted,)),
    "olmo 2": Case("olmo2", transformers.Olmo2Config(**SMALL)),
    "olmo 3": Case(
        "olmo2", transformers.Olmo3Config(**SMALL | {"num_hidden_layers": 5}, sliding_window=20), WINDOW
    ),
    "exaone 4": Case(
        "exaone4", transformers.Exaone4Config(
            **SMALL | {"num_hidden_layers": 5}, sliding_window=20, sliding_window_pattern=4
        ),
        WINDOW,
    ),
    "exaone 4 without windows": Case(
        "exaone4", transformers.Exaone4Config(**SMALL, sliding_window=None, layer_types=["full_attention"] * 2)
    ),
    "glm 4": Case("glm4", transformers.Glm4Config(**SMALL, attention_bias=True), {"rope.dimension_count": 8}),
    "glm 4 of a model that sees": Case(
        "glm4", transformers.Glm4Config(**SMALL, attention_bias=True),
        {"rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]}, (rotary_halves,),
    ),
    "phi 3": Case("phi3", transformers.Phi3Config(**WIDE, sliding_window=20), WINDOW),
    "phi 3 of long contexts": Case(
        "phi3", transformers.Phi3Config(**WIDE, original_max_position_embeddings=64, rope_parameters=_LONG),
        {"rope.scaling.original_context_length": 64, "attention.sliding_window": 0},
    ),
    "command-r": Case("command-r", transformers.CohereConfig(**SMALL, logit_scale=0.25, use_qk_norm=True), {
        "logit_scale": 0.25
    }),
    "cohere 2": Case(
        "cohere2", transformers.Cohere2Config(
            **SMALL | {"num_hidden_layers": 5}, logit_scale=0.25, sliding_window=20
        ),
        WINDOW | {"logit_scale": 0.25},
    ),
    "nemotron": Case(
        "nemotron", transformers.NemotronConfig(**SMALL, partial_rotary_factor=0.5), {"rope.dimension_count": 8},
        (one_more,),
    ),
    "starcoder 2": Case("starcoder2", transformers.Starcoder2Config(**SMALL, sliding_window=None)),
    "stablelm": Case(
        "stablelm", transformers.StableLmConfig(**WIDE, use_qkv_bias=True, rope_parameters=ROPE_HALF),
        {"rope.dimension_count": 8},
    ),
    "stablelm in parallel, with norms": Case(
        "stablelm", transformers.StableLmConfig(
            **WIDE, use_parallel_residual=True, qk_layernorm=True, rope_parameters=ROPE_HALF
        ),
        {"rope.dimension_count": 8}, (stacked_norms,),
    ),
    "phi 2": Case("phi2", transformers.PhiConfig(**FULL, rope_parameters=ROPE_HALF), {"rope.dimension_count": 8}),
    "phi 2, stacked": Case(
        "phi2", transformers.PhiConfig(**FULL, rope_parameters=ROPE_HALF), {"rope.dimension_count": 8}, (one_qkv,)
    ),
    "gpt-neox": Case(
        "gptneox", transformers.GPTNeoXConfig(**_NO_PAD, rope_parameters=ROPE_HALF),
        {"rope.dimension_count": 8, "use_parallel_residual": True}, (by_part,),
    ),
    "gpt-neox, one after the other": Case(
        "gptneox", transformers.GPTNeoXConfig(
            **_NO_PAD, rope_parameters=ROPE_HALF, use_parallel_residual=False
        ),
        {"rope.dimension_count": 8, "use_parallel_residual": False}, (by_part,),
    ),
    "falcon": Case(
        "falcon", transformers.FalconConfig(**_SHORT, multi_query=True, num_kv_heads=1),
        {"attention.head_count_kv": 1}, (by_part_of_groups,),
    ),
    "falcon with two norms": Case(
        "falcon", transformers.FalconConfig(**_SHORT, new_decoder_architecture=True, num_kv_heads=2),
        {"attention.head_count_kv": 2}, (by_part_of_groups,),
    ),
    "bloom": Case("bloom", transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ), {}, (by_part,)),
    "mpt": Case(
        "mpt", transformers.MptConfig(
            vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4, max_seq_len=256, attn_config={"clip_qkv": 0.5}
        ),
        {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.5},
    ),
    "gpt-2": Case("gpt2", transformers.GPT2Config(**_gpt2()), {}, (turned,)),
    "starcoder": Case(
        "starcoder", transformers.GPTBigCodeConfig(**_gpt2(multi_query=True)), {"attention.head_count_kv": 1}
    ),
}  # fmt: skip


def random_model(config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    # Text alone of a model that sees is in no list of transformers.
    is_listed = config.model_type != "mistral4"
    build = AutoModelForCausalLM.from_config if is_listed else transformers.Mistral4ForCausalLM._from_config
    model = build(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(std=0.12)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def first_of(config: Any, names: Iterable[str], default: Any = None) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def common(config: Any) -> dict[str, Any]:
    """The metadata that most files have."""
    config.allow_global_per_layer_attribute_access = True  # layers of Gemma 4 have heads of their own sizes
    hidden = first_of(config, ["hidden_size", "n_embd", "d_model"])
    heads = first_of(config, ["num_attention_heads", "n_head", "n_heads"], 1)
    head_dim = first_of(config, ["head_dim"], hidden // heads)
    rms = first_of(config, ["rms_norm_eps"])
    eps = first_of(config, ["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"], 1e-5)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    keys = {
        "block_count": first_of(config, ["num_hidden_layers", "n_layer", "n_layers"]), "embedding_length": hidden,
        "context_length": first_of(config, ["max_position_embeddings", "n_positions", "max_seq_len"], 2048),
        "feed_forward_length": first_of(config, ["intermediate_size", "n_inner", "ffn_hidden_size"], 4 * hidden),
        "attention.head_count": heads,
        "attention.head_count_kv": first_of(config, ["num_key_value_heads"], heads),
        "attention.layer_norm_rms_epsilon" if rms is not None else "attention.layer_norm_epsilon": rms or eps,
        "attention.key_length": head_dim, "attention.value_length": head_dim,
    }  # fmt: skip
    keys |= {f"xielu.{name}": numbers for name, numbers in getattr(config, "xielu", {}).items()}
    return keys | ({"rope.freq_base": float(rope["rope_theta"])} if "rope_theta" in rope else {})


def write(case: Case, reference: PreTrainedModel, path: Path, quantized: str = " ") -> Path:
    """The model as llama.cpp's converter would write it, in float32; tensors named `quantized` are Q8_0."""
    config: Any = reference.config
    tensors: Tensors = {n: t for n, t in reference.state_dict().items() if not n.endswith((".attn.bias", "inv_freq"))}
    if config.tie_word_embeddings:
        tensors = {n: t for n, t in tensors.items() if not n.startswith(("lm_head", "embed_out"))}
    for change in case.changes:
        tensors = change(tensors, config)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    metadata = common(config) | case.metadata
    names = gguf.get_tensor_name_map(arch, metadata["block_count"])
    writer = gguf.GGUFWriter(path, case.architecture)
    for key, value in metadata.items():
        key = key if key.startswith("xielu.") else f"{case.architecture}.{key}"
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    for name, tensor in tensors.items():
        suffixes = (".weight", ".bias")
        gguf_name = name if name.startswith(("blk.", "rope_freqs", "cls.")) else names.get_name(name, suffixes)
        gguf_name = gguf_name or names.get_name(name.removeprefix("transformer."), suffixes)
        assert gguf_name is not None, name
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized in gguf_name else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name, gguf.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# A third; the others are in the long tier.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if i % 3 else ()) for i, name in enumerate(CASES)]
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, ops: Ops) -> None:
    case = CASES[name]
    reference = random_model(case.config, seed=seed_of(name))
    checkpoint = resolve(str(write(case, reference, tmp_path / "m.gguf")))
    description = describe(checkpoint.config)
    weights = open_weights(checkpoint, "float32", None, None, description.tie_word_embeddings)
    model = build(description, weights, ops, 64, "float32")
    weights.check_all_taken()
    sequences = [torch.randint(3, VOCAB, (length,)).tolist() for length in (9, 50)]
    reference.config._experts_implementation = "eager"  # others have no float64
    reference.double()  # in float32 its own rounding is as large as ours
    for tokens, found in zip(sequences, all_logits(model, ops, sequences), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0].float()
        # Float32 rounds by up to 1.4e-4 here, in ten sets of weights; a wrong setting is off by 1e-2 and more.
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=0)


def test_every_architecture_of_the_table_is_compared() -> None:
    assert {case.architecture for case in CASES.values()} | {*test_gguf_encoders.ARCHITECTURES.values()} == set(
        ARCHITECTURES
    )


def test_turned_matrices_keep_their_blocks(tmp_path: Path) -> None:
    """GPT-2's checkpoints have them [inputs, outputs], its files the other way round."""
    case = CASES["gpt-2"]
    reference = random_model(case.config, 0)
    checkpoint = resolve(str(write(case, reference, tmp_path / "m.gguf", quantized=".ffn_up.weight")))
    weights = open_weights(checkpoint, "bfloat16", None, None, True)
    name = "transformer.h.0.mlp.c_fc.weight"
    shape = tuple(reference.state_dict()[name].shape)
    for found in (weights, RecordingWeights("bfloat16", weights)):
        taken = found.take_matrix(name, shape, is_transposed=True)
        assert (taken.format, taken.shape) == ("Q8_0", shape[::-1])
