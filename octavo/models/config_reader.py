"""Reading of config.json into a `ModelDescription`: the part that is the same for all families. The table
`octavo.models.families` has the differences.

A setting that config.json leaves out has the default of the architecture's configuration class in transformers 5. A
null counts as left out, except for settings where null has a meaning (`_NULLABLE`).
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import LoadError
from octavo.layers.attention import AttentionDescription
from octavo.layers.experts import ExpertsDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.norm import NormDescription
from octavo.layers.rotary import ROPE_KINDS, AttentionTemperature, RopeConfig
from octavo.models.description import LayerDescription, ModelDescription
from octavo.ops import Routing

Config = Mapping[str, Any]
# A function of the configuration and the layer's number. Other values in a family's table are constants.
Setting = Callable[[Config, int], Any]

# Defaults of most configuration classes. Sizes have no default: config.json must have them.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "mamba_hidden_act": "silu",
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
    "mlp_layer_types": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": True,
}
# Defaults of single classes, which replace or extend `_DEFAULTS`, by the architecture's name without its head. None:
# the value follows from other settings by a rule of the family's table.
_OWN_DEFAULTS: dict[str, Config] = json.loads(Path(__file__).with_name("defaults.json").read_text())
# Setting -> the classes that do not have it, though other classes do. In files of these classes it is ignored.
_ABSENT: dict[str, list[str]] = json.loads(Path(__file__).with_name("absent_settings.json").read_text())
_HEADS = re.compile("(ForCausalLM|LMHeadModel|Model|ForMaskedLM|For(Sequence|Token)Classification)$")
# Standard name of a setting -> other names that configurations use for it.
_ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "n_embed", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "dff", "ffn_hidden_size", "hidden_dim"),
    "hidden_act": ("hidden_activation", "activation_function", "activation", "afn"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "model_max_length"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "rope_theta": ("rotary_emb_base", "global_rope_theta"),
    "partial_rotary_factor": ("rotary_pct", "rotary_emb_fraction"),
    "rope_local_base_freq": ("local_rope_theta",),
    "sliding_window": ("window_size", "attention_window_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "first_k_dense_replace": ("num_dense_layers",),
    "routed_scaling_factor": ("router_scaling_factor", "route_scale", "moe_routed_scaling_factor"),
    "layer_types": ("layers_block_type",),
    "mamba_hidden_act": ("hidden_mamba_act",),
    "mamba_n_heads": ("mamba_num_heads", "n_mamba_heads"),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_d_state": ("state_size", "ssm_state_size"),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_n_groups": ("n_groups", "mamba_ngroups"),
    "mamba_expand": ("expand",),
    "mamba_dt_rank": ("time_step_rank",),
    "mamba_conv_bias": ("use_conv_bias",),
}
_STANDARD = {own: standard for standard, names in _ALIASES.items() for own in names}
# Settings that are ignored on purpose: they matter only to training, losses, caches, tokenizers, other modules or the
# choice of a kernel, or no longer matter.
_CHANGES_NOTHING = re.compile(
    r"""_\w+|\w*(dropout|pdrop|layerdrop|jitter|initializer|variance_scale|rescale|fp32|_loss_coef|loss_coefficient
    |loss_scaling_factor|token_id|scoring_func|version|precision)\w*
    |output_\w+|summary_\w+|return_dict|use_cache|problem_type|id2label|label2id|num_labels|is_(de|en)coder\w*|pretraining_tp
    |\w*dtype|top_k_experts|chunk_size_feed_forward|(mamba_)?chunk_size|num_logits_to_keep|use_mamba\w+|use_associative_scan
    |slow_but_exact|reorder_and_upcast_attn|time_step_\w+|linear_(a_log|dt)_\w+|altup_coef_clip|init_(std|device|method)
    |architectures|auto_map|model_type|tokenizer_class|transformers\w*|attn_implementation|\w*flash_attn\w*|tie_\w+
    |(quantization|compression)_config|quantization|task_specific_params|torchscript|sentence_transformers|sbert_\w+
    |vision_\w+|audio_\w+|text_config|num_nextn_predict_layers|mtp_\w+|num_mtp\w*|ep_size|aux_loss_alpha|seq_aux
    |unsloth\w*|finetuning_task|gradient_checkpointing|has_standard_names
    |is_matryoshka|matryoshka_dimensions|is_original_qwen3_reranker
    # Follow from other settings, or tell of layers that the smallest models lack.
    |attention_hidden_size|attention_layers|attn_layer_\w+|block_size|embedding_fraction|expand|expansion_ratio
    |first_k_dense_replace|full_attn_idxs|global_attn_every_n_layers|head_dim|hybrid_layer_ids|intermediate_size
    |kv_channels|layer_group_size|layer_types|learned_pos_emb|linear_conv_kernel_dim|linear_num_heads|mamba_expand
    |mamba_headdim|mamba_proj_bias|max_window_layers|moe_norm_min|moe_shared_expert_overlap|n_ctx|n_shared_experts|no_bias
    |no_rope_layer_interval|norm_type|num_key_value_heads|num_query_groups|qk_head_dim|rope_\w+|sliding_window(_pattern)?
    |use_mem_eff_path|sinusoidal_pos_embds|num_ln_in_parallel_attn|classifier_\w+|decoder_bias|sparse_prediction
    |sparse_pred_ignore_index""",
    re.VERBOSE,
)
# Settings where null has a meaning: the model has no such part, or the value follows from other settings.
_NULLABLE = {
    "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping", "global_head_dim", "head_dim",
    "hidden_size_per_layer_input", "intermediate_size", "logits_soft_cap", "mamba_d_ssm", "mlp_only_layers",
    "moe_intermediate_size", "n_shared_experts", "num_key_value_heads", "num_nextn_predict_layers", "q_lora_rank",
    "rms_norm_eps", "rotary_dim", "shared_expert_intermediate_size", "sliding_window", "swiglu_limit",
}  # fmt: skip
# Settings of several families. They count only in families whose own defaults contain them.
_OF_SOME = (
    "attention_bias", "attention_multiplier", "embedding_multiplier", "final_logit_softcapping", "logits_scaling",
    "mlp_bias", "residual_multiplier",
)  # fmt: skip
# Settings without defaults. These are sizes or counts of at least 1; the second group may be 0, null or a list.
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_SIZES = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok")
_MAX_LAYERS, _MAX_EXPERTS, _MAX_LABELS, _MAX_COUNT = 1 << 13, 1 << 13, 1 << 20, (1 << 31) - 1
# Settings with whole default values that may be any number, and settings that may be texts.
_NOT_WHOLE = re.compile(r"\w+_factor|\w*scal\w+|mamba_expand")
_ANY = ("sliding_window_pattern",)
_LISTS, _OBJECTS = ("layer_types", "mlp_layer_types"), ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_ATTENTION_TYPES = ("full_attention", "sliding_attention")
_ACTIVATIONS = {
    "swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu", "relu_squared": "relu2",
}  # fmt: skip


def rms(**changes: Any) -> Setting:
    return lambda c, _: NormDescription(**{"eps": c["norm_eps"]} | changes)


def layer_norm(**changes: Any) -> Setting:
    return lambda c, _: NormDescription(**{"eps": c["norm_eps"], "kind": "layer", "bias": True} | changes)


def routing(**changes: Any) -> Setting:
    """Return a setting for a router with the usual settings and `changes`, which are values or settings."""
    usual = {"top_k": key("num_experts_per_tok"), "normalize": lambda c, _: bool(c["norm_topk_prob"])}
    return lambda c, i: Routing(**valued(usual | changes, c, i))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How an architecture differs from Llama: fields of the descriptions, each with a value or a `Setting`.

    The reader also reads some settings that are not listed here: those of dense and sparse layers and of multi-token
    prediction layers, and those of `_OF_SOME`."""

    norm: Setting = field(default_factory=rms)  # all norms without an entry of their own
    attention: Mapping[str, Any] = field(default_factory=dict)
    # "attention"; the description of another mixer; or None for a layer without a mixer.
    mixer: Setting = lambda _, __: "attention"
    rope: Mapping[str, Any] | None = field(default_factory=dict)  # None: no rotary positions
    rope_kinds: tuple[str, ...] = ()  # kinds of rope scaling of its own, beside `ROPE_KINDS`
    feed_forward: Mapping[str, Any] = field(default_factory=dict)
    has_feed_forward: Setting = lambda _, __: True  # whether the layer has a feed-forward
    layer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    # Fields of `ExpertsDescription` for sparse layers; the default of "routing" is `routing()`. None: no layer has
    # experts.
    experts: Mapping[str, Any] | None = None
    # Whether the layer is sparse, if config.json has no `mlp_layer_types`. Default: all layers but the first ones.
    is_sparse: Setting = lambda c, i: i >= (c.get("first_k_dense_replace") or 0)
    rotates: Setting = lambda _, __: True  # whether the layer rotates queries and keys
    # The layer's type, if config.json has no `layer_types`. Layers of "sliding_attention" have the window. None: the
    # architecture has no types of layers.
    layer_type: Setting | None = None
    window_switch: str | None = None  # a setting that must be true for any layer to have the window
    refuses: tuple[str, ...] = ()  # settings that are not built
    longest: tuple[str, ...] = ()  # further settings that limit the length of contexts
    num_layers: Setting = lambda c, _: c["num_hidden_layers"]  # number of descriptions; a layer may have several
    pooling: Setting | None = None  # pooling of a model that pools; None: it generates


