"""The GGUF architectures: for each the class of `transformers` that its files are of, what its metadata says in
config.json's words, and how its tensors are called and laid out. `gguf_config` and `gguf_tensors` read files by it.

An architecture has a line here once a test has compared its logits with those of `transformers`; the others are refused
by name. What files leave unsaid is what llama.cpp assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from octavo.errors import LoadError
from octavo.loading.gguf_metadata import Metadata

RANK = 4  # llama.cpp's number of the pooling of rerankers
# Of config.json and the number of rows in the file: the file's rows in the order of `transformers`.
RowOrder = Callable[[Mapping[str, Any], int], list[int]]

_LLAMA_NAMES: dict[str, Any] = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _shared(name: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_shared("mlp.shared_expert"),
}  # fmt: skip
_AFTER_NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND_NAMES = _AFTER_NAMES | {"ffn_norm": "pre_feedforward_layernorm"}
_UNGATED_NAMES = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_GPT2_NAMES = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip

Setting = Callable[[Metadata], Any]
Names = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Names are those of modules: in a file after "blk.N.", in a checkpoint after the layer's prefix and number. A
    tuple of names is a stack of matrices of equally many rows, or, with "{}" in its one name, of one for each row."""

    class_name: str
    variants: Mapping[str, Callable[[Metadata], bool]] = field(default_factory=dict)  # classes of some of the files
    settings: Mapping[str, Setting] = field(default_factory=dict)  # None is not said
    names: Names | Callable[[Metadata], Names] = field(default_factory=lambda: _LLAMA_NAMES)
    tensor_names: Mapping[str, str] = field(default_factory=dict)  # of tensors: those that end in another way
    top_names: Names | Callable[[Metadata], Names] = field(default_factory=lambda: _LLAMA_TOP)
    layer_prefix: str = "model.layers."
    rows: Mapping[str, RowOrder] = field(default_factory=dict)  # by the file's module
    norm_offset: float = 0.0  # what files have added to the weights of norms
    has_experts: bool = False  # or may have
    is_without_heads: bool = False  # no layer has attention
    turned: tuple[str, ...] = ()  # modules whose matrices `transformers` has the other way round


def _pairs(heads: str) -> RowOrder:
    """From rows that alternate between the two halves of a head, for ggml's rotary kernel, to one half after the
    other."""

    def order(config: Mapping[str, Any], n: int) -> list[int]:
        size = n // config[heads]
        return [row for head in range(0, n, size) for half in (0, 1) for row in range(head + half, head + size, 2)]

    return order