class _Noted(dict[str, Any]):
    """A configuration that notes which of its settings are read."""

    def __init__(self, settings: Config) -> None:
        super().__init__(settings)
        self.read: set[str] = set()
        self.last = ""  # the setting that was read last

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        self.last = name
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        self.last = name
        return super().get(name, default)


def _kinds() -> dict[str, type]:
    """Return the type of each setting that is a number, `int` or `float`, as its default and `_NEEDED` have it."""
    found: dict[str, type] = {}
    for setting, value in [item for own in (_DEFAULTS, *_OWN_DEFAULTS.values()) for item in own.items()]:
        if type(value) is int and found.get(setting) is not float and not _NOT_WHOLE.fullmatch(setting):
            found[setting] = int
        elif type(value) in (int, float):
            found[setting] = float
    found |= dict.fromkeys((*_NEEDED, *_SIZES), int)
    return {setting: kind for setting, kind in found.items() if setting not in _ANY}


_KINDS = _kinds()


def read(name: str, family: Family, given: Config) -> ModelDescription:
    """Return the description of the model of configuration `given`. Raises `LoadError` for a setting that is not built
    or has a wrong value, `KeyError` for a setting that is absent and has no default."""
    config = _merged(name, given)
    try:
        return _read(name, family, config)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as e:  # values that `_check_values` does not check
        noted = _Noted(_merged(name, given))
        with suppress(Exception):
            _read(name, family, noted)
        raise LoadError(
            f"{noted.last} = {str(noted.get(noted.last))[:60]} of the model's configuration, or a setting read before "
            f"it, has a wrong value ({type(e).__name__}: {e})."
        ) from None


def unread(name: str, family: Family, given: Config) -> list[str]:
    """Return the keys of config.json that have no effect though a user may expect one: keys that no reader reads, and
    keys that the architecture's class does not have. Raises as `read`."""
    config = _Noted(_merged(name, given))
    _read(name, family, config)
    own = _own_settings(name, given)
    defaults = _OWN_DEFAULTS.get(_HEADS.sub("", name), {})  # some belong to layers that this model may lack
    counts = config.read | {*family.refuses, *defaults, *_DEFAULTS}
    return sorted(
        key
        for key in given
        if key not in own or not (counts & {key, _STANDARD.get(key, key)} or _CHANGES_NOTHING.fullmatch(key))
    )


def _read(name: str, family: Family, config: dict[str, Any]) -> ModelDescription:
    for setting in family.refuses:
        if config.get(setting):
            raise LoadError(f"{setting} = {config[setting]!r} is not built yet.")
    numbers = range(family.num_layers(config, 0))
    if family.layer_type is not None and config["layer_types"] is None:
        config["layer_types"] = [family.layer_type(config, i) for i in numbers]
    if family.experts is not None and config["mlp_layer_types"] is None:
        config["mlp_layer_types"] = ["sparse" if family.is_sparse(config, i) else "dense" for i in numbers]
    for setting, counts in (("layer_types", family.layer_type), ("mlp_layer_types", family.experts)):
        if counts is not None and len(config[setting]) < config["num_hidden_layers"]:
            num_layers = config["num_hidden_layers"]
            raise LoadError(f"{setting} has {len(config[setting])} entries for {num_layers} layers.")
    layers = tuple(_layer(family, config, i) for i in numbers)
    described = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "max_position_embeddings": min(
            config[name] for name in ("max_position_embeddings", *family.longest) if config[name]
        ),
        "tie_word_embeddings": bool(config["tie_word_embeddings"]),
        "norm": family.norm(config, 0),
        "embedding_multiplier": config.get("embedding_multiplier", 1.0),
        "logits_divisor": config.get("logits_scaling", 1.0),
        "logits_softcap": config.get("final_logit_softcapping") or 0.0,
        "num_unused_layers": config.get("num_nextn_predict_layers") or 0,
        "pooling": family.pooling(config, 0) if family.pooling is not None else None,
    }
    return ModelDescription(architecture=name, layers=layers, **described | valued(family.model, config, 0))