def _per_head(config: Mapping[str, Any], n: int) -> list[int]:
    """From all queries, all keys, all values to those of one head after the other."""
    size = n // (3 * config["num_attention_heads"])
    return [part + row for head in range(0, n // 3, size) for part in range(0, n, n // 3) for row in _run(head, size)]


def _per_group(config: Mapping[str, Any], n: int) -> list[int]:
    """From all queries, all keys, all values to those of one key/value head after the other."""
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    size = n // (heads + 2 * groups)
    queries = heads // groups * size
    runs = [
        run
        for i in range(groups)
        for run in (_run(i * queries, queries), _run((heads + i) * size, size), _run((heads + groups + i) * size, size))
    ]
    return [row for run in runs for row in run]


def _run(begin: int, count: int) -> range:
    return range(begin, begin + count)


_PERMUTED = {"attn_q": _pairs("num_attention_heads"), "attn_k": _pairs("num_key_value_heads")}


def _biases(setting: str, *modules: str) -> dict[str, Setting]:
    return {setting: lambda m: m.has_biases(modules)}


def _number(key: str) -> Setting:
    return lambda m: m.number(key, None)


def _real(key: str) -> Setting:
    return lambda m: m.real(key, None)


def _layer_types(period: int) -> Setting:
    """All layers but every n-th slide, unless the file lists them."""

    def find(m: Metadata) -> list[str] | None:
        if not m.number("attention.sliding_window", 0):
            return None
        listed = m.get("attention.sliding_window_pattern")
        count = m.number("block_count")
        if not isinstance(listed, list):
            step = listed if isinstance(listed, int) and listed > 0 else period
            listed = [(i + 1) % step != 0 for i in range(count)]
        return ["sliding_attention" if slides else "full_attention" for slides in listed[:count]]

    return find


def _window(period: int) -> dict[str, Setting]:
    return {
        "sliding_window": lambda m: m.number("attention.sliding_window", 0) or None,
        "layer_types": _layer_types(period),
    }


def _gemma_scalar(num_layers_of_27b: int) -> Setting:
    """Queries are scaled by the size of a head, but in the model of 27B by hidden size over heads."""

    def find(m: Metadata) -> float:
        if m.number("block_count") == num_layers_of_27b:
            return m.number("embedding_length") / m.number("attention.head_count")
        return m.head_dim

    return find


def _by_layer_type(local_theta: float) -> Setting:
    """The file's rotary embedding is that of layers without a window."""
    return lambda m: {
        "full_attention": m.rope(),
        "sliding_attention": {"rope_type": "default", "rope_theta": m.real("rope.freq_base_swa", local_theta)},
    }


def _has_two_norms(m: Metadata) -> bool:
    return "blk.0.attn_norm_2.weight" in m.tensors


_LLAMA_BIASES = _biases("attention_bias", "attn_q", "attn_k", "attn_v", "attn_output") | _biases(
    "mlp_bias", "ffn_gate", "ffn_up", "ffn_down"
)


def _of_experts(setting: Setting) -> Setting:
    return lambda m: setting(m) if m.number("expert_count", 0) else None


def _experts(normalizes: bool = False) -> dict[str, Setting]:
    """What files with experts say. `normalizes` is llama.cpp's own, where the file does not say."""
    settings: dict[str, Setting] = {
        "num_experts": lambda m: m.number("expert_count"),
        "num_experts_per_tok": lambda m: m.number("expert_used_count"),
        "norm_topk_prob": lambda m: bool(m.get("expert_weights_norm", normalizes)),
        "moe_intermediate_size": _number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": _number("expert_shared_feed_forward_length"),
        # A layer without a router is dense.
        "mlp_only_layers": lambda m: [
            i for i in range(m.number("block_count")) if f"blk.{i}.ffn_gate_inp.weight" not in m.tensors
        ],
    }
    return {name: _of_experts(setting) for name, setting in settings.items()}


_SILU: dict[str, Setting] = {"hidden_act": lambda m: "silu"}
_SOFTCAPS = {
    "attn_logit_softcapping": _real("attn_logit_softcapping"),
    "final_logit_softcapping": _real("final_logit_softcapping"),
}
_QKV_BIAS = _biases("attention_bias", "attn_q", "attn_k", "attn_v")


_ROUTED = _experts() | {
    "first_k_dense_replace": lambda m: m.number("leading_dense_block_count", 0),
    "n_shared_experts": lambda m: m.number("expert_shared_count", 0),
    "routed_scaling_factor": lambda m: m.real("expert_weights_scale", 1.0) or 1.0,
    "n_group": lambda m: m.number("expert_group_count", 1),
    "topk_group": lambda m: m.number("expert_group_used_count", 1),
}
_ROUTED_NAMES = _LLAMA_NAMES | _EXPERT_NAMES | _shared("mlp.shared_experts") | {
    "exp_probs_b": "mlp.gate.e_score_correction",
}  # fmt: skip
_GRANITE = {
    "attention_multiplier": _real("attention.scale"), "embedding_multiplier": _real("embedding_scale"),
    "residual_multiplier": _real("residual_scale"), "logits_scaling": _real("logit_scale"),
}  # fmt: skip
# Gate and up are one matrix in checkpoints. Files of models without experts have the shared one's as others their own.
_GRANITE_NAMES = (
    _LLAMA_NAMES
    | _EXPERT_NAMES
    | {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        **{f"ffn_gate{end}": "shared_mlp.input_linear.0" for end in ("", "_shexp")},
        **{f"ffn_up{end}": "shared_mlp.input_linear.1" for end in ("", "_shexp")},
        **{f"ffn_down{end}": "shared_mlp.output_linear" for end in ("", "_shexp")},
    }
)
_JAMBA_NAMES = {
    "ffn_norm": "pre_ff_layernorm", "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}  # fmt: skip


def _state_space(name: str) -> dict[str, str]:
    """Modules of Mamba 1 and 2, which checkpoints have under this one."""
    modules = {
        "in": "in_proj", "conv1d": "conv1d", "x": "x_proj", "dt": "dt_proj", "dt_norm": "dt_layernorm",
        "b_norm": "b_layernorm", "c_norm": "c_layernorm", "norm": "norm", "out": "out_proj",
    }  # fmt: skip
    return {f"ssm_{own}": f"{name}.{module}" for own, module in modules.items()}


def _state_tensors(name: str, has_time_matrix: bool = False) -> dict[str, str]:
    """Tensors of theirs whose names end in another way."""
    found = {"ssm_a": f"{name}.A_log", "ssm_d": f"{name}.D"}
    return found if has_time_matrix else found | {"ssm_dt.bias": f"{name}.dt_bias"}


def _mamba_2(names: Mapping[str, str]) -> dict[str, Setting]:
    """Sizes, and which modules have biases, by the names that the configuration has for them."""
    settings: dict[str, Setting] = {
        "heads": _number("ssm.time_step_rank"), "groups": _number("ssm.group_count"),
        "head_size": lambda m: m.number("ssm.inner_size") // m.number("ssm.time_step_rank"),
        "state": _number("ssm.state_size"), "kernel": _number("ssm.conv_kernel"),
        "bias": lambda m: m.has_biases(("ssm_in",)), "conv_bias": lambda m: m.has_biases(("ssm_conv1d",)),
    }  # fmt: skip
    return {name: settings[what] for what, name in names.items()}


_HYBRID_MAMBA = _mamba_2({
    "heads": "mamba_n_heads", "groups": "mamba_n_groups", "head_size": "mamba_d_head", "state": "mamba_d_state",
    "kernel": "mamba_d_conv", "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
})  # fmt: skip


def _layers_by(kinds: Mapping[str, str], otherwise: str) -> Setting:
    """The type of each layer by the first of these tensors that it has."""
    return lambda m: [
        next((kind for tensor, kind in kinds.items() if m.has(tensor, i)), otherwise)
        for i in range(m.number("block_count"))
    ]


def _period(tensor: str) -> Setting:
    """Every how many layers that have this tensor come, and the first one's number."""

    def find(m: Metadata) -> tuple[int, int]:
        count = m.number("block_count")
        having = [i for i in range(count) if m.has(tensor, i)] or [count]
        period = having[1] - having[0] if len(having) > 1 else count + 1
        if having != list(range(having[0], max(count, having[0] + 1), period)):
            raise LoadError(f"{m.file.path}: {tensor} in the layers {having} of {count}, in no period, is not built.")
        return period, having[0]

    return find


def _periods(tensor: str, name: str) -> dict[str, Setting]:
    find = _period(tensor)
    return {f"{name}_layer_period": lambda m: find(m)[0], f"{name}_layer_offset": lambda m: find(m)[1]}


_LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
}  # fmt: skip


def _latent_head(m: Metadata) -> int:
    """Of a query: files say how large keys are once they are made under another name than older ones."""
    return m.number("attention.key_length_mla", m.head_dim)


def _latent_rope(m: Metadata) -> dict[str, Any]:
    """llama.cpp's one number for yarn's mscale stands for two, which are equal in the models that there are."""
    rope, sharper = m.rope() | {"partial_rotary_factor": 1.0}, m.real("rope.scaling.yarn_log_multiplier", 0.0)
    return rope | ({"mscale": 10 * sharper, "mscale_all_dim": 10 * sharper} if sharper else {})


_LATENT: dict[str, Setting] = {
    "head_dim": lambda m: m.number("rope.dimension_count"),
    "q_lora_rank": lambda m: m.number("attention.q_lora_rank", 0),  # 0 is none
    "kv_lora_rank": lambda m: m.number("attention.kv_lora_rank"),
    "qk_rope_head_dim": lambda m: m.number("rope.dimension_count"),
    "qk_nope_head_dim": lambda m: _latent_head(m) - m.number("rope.dimension_count"),
    "rope_parameters": _latent_rope,
}


_BACKBONE_TOP = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_NEMOTRON_H = Architecture(
    class_name="NemotronHForCausalLM", top_names=_BACKBONE_TOP, layer_prefix="backbone.layers.",
    names=_EXPERT_NAMES | _state_space("mixer") | {
        "attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate", **_shared("mixer.shared_experts"),
    },
    tensor_names=_state_tensors("mixer") | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    settings=_ROUTED | _mamba_2({
        "heads": "mamba_num_heads", "head_size": "mamba_head_dim", "groups": "n_groups", "state": "ssm_state_size",
        "kernel": "conv_kernel", "bias": "use_bias", "conv_bias": "use_conv_bias",
    }) | {
        "moe_shared_expert_intermediate_size": _number("expert_shared_feed_forward_length"),
        "mlp_bias": lambda m: m.has_biases(("ffn_up", "ffn_down")),
        "layer_types": _layers_by(
            {"attn_q.weight": "full_attention", "ssm_in.weight": "linear_attention", "ffn_gate_inp.weight": "moe"},
            "mlp",
        ),
    },
    has_experts=True,
)  # fmt: skip
_LFM_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_LFM_NAMES = _LLAMA_NAMES | {
    "attn_norm": "operator_norm", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_LFM: dict[str, Setting] = {
    "layer_types": _layers_by({"attn_q.weight": "full_attention"}, "conv"),
    "conv_L_cache": _number("shortconv.l_cache"),
    "conv_bias": lambda m: m.has_biases(("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj")),
}


def _growing_rope(m: Metadata) -> dict[str, Any]:
    """Queries grow with their positions from where the original context ends on."""
    rope, growth = m.rope(), m.real("attention.temperature_scale", 0.0)
    if not growth:
        return rope
    sharper = m.real("rope.scaling.yarn_log_multiplier", 0.0)
    rope |= {"mscale": 1.0, "mscale_all_dim": sharper} if sharper else {}
    for key, name in (("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")):
        if (beta := m.real(name, None)) is not None:
            rope[key] = beta
    return rope | {"llama_4_scaling_beta": growth}


_DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_DELTA: dict[str, Setting] = {
    "linear_conv_kernel_dim": _number("ssm.conv_kernel"), "linear_key_head_dim": _number("ssm.state_size"),
    "linear_num_key_heads": _number("ssm.group_count"), "linear_num_value_heads": _number("ssm.time_step_rank"),
    "linear_value_head_dim": lambda m: m.number("ssm.inner_size") // m.number("ssm.time_step_rank"),
    "layer_types": _layers_by({"attn_q.weight": "full_attention"}, "linear_attention"),
}  # fmt: skip
# Their values' heads go by turns to the keys', and the layers that guess come last.
_DELTA_OF_35: dict[str, Setting] = {
    "linear_value_heads_alternate": lambda m: True,
    "num_hidden_layers": lambda m: m.number("block_count") - m.number("nextn_predict_layers", 0),
}
_TOKEN_INPUTS_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
_TOKEN_INPUTS = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"
}  # fmt: skip


def _each(m: Metadata, key: str) -> list[Any]:
    """A value for each layer, where files may have one for all."""
    value, count = m.get(key), m.number("block_count")
    return value[:count] if isinstance(value, list) else [value] * count


def _of_layers(key: str, slides: bool) -> Setting:
    """The number of layers with a window, or without."""

    def find(m: Metadata) -> int | None:
        pattern = _each(m, "attention.sliding_window_pattern")
        found = {n for n, has_window in zip(_each(m, key), pattern, strict=True) if bool(has_window) == slides}
        if len(found) > 1:
            raise LoadError(f"{m.file.path}: {key} of {sorted(found, key=str)} in layers of one kind is not built.")
        return found.pop() if found else None

    return find


def _rows_of(tensor: str) -> Setting:
    return lambda m: m.tensors[tensor].shape[0] if tensor in m.tensors else None


def _are_values(m: Metadata) -> bool:
    """Whether layers without a window have no values' matrices: their keys are that too."""
    full = [i for i, slides in enumerate(_each(m, "attention.sliding_window_pattern")) if not slides]
    return any(m.has("attn_k.weight", i) and not m.has("attn_v.weight", i) for i in full)


def _xielu(m: Metadata) -> list[tuple[float, ...]]:
    """The activation's numbers of each layer, which checkpoints have as tensors."""
    parts = [m.file.metadata.get(f"xielu.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")]
    count = m.number("block_count")
    if not all(isinstance(part, list) and len(part) >= count for part in parts):
        raise LoadError(f"{m.file.path} is damaged: xielu.alpha_p, alpha_n, beta and eps are not {count} numbers each.")
    return [tuple(float(x) for x in numbers) for numbers in zip(*(part or () for part in parts), strict=True)]


_GEMMA_3 = Architecture(
    class_name="Gemma3ForCausalLM", names=_LLAMA_NAMES | _AROUND_NAMES, norm_offset=1.0,
    settings=_SOFTCAPS | _window(6) | {
        "query_pre_attn_scalar": _gemma_scalar(62), "rope_parameters": _by_layer_type(10000.0)
    },
)  # fmt: skip
_GEMMA_3N: dict[str, Setting] = {
    "num_kv_shared_layers": lambda m: m.number("attention.shared_kv_layers"),
    "intermediate_size": lambda m: _each(m, "feed_forward_length"),
    "hidden_size_per_layer_input": _number("embedding_length_per_layer_input"),
    "vocab_size_per_layer_input": _rows_of("per_layer_token_embd.weight"),
    "laurel_rank": _rows_of("blk.0.laurel_l.weight"), "altup_num_inputs": _number("altup.num_inputs"),
    "altup_active_idx": _number("altup.active_idx"),
    # Files have how many standard deviations are cut off, checkpoints which share.
    "activation_sparsity_pattern": lambda m: [
        NormalDist().cdf(scale) if math.isfinite(scale) else 0.0 for scale in _each(m, "activation_sparsity_scale")
    ],
    "rope_parameters": _by_layer_type(10000.0),
} | _window(5)  # fmt: skip
_GEMMA_4: dict[str, Setting] = {
    "head_dim": lambda m: m.number("attention.key_length_swa"), "global_head_dim": _number("attention.key_length"),
    "num_key_value_heads": _of_layers("attention.head_count_kv", slides=True),
    "num_global_key_value_heads": lambda m: (
        _of_layers("attention.head_count_kv", slides=False)(m) if _are_values(m) else None
    ),
    "attention_k_eq_v": _are_values, "num_kv_shared_layers": lambda m: m.number("attention.shared_kv_layers", 0),
    "intermediate_size": lambda m: min(_each(m, "feed_forward_length")),
    "use_double_wide_mlp": lambda m: len(set(_each(m, "feed_forward_length"))) > 1,
    "hidden_size_per_layer_input": lambda m: m.number("embedding_length_per_layer_input", 0),
    "vocab_size_per_layer_input": _rows_of("per_layer_token_embd.weight"),
    "enable_moe_block": lambda m: m.number("expert_count", 0) > 0,
    "rope_parameters": lambda m: {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": m.real("rope.freq_base"),
            "partial_rotary_factor": m.rotary_share(),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": m.real("rope.freq_base_swa", 10000.0)},
    },
} | _window(6) | {
    name: setting for name, setting in _experts(normalizes=True).items() if name != "mlp_only_layers"
}  # fmt: skip
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

# An encoder's positions begin at 0 in files: those of RoBERTa's that stand for padding are left out.
_ENCODER_TOP = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
}  # fmt: skip
_ENCODER: dict[str, Setting] = {"type_vocab_size": _rows_of("token_types.weight")}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        class_name="LlamaForCausalLM", variants={"MixtralForCausalLM": lambda m: m.number("expert_count", 0) > 0},
        names=_LLAMA_NAMES | _EXPERT_NAMES, settings=_SILU | _LLAMA_BIASES | _experts(normalizes=True),
        rows=_PERMUTED, has_experts=True,
    ),
    "qwen2moe": Architecture(
        class_name="Qwen2MoeForCausalLM", names=_LLAMA_NAMES | _EXPERT_NAMES, settings=_experts(), has_experts=True
    ),
    "qwen3moe": Architecture(
        class_name="Qwen3MoeForCausalLM", names=_LLAMA_NAMES | _EXPERT_NAMES, settings=_experts(normalizes=True),
        has_experts=True,
    ),
    "olmoe": Architecture(
        class_name="OlmoeForCausalLM", names=_LLAMA_NAMES | _EXPERT_NAMES, settings=_experts(), has_experts=True
    ),
    "qwen2": Architecture(class_name="Qwen2ForCausalLM", settings=_SILU),
    "qwen3": Architecture(class_name="Qwen3ForCausalLM", settings=_SILU),
    # The language models of those that see: for text alone their three positions are one, and pictures' deeper
    # features, which a file of its own has the weights for, are none.
    "qwen2vl": Architecture(class_name="Qwen2ForCausalLM", settings=_SILU),
    "qwen3vl": Architecture(class_name="Qwen3ForCausalLM", settings=_SILU),
    "qwen3vlmoe": Architecture(
        class_name="Qwen3MoeForCausalLM", names=_LLAMA_NAMES | _EXPERT_NAMES, settings=_experts(normalizes=True),
        has_experts=True,
    ),
    "mistral3": Architecture(
        class_name="MistralForCausalLM", settings={"rope_parameters": _growing_rope}, rows=_PERMUTED,
        variants={"Ministral3ForCausalLM": lambda m: m.get("attention.temperature_scale") is not None},
    ),
    "arcee": Architecture(class_name="ArceeForCausalLM", rows=_PERMUTED),
    "apertus": Architecture(
        class_name="ApertusForCausalLM", settings={**_LLAMA_BIASES, "hidden_act": lambda m: "xielu", "xielu": _xielu},
        names=_LLAMA_NAMES | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    ),
    "seed_oss": Architecture(
        class_name="SeedOssForCausalLM", settings=_QKV_BIAS,
        names=_LLAMA_NAMES | {"post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": Architecture(class_name="SmolLM3ForCausalLM", rows=_PERMUTED),
    "ernie4_5": Architecture(
        class_name="Ernie4_5ForCausalLM", settings=_biases("use_bias", "attn_q", "attn_k", "attn_v", "attn_output"),
    ),
    "granite": Architecture(
        class_name="GraniteForCausalLM", rows=_PERMUTED,
        settings=_LLAMA_BIASES | _GRANITE,
    ),
    "granitemoe": Architecture(
        class_name="GraniteMoeForCausalLM", names=_GRANITE_NAMES, rows=_PERMUTED,
        settings=_GRANITE | _experts(normalizes=True) | {
            "shared_intermediate_size": lambda m: m.number("expert_shared_feed_forward_length", 0),
            "attention_bias": lambda m: m.has_biases(("attn_q", "attn_k", "attn_v", "attn_output")),
        },
        variants={"GraniteMoeSharedForCausalLM": lambda m: m.number("expert_shared_feed_forward_length", 0) > 0},
        has_experts=True,
    ),
    # Of the two Bamba's layers rotate.
    "granitehybrid": Architecture(
        class_name="GraniteMoeHybridForCausalLM", rows=_PERMUTED,
        variants={"BambaForCausalLM": lambda m: bool(m.get("rope.scaling.finetuned", True))},
        names=lambda m: _state_space("mamba") | (
            _LLAMA_NAMES | _JAMBA_NAMES if m.get("rope.scaling.finetuned", True) else _GRANITE_NAMES
        ),
        top_names=lambda m: _LLAMA_TOP | (
            {"output_norm": "model.final_layernorm"} if m.get("rope.scaling.finetuned", True) else {}
        ),
        tensor_names=_state_tensors("mamba"),
        settings=_GRANITE | _experts(normalizes=True) | _HYBRID_MAMBA | {
            "num_experts": lambda m: m.number("expert_count", 0),
            "shared_intermediate_size": lambda m: m.number(
                "expert_shared_feed_forward_length", m.number("feed_forward_length")
            ),
            "position_embedding_type": lambda m: "nope",
            "layer_types": _layers_by({"attn_q.weight": "full_attention"}, "linear_attention"),
            "attn_layer_indices": lambda m: [i for i in range(m.number("block_count")) if m.has("attn_q.weight", i)],
        },
        has_experts=True,
    ),
    "mamba": Architecture(
        class_name="MambaForCausalLM", variants={"FalconMambaForCausalLM": lambda m: bool(m.get("ssm.dt_b_c_rms"))},
        names=_state_space("mixer") | {"attn_norm": "norm"}, tensor_names=_state_tensors("mixer", has_time_matrix=True),
        top_names=_BACKBONE_TOP, layer_prefix="backbone.layers.", is_without_heads=True,
        settings={
            "conv_kernel": _number("ssm.conv_kernel"), "state_size": _number("ssm.state_size"),
            "time_step_rank": _number("ssm.time_step_rank"),
            "expand": lambda m: m.number("ssm.inner_size") / m.number("embedding_length"),
            "use_bias": lambda m: m.has_biases(("ssm_in", "ssm_out")),
            "use_conv_bias": lambda m: m.has_biases(("ssm_conv1d",)),
        },
    ),
    "mamba2": Architecture(
        class_name="Mamba2ForCausalLM", names=_state_space("mixer") | {"attn_norm": "norm"},
        tensor_names=_state_tensors("mixer"), top_names=_BACKBONE_TOP, layer_prefix="backbone.layers.",
        is_without_heads=True,
        settings=_mamba_2({
            "heads": "num_heads", "head_size": "head_dim", "groups": "n_groups", "state": "state_size",
            "kernel": "conv_kernel", "bias": "use_bias", "conv_bias": "use_conv_bias",
        }),
    ),
    "jamba": Architecture(
        class_name="JambaForCausalLM",
        names=_LLAMA_NAMES | _EXPERT_NAMES | _JAMBA_NAMES | _state_space("mamba") | {
            "ffn_gate_inp": "feed_forward.router",
        },
        tensor_names=_state_tensors("mamba", has_time_matrix=True),
        top_names=_LLAMA_TOP | {"output_norm": "model.final_layernorm"},
        settings=_periods("attn_q.weight", "attn") | _periods("ffn_gate_inp.weight", "expert") | {
            "num_experts": lambda m: m.number("expert_count", 0), "num_experts_per_tok": _number("expert_used_count"),
            "mamba_d_state": _number("ssm.state_size"), "mamba_d_conv": _number("ssm.conv_kernel"),
            "mamba_dt_rank": _number("ssm.time_step_rank"),
            "mamba_expand": lambda m: m.number("ssm.inner_size") // m.number("embedding_length"),
            "mamba_conv_bias": lambda m: m.has_biases(("ssm_conv1d",)),
            "mamba_proj_bias": lambda m: m.has_biases(("ssm_in", "ssm_out")),
        },
        has_experts=True,
    ),
    # The multipliers are in the weights, and what llama.cpp normalizes is what the gate has multiplied.
    "falcon-h1": Architecture(
        class_name="FalconH1ForCausalLM", names=_LLAMA_NAMES | _JAMBA_NAMES | _state_space("mamba"),
        tensor_names=_state_tensors("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
        top_names=_LLAMA_TOP | {"output_norm": "model.final_layernorm"},
        settings=_HYBRID_MAMBA | {
            "mamba_d_ssm": _number("ssm.inner_size"), "mamba_norm_before_gate": lambda m: False,
            "mamba_rms_norm": lambda m: m.has("ssm_norm.weight"),
            "projectors_bias": lambda m: m.has_biases(("ssm_out",)),
            "mlp_bias": lambda m: m.has_biases(("ffn_gate", "ffn_up", "ffn_down")),
        },
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": Architecture(
        class_name="Lfm2ForCausalLM", names=_LFM_NAMES, top_names=_LFM_TOP,
        settings=_LFM | {"block_auto_adjust_ff_dim": lambda m: False},  # it is what the file says
    ),
    "lfm2moe": Architecture(
        class_name="Lfm2MoeForCausalLM", top_names=_LFM_TOP,
        names=_EXPERT_NAMES | _LFM_NAMES | {"ffn_gate_inp": "feed_forward.gate"},
        tensor_names={"exp_probs_b.bias": "feed_forward.expert_bias"},
        settings=_LFM | _experts(normalizes=True) | {
            "num_dense_layers": lambda m: m.number("leading_dense_block_count", 0),
            "use_expert_bias": lambda m: m.has("exp_probs_b.bias"),
            "routed_scaling_factor": lambda m: m.real("expert_weights_scale", 1.0) or 1.0,
        },
        has_experts=True,
    ),
    "qwen3next": Architecture(
        class_name="Qwen3NextForCausalLM", norm_offset=1.0, tensor_names=_state_tensors("linear_attn"),
        names=_LLAMA_NAMES | _EXPERT_NAMES | _DELTA_NAMES, settings=_experts(normalizes=True) | _DELTA,
        has_experts=True,
    ),
    "qwen35": Architecture(
        class_name="Qwen3_5ForCausalLM", norm_offset=1.0, tensor_names=_state_tensors("linear_attn"),
        names=_LLAMA_NAMES | _DELTA_NAMES, settings=_DELTA | _DELTA_OF_35,
    ),
    "qwen35moe": Architecture(
        class_name="Qwen3_5MoeForCausalLM", norm_offset=1.0, tensor_names=_state_tensors("linear_attn"),
        names=_LLAMA_NAMES | _EXPERT_NAMES | _DELTA_NAMES, settings=_experts(normalizes=True) | _DELTA | _DELTA_OF_35,
        has_experts=True,
    ),
    "dots1": Architecture(
        class_name="Dots1ForCausalLM", names=_ROUTED_NAMES, settings=_ROUTED | {"sliding_window": lambda m: 0},
        has_experts=True,
    ),
    "glm4moe": Architecture(
        class_name="Glm4MoeForCausalLM", names=_ROUTED_NAMES | {"post_attention_norm": "post_attention_layernorm"},
        settings=_ROUTED | _QKV_BIAS | {
            "use_qk_norm": lambda m: m.has("attn_q_norm.weight"),
            "num_hidden_layers": lambda m: m.number("block_count") - m.number("nextn_predict_layers", 0),
        },
        has_experts=True,
    ),
    "ernie4_5-moe": Architecture(
        class_name="Ernie4_5_MoeForCausalLM", names=_ROUTED_NAMES,
        tensor_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        settings=_experts(normalizes=True) | {
            "use_bias": lambda m: m.has_biases(("attn_q", "attn_k", "attn_v", "attn_output")),
            "moe_layer_start_index": lambda m: m.number("leading_dense_block_count", 0),
            "moe_layer_interval": lambda m: m.number("interleave_moe_layer_step", 1),
            "moe_num_shared_experts": lambda m: m.number("expert_shared_count", 0),
        },
        has_experts=True,
    ),
    "hunyuan-dense": Architecture(class_name="HunYuanDenseV1ForCausalLM", names=_LLAMA_NAMES | _HUNYUAN_NORMS),
    "hunyuan-moe": Architecture(
        class_name="HunYuanMoEV1ForCausalLM",
        names=_LLAMA_NAMES | _EXPERT_NAMES | _HUNYUAN_NORMS | _shared("mlp.shared_mlp") | {
            "ffn_gate_inp": "mlp.gate.wg",
        },
        settings=_experts(normalizes=True) | {
            "intermediate_size": lambda m: m.number("expert_shared_feed_forward_length"),
        },
        has_experts=True,
    ),
    "minimax-m2": Architecture(
        class_name="MiniMaxM2ForCausalLM", names=_LLAMA_NAMES | _EXPERT_NAMES,
        tensor_names={"exp_probs_b.bias": "mlp.e_score_correction_bias"}, settings=_experts(normalizes=True),
        has_experts=True,
    ),
    "phimoe": Architecture(
        class_name="PhimoeForCausalLM",
        names=_LLAMA_NAMES | _EXPERT_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"},
        settings=_experts() | _biases("attention_bias", "attn_q", "attn_k", "attn_v", "attn_output") | {
            "lm_head_bias": lambda m: "output.bias" in m.tensors,
            "sliding_window": lambda m: m.number("attention.sliding_window", 0) or None,
        },
        has_experts=True,
    ),
    "dbrx": Architecture(
        class_name="DbrxForCausalLM", layer_prefix="transformer.blocks.",
        top_names=_GPT2_TOP | {"output_norm": "transformer.norm_f"},
        names=_EXPERT_NAMES | {
            "attn_norm": "norm_attn_norm.norm_1", "attn_output_norm": "norm_attn_norm.norm_2",
            "attn_qkv": "norm_attn_norm.attn.Wqkv", "attn_output": "norm_attn_norm.attn.out_proj",
            "ffn_gate_inp": "ffn.router.layer",
        },
        settings={
            "attn_config": lambda m: {
                "kv_n_heads": m.number("attention.head_count_kv"), "clip_qkv": m.real("attention.clamp_kqv", None),
                "rope_theta": m.real("rope.freq_base", 10000.0),
            },
            "ffn_config": lambda m: {
                "ffn_hidden_size": m.number("feed_forward_length"), "moe_num_experts": m.number("expert_count"),
                "moe_top_k": m.number("expert_used_count"), "moe_normalize_expert_weights": 1.0,
            },
        },
        has_experts=True,
    ),
    "afmoe": Architecture(
        class_name="AfmoeForCausalLM",
        names=_ROUTED_NAMES | {
            "attn_gate": "self_attn.gate_proj", "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm", "ffn_gate_inp": "mlp.router.gate",
        },
        tensor_names={"exp_probs_b.bias": "mlp.expert_bias"},
        settings=_experts(normalizes=True) | _window(4) | {
            "num_dense_layers": lambda m: m.number("leading_dense_block_count", 0),
            "num_shared_experts": lambda m: m.number("expert_shared_count", 0),
            "route_scale": lambda m: m.real("expert_weights_scale", 1.0), "mup_enabled": lambda m: True,
        },
        has_experts=True,
    ),
    "exaone-moe": Architecture(
        class_name="ExaoneMoeForCausalLM", names=_ROUTED_NAMES,
        settings=_ROUTED | _window(4) | {
            "num_shared_experts": lambda m: m.number("expert_shared_count", 0),
            "num_hidden_layers": lambda m: m.number("block_count") - m.number("nextn_predict_layers", 0),
        },
        has_experts=True,
    ),
    "jais2": Architecture(
        class_name="Jais2ForCausalLM", rows=_PERMUTED,
        settings=_biases("attention_bias", "attn_q", "attn_k", "attn_v", "attn_output") | _biases(
            "mlp_bias", "ffn_up", "ffn_down"
        ),
    ),
    "gemma": Architecture(class_name="GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture(
        class_name="Gemma2ForCausalLM", names=_LLAMA_NAMES | _AROUND_NAMES, norm_offset=1.0,
        settings=_SOFTCAPS | _window(2) | {"query_pre_attn_scalar": _gemma_scalar(46)},
    ),
    "gemma3": _GEMMA_3,
    "gemma-embedding": replace(
        _GEMMA_3, class_name="Gemma3TextModel",
        settings={**_GEMMA_3.settings, "use_bidirectional_attention": lambda m: not m.get("attention.causal", False)},
    ),
    "gemma3n": Architecture(
        class_name="Gemma3nForCausalLM", settings=_SOFTCAPS | _GEMMA_3N,
        top_names=_LLAMA_TOP | _TOKEN_INPUTS_TOP | {
            "altup_proj": ("model.altup_projections.{}",), "altup_unembd_proj": ("model.altup_unembed_projections.{}",),
        },
        names=_LLAMA_NAMES | _AROUND_NAMES | _TOKEN_INPUTS | {
            "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        tensor_names={"altup_correct_scale.weight": "altup.correct_output_scale"},
    ),
    "gemma4": Architecture(
        class_name="Gemma4ForCausalLM", top_names=_LLAMA_TOP | _TOKEN_INPUTS_TOP, settings=_SOFTCAPS | _GEMMA_4,
        names=_LLAMA_NAMES | _AROUND_NAMES | _TOKEN_INPUTS | {
            "ffn_gate_inp": "router.proj", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        tensor_names={
            "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale", "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
        },
        has_experts=True,
    ),
    "olmo": Architecture(
        class_name="OlmoForCausalLM", settings={"clip_qkv": _real("attention.clamp_kqv")}, rows=_PERMUTED
    ),
    "olmo2": Architecture(
        class_name="Olmo2ForCausalLM",
        variants={"Olmo3ForCausalLM": lambda m: m.number("attention.sliding_window", 0) > 0},
        names=_LLAMA_NAMES | _AFTER_NAMES,
        settings=_window(4) | {
            "rope_parameters": lambda m: _by_layer_type(m.real("rope.freq_base", 10000.0))(m)
            if m.number("attention.sliding_window", 0) else m.rope(),
        },
    ),
    "exaone4": Architecture(
        class_name="Exaone4ForCausalLM", names=_LLAMA_NAMES | _AFTER_NAMES,
        settings=_window(4) | {"sliding_window": lambda m: m.number("attention.sliding_window", 0)},
    ),
    "glm4": Architecture(
        class_name="Glm4ForCausalLM", settings=_QKV_BIAS,
        names=_LLAMA_NAMES | {
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "phi3": Architecture(
        class_name="Phi3ForCausalLM", names=_LLAMA_NAMES | {
            "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"
        },
        settings={
            "sliding_window": lambda m: m.number("attention.sliding_window", 0) or None,
            "original_max_position_embeddings": _number("rope.scaling.original_context_length"),
        },
    ),
    "command-r": Architecture(
        class_name="CohereForCausalLM",
        settings={
            "logit_scale": _real("logit_scale"), "use_qk_norm": lambda m: "blk.0.attn_q_norm.weight" in m.tensors
        },
    ),
    "cohere2": Architecture(
        class_name="Cohere2ForCausalLM", settings=_window(4) | {"logit_scale": _real("logit_scale")}
    ),
    "nemotron": Architecture(class_name="NemotronForCausalLM", settings=_LLAMA_BIASES, norm_offset=1.0),
    "starcoder2": Architecture(
        class_name="Starcoder2ForCausalLM", names=_LLAMA_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings=_biases("use_bias", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"),
    ),
    "stablelm": Architecture(
        class_name="StableLmForCausalLM",
        names=_LLAMA_NAMES | {
            "attn_q_norm": ("self_attn.q_layernorm.norms.{}",), "attn_k_norm": ("self_attn.k_layernorm.norms.{}",)
        },
        settings=_biases("use_qkv_bias", "attn_q", "attn_k", "attn_v") | {
            "use_parallel_residual": lambda m: "blk.0.ffn_norm.weight" not in m.tensors,
            "qk_layernorm": lambda m: "blk.0.attn_q_norm.weight" in m.tensors,
        },
    ),
    "phi2": Architecture(
        class_name="PhiForCausalLM",
        names=_LLAMA_NAMES | {
            "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
        },
        top_names=_LLAMA_TOP | {"output_norm": "model.final_layernorm"},
    ),
    "gptneox": Architecture(
        class_name="GPTNeoXForCausalLM",
        names=_LLAMA_NAMES | _UNGATED_NAMES | {
            "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"
        },
        top_names={
            "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"
        },
        layer_prefix="gpt_neox.layers.", rows={"attn_qkv": _per_head},
        settings={
            "use_parallel_residual": lambda m: bool(m.get("use_parallel_residual", True)),
            "attention_bias": lambda m: m.has_biases(("attn_qkv", "attn_output")),
        },
    ),
    # Those of 40B and more have a second norm, for attention.
    "falcon": Architecture(
        class_name="FalconForCausalLM",
        names=lambda m: _LLAMA_NAMES | _UNGATED_NAMES | {
            "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
            "attn_norm": "ln_mlp" if _has_two_norms(m) else "input_layernorm", "attn_norm_2": "ln_attn",
        },
        top_names=_GPT2_TOP | {"token_embd": "transformer.word_embeddings"}, layer_prefix="transformer.h.",
        rows={"attn_qkv": _per_group},
        settings=_biases("bias", "attn_qkv", "attn_output", "ffn_up", "ffn_down") | {
            "multi_query": lambda m: m.number("attention.head_count_kv", 1) == 1,
            "new_decoder_architecture": lambda m: m.number("attention.head_count_kv", 1) > 1,
            "num_ln_in_parallel_attn": lambda m: 2 if _has_two_norms(m) else 1,
        },
    ),
    "bloom": Architecture(
        class_name="BloomForCausalLM",
        names=_LLAMA_NAMES | _UNGATED_NAMES | {
            "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"
        },
        top_names=_GPT2_TOP | {
            "token_embd": "transformer.word_embeddings", "token_embd_norm": "transformer.word_embeddings_layernorm"
        },
        layer_prefix="transformer.h.", rows={"attn_qkv": _per_head},
    ),
    "mpt": Architecture(
        class_name="MptForCausalLM",
        names={
            "attn_norm": "norm_1", "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj", "ffn_down": "ffn.down_proj",
        },
        top_names=_GPT2_TOP | {"output_norm": "transformer.norm_f"}, layer_prefix="transformer.blocks.",
        settings={"attn_config": lambda m: {
            "alibi_bias_max": m.real("attention.max_alibi_bias", 8.0), "clip_qkv": m.real("attention.clamp_kqv", None)
        }},
    ),
    "gpt2": Architecture(
        class_name="GPT2LMHeadModel", names=_GPT2_NAMES, top_names=_GPT2_TOP, layer_prefix="transformer.h.",
        turned=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "starcoder": Architecture(
        class_name="GPTBigCodeForCausalLM", names=_GPT2_NAMES, top_names=_GPT2_TOP, layer_prefix="transformer.h.",
        settings={"multi_query": lambda m: m.number("attention.head_count_kv", 1) == 1},
    ),
    "deepseek2": Architecture(
        class_name="DeepseekV2ForCausalLM",
        variants={"DeepseekV3ForCausalLM": lambda m: m.number("expert_gating_func", 1) == 2},  # sigmoid
        names=_ROUTED_NAMES | _LATENT_NAMES,
        settings=_ROUTED | _LATENT | {
            "v_head_dim": lambda m: m.number("attention.value_length_mla", m.number("attention.value_length")),
            "topk_method": lambda m: "group_limited_greedy" if m.number("expert_group_count", 1) > 1 else "greedy",
        },
        has_experts=True,
    ),
    # llama.cpp knows the multipliers of the model, of which there is one size.
    "minicpm3": Architecture(class_name="MiniCPM3ForCausalLM", names=_LLAMA_NAMES | _LATENT_NAMES, settings=_LATENT),
    "gpt-oss": Architecture(
        class_name="GptOssForCausalLM",
        names=_LLAMA_NAMES | _EXPERT_NAMES | {
            "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"
        },
        tensor_names={"attn_sinks.weight": "self_attn.sinks"},
        settings=_experts(normalizes=True) | _window(2) | {
            "rope_parameters": lambda m: m.rope() | {"truncate": False},  # the model's; files do not say
            "attention_bias": lambda m: m.has_biases(("attn_q", "attn_k", "attn_v", "attn_output")),
            "intermediate_size": lambda m: m.number("expert_feed_forward_length"),
        },
        has_experts=True,
    ),
    "bert": Architecture(
        class_name="BertModel", layer_prefix="encoder.layer.", settings=_ENCODER,
        # RoBERTa's head, whose first matrix stands where BERT's pooler does.
        variants={"BertForSequenceClassification": lambda m: m.number("pooling_type", 0) == RANK},
        top_names=_ENCODER_TOP | {"cls": "pooler.dense", "cls.output": "classifier"},
        names={
            "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
        },
    ),
    "nomic-bert": Architecture(
        class_name="NomicBertModel", top_names=_ENCODER_TOP | {"token_embd_norm": "emb_ln"},
        layer_prefix="encoder.layers.", settings=_ENCODER,
        names={
            "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2",
        },
    ),
}  # fmt: skip