def overlaid(defaults: Config, given: Config) -> dict[str, Any]:
    """Return `defaults` overridden by the `given` settings; nulls override only settings where null has a meaning."""
    config = dict(defaults)
    for setting, value in given.items():
        if value is not None or setting in _NULLABLE:
            config[setting] = value
        elif isinstance(config.get(setting), bool):  # transformers takes null for False
            config[setting] = False
    return config


def _own_settings(name: str, given: Config) -> Config:
    """Return `given` without settings that the architecture's configuration class does not have. Files of other formats
    (`has_standard_names`) keep all settings."""
    if given.get("has_standard_names"):
        return given
    class_name = _HEADS.sub("", name)
    return {setting: value for setting, value in given.items() if class_name not in _ABSENT.get(setting, ())}


def _merged(name: str, given: Config) -> dict[str, Any]:
    given = _own_settings(name, given)
    renamed = {
        standard: given[own]
        for standard, names in _ALIASES.items()
        for own in reversed(names)
        if own in given and given.get(standard) is None
    }
    own = _OWN_DEFAULTS.get(_HEADS.sub("", name), {})
    config = overlaid({**_DEFAULTS, **own}, {**given, **renamed})
    for setting in _OF_SOME:
        if setting not in own:
            config.pop(setting, None)
    _check_values(config, {*_DEFAULTS, *own, *_NEEDED, *_SIZES, *_OBJECTS})
    if config["layer_types"] is not None:
        config["layer_types"] = ["full_attention" if kind == "attention" else kind for kind in config["layer_types"]]
        config.setdefault("num_hidden_layers", len(config["layer_types"]))
    return config


def _check_values(config: dict[str, Any], settings: Collection[str]) -> None:
    """Check the types and ranges of `settings`, and make whole numbers that are written as 64.0 integers, in place.
    Raises `LoadError`."""
    for setting in settings:
        kind, value = _KINDS.get(setting), config.get(setting)
        if kind is int and isinstance(value, float) and value.is_integer():
            config[setting] = value = int(value)
        if kind is int and not isinstance(value, list | str | None) and type(value) is not int:
            raise LoadError(f"{setting} = {str(value)[:60]} is not a whole number.")
        if kind is float and (
            isinstance(value, bool | str | dict) or (type(value) is float and not math.isfinite(value))
        ):
            raise LoadError(f"{setting} = {str(value)[:60]} is not a number.")
        if kind is int and isinstance(value, str) and value != "auto":
            raise LoadError(f"{setting} = {value[:60]!r} is not a whole number.")
        least = 1 if setting in _NEEDED else 0 if setting in _SIZES else -1
        most = {"num_hidden_layers": _MAX_LAYERS, "num_experts": _MAX_EXPERTS}.get(setting, _MAX_COUNT)
        if kind is int and type(value) is int and not least <= value <= most:
            raise LoadError(f"{setting} = {value} is not a number from {least} to {most}.")
        if setting in _LISTS and not (value is None or _is_list_of_texts(value)):
            raise LoadError(f"{setting} = {str(value)[:60]} is not a list of names.")
        if setting in _OBJECTS and not isinstance(value, dict | None):
            raise LoadError(f"{setting} = {str(value)[:60]} is not an object.")


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def valued(settings: Mapping[str, Any], config: Config, layer: int) -> dict[str, Any]:
    """Return the settings' values for this layer: a `Setting` is called, other values are kept."""
    return {name: value(config, layer) if callable(value) else value for name, value in settings.items()}


def _layer(family: Family, config: Config, i: int) -> LayerDescription:
    mixer = family.mixer(config, i)
    return LayerDescription(
        attention=_attention(family, config, i) if mixer == "attention" else mixer,
        feed_forward=_feed_forward(family, config, i) if family.has_feed_forward(config, i) else None,
        norm=family.norm(config, i),
        **{"residual_multiplier": config.get("residual_multiplier", 1.0), **valued(family.layer, config, i)},
    )


def _attention(family: Family, config: Config, i: int) -> AttentionDescription:
    num_heads = config["num_attention_heads"]
    size = head_size(config)
    layer_type = _layer_type(family, config, i)
    turns = family.rope is not None and family.rotates(config, i)
    attention = {
        "num_heads": num_heads,
        "num_kv_heads": config["num_key_value_heads"] or num_heads,
        "head_size": size,
        "scale": config.get("attention_multiplier") or size**-0.5,
        "rope": rope_of(config, i, size, family.rope or {}, layer_type, family.rope_kinds) if turns else None,
        "window": (config["sliding_window"] or 0) if layer_type == "sliding_attention" else 0,
        "attention_temperature": attention_temperature(config),
        "qkv_bias": config.get("attention_bias", False),
        "output_bias": config.get("attention_bias", False),
    } | valued(family.attention, config, i)
    num_heads, num_kv_heads = attention["num_heads"], attention["num_kv_heads"]
    if num_heads % num_kv_heads:
        raise LoadError(f"{num_heads} query heads do not divide into {num_kv_heads} key/value heads.")
    return AttentionDescription(**attention)


def _feed_forward(family: Family, config: Config, i: int) -> FeedForwardDescription | ExpertsDescription:
    activation = activation_of(config["hidden_act"])
    if family.experts is not None and config["mlp_layer_types"][i] == "sparse":
        size = config["moe_intermediate_size"] or config["intermediate_size"]
        experts = {"num_experts": config["num_experts"], "intermediate_size": size, "activation": activation}
        return ExpertsDescription(**experts | valued({"routing": routing(), **family.experts}, config, i))
    size = config["intermediate_size"] or 4 * config["hidden_size"]
    settings = {"intermediate_size": size, "activation": activation, "bias": config.get("mlp_bias", False)}
    return FeedForwardDescription(**settings | valued(family.feed_forward, config, i))


def num_labels(config: Config) -> int:
    """Return the number of a classifier's labels. transformers writes labels only if there are not two."""
    count = len(config.get("id2label") or ()) or config.get("num_labels") or 2
    if type(count) is not int or not 0 < count <= _MAX_LABELS:
        raise LoadError(f"num_labels = {str(count)[:60]} is not a number from 1 to {_MAX_LABELS}.")
    return count


def head_size(config: Config) -> int:
    return int(config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])


def activation_of(name: str) -> str:
    """Return the kernels' name of the activation that config.json calls `name`."""
    return _ACTIVATIONS.get(name, name)


def _layer_type(family: Family, config: Config, i: int) -> str:
    if family.layer_type is None or (family.window_switch and not config[family.window_switch]):
        return "full_attention"
    layer_type = config["layer_types"][i]
    if layer_type not in _ATTENTION_TYPES:
        raise LoadError(f"layer type {layer_type!r} is not built yet; full_attention and sliding_attention are.")
    return str(layer_type)


def key(setting: str) -> Setting:
    return lambda c, _: c[setting]


def per_layer(setting: str) -> Setting:
    """Return a setting for the layer's entry of a list. It raises `LoadError` for a list with too few entries."""

    def find(config: Config, i: int) -> Any:
        values, num_layers = config[setting], config["num_hidden_layers"]
        if len(values) < num_layers:
            raise LoadError(f"{setting} has {len(values)} entries for {num_layers} layers.")
        return values[i]

    return find


def rope_settings(config: Config) -> dict[str, Any]:
    """Return the settings of rotary positions.

    transformers 5 writes them as rope_parameters, by type of layer if types differ. Earlier versions wrote rope_theta
    and rope_scaling; if both exist, transformers prefers rope_scaling."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def attention_temperature(config: Config) -> AttentionTemperature | None:
    """Return the attention temperature of Llama 4, in the settings of later models; None without them."""
    rope = rope_settings(config)
    rate = rope.get("llama_4_scaling_beta")
    return AttentionTemperature(float(rate), int(rope["original_max_position_embeddings"])) if rate else None


def rope_of(
    config: Config, i: int, size: int, changes: Mapping[str, Any], layer_type: str = "full_attention",
    own_kinds: Sequence[str] = (),
) -> RopeConfig:  # fmt: skip
    """Return the rotation of heads of `size` elements in layer i, with a family's `changes` and `own_kinds`.

    Raises `LoadError` for a rope scaling that is not built."""
    scaling = rope_settings(config)
    theta = config["rope_theta"]
    if layer_type in scaling:
        scaling = scaling[layer_type] or {}
    elif layer_type == "sliding_attention" and config.get("rope_local_base_freq"):
        scaling, theta = {}, config["rope_local_base_freq"]
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # an older name of longrope
    by_layer = config.get("layer_rope_theta")  # Granite
    theta = float(by_layer[i] if by_layer else scaling.get("rope_theta") or theta)
    if kind not in (*ROPE_KINDS, *own_kinds):
        raise LoadError(f"rope scaling {kind!r} is not built yet; {', '.join(ROPE_KINDS)} are.")
    partial = scaling.get("partial_rotary_factor") or config["partial_rotary_factor"]
    rotary_dim = size if kind == "proportional" else int(size * partial)
    if config.get("rotary_dim") and not scaling.get("partial_rotary_factor"):
        rotary_dim = int(config["rotary_dim"])
    if kind == "dynamic" and scaling.get("alpha"):  # HunYuan: the base does not depend on the length
        kind, theta = "default", theta * float(scaling["alpha"]) ** (rotary_dim / (rotary_dim - 2))
    longest = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    original = int(longest if original is None or kind == "dynamic" else original)
    factor = float(scaling.get("factor") or (longest / original if kind in ("yarn", "longrope") else 1.0))
    if kind == "ntk":  # GTE: another base, and a linear factor for the rest (formula 6 of Su 2023, "RoPE upgrade")
        kind, theta, factor = "linear", theta * factor, factor ** (2 / rotary_dim)
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if len(scaling.get(name) or ()) != rotary_dim // 2:
            raise LoadError(f"{name} of longrope must have {rotary_dim // 2} numbers, one for each pair of elements.")
    settings = {
        "theta": theta,
        "rotary_dim": rotary_dim,
        "kind": kind,
        "factor": factor,
        "original_max_position": original,
        "truncate": bool(scaling.get("truncate", True)),
        "short_factors": tuple(scaling.get("short_factor") or ()),
        "long_factors": tuple(scaling.get("long_factor") or ()),
        "num_turning": 2 * int(partial * size // 2) if kind == "proportional" else 0,
        "attention_factor": _attention_factor(kind, factor, original, scaling),
    }
    settings |= {name: float(scaling[name]) for name in _ROPE_NUMBERS if scaling.get(name)}
    found = RopeConfig(**settings | valued(changes, config, i))
    if not (0 < found.theta < math.inf and 0 < found.factor < math.inf and found.original_max_position > 0):
        raise LoadError(
            f"rotary positions need a base, a factor and an original length above 0, got {found.theta}, {found.factor} "
            f"and {found.original_max_position}."
        )
    return found


def _attention_factor(kind: str, factor: float, original: int, scaling: Config) -> float:
    if kind in ("yarn", "longrope") and scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if kind not in ("yarn", "longrope") or factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return (0.1 * float(mscale) * math.log(factor) + 1.0) / (0.1 * float(all_dim) * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0
