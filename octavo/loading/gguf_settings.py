"""Settings of config.json, each read from a GGUF file's metadata or tensors: `gguf_architectures` combines them. If a
file lacks a value, the default is llama.cpp's.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from octavo.errors import LoadError
from octavo.loading.gguf_layout import Setting
from octavo.loading.gguf_values import Metadata

QKVO = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")


def number(key: str, default: int | None = None) -> Setting:
    return lambda m: m.number(key, default)


def real(key: str, default: float | None = None) -> Setting:
    return lambda m: m.real(key, default)


def biases(*modules: str) -> Setting:
    return lambda m: m.has_biases(modules)


def has(tensor: str) -> Setting:
    """Return a setting that is True if any layer has the tensor."""
    return lambda m: m.has(tensor)


def rows_of(tensor: str) -> Setting:
    return lambda m: m.tensors[tensor].shape[0] if tensor in m.tensors else None


def each(m: Metadata, key: str) -> list[Any]:
    """Return a number or None for each layer; a file may hold a list, or one value for all layers. Raises `LoadError`
    for other values, and for a list with fewer entries than there are layers."""
    value, count = m.get(key), m.number("block_count")
    values = value[:count] if isinstance(value, list) else [value] * count
    if len(values) < count or not all(v is None or isinstance(v, int | float) for v in values):
        raise LoadError(f"{m.file.path}: {m.architecture}.{key} is not a number for each of {count} layers.")
    return values


def _layer_types(period: int) -> Setting:
    """Return the setting `layer_types`: every n-th layer has no sliding window, and all others have one. n is from the
    file or `period`, unless the file lists the layers with a window."""

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


WINDOW: dict[str, Setting] = {"sliding_window": lambda m: m.number("attention.sliding_window", 0) or None}


def window(period: int) -> dict[str, Setting]:
    return WINDOW | {"layer_types": _layer_types(period)}


def of_layers(key: str, slides: bool) -> Setting:
    """Return a setting with the value of `key` in the layers with a sliding window (`slides`), or in the others. These
    layers must all have the same value."""

    def find(m: Metadata) -> int | None:
        pattern = each(m, "attention.sliding_window_pattern")
        found = {n for n, has_window in zip(each(m, key), pattern, strict=True) if bool(has_window) == slides}
        if len(found) > 1:
            raise LoadError(f"{m.file.path}: {key} of {sorted(found, key=str)} in layers of one kind is not built.")
        return found.pop() if found else None

    return find


def layers_by(kinds: Mapping[str, str], otherwise: str) -> Setting:
    """Return a setting with the type of each layer: the type of the first tensor of `kinds` that the layer has."""
    return lambda m: [
        next((kind for tensor, kind in kinds.items() if m.has(tensor, i)), otherwise)
        for i in range(m.number("block_count"))
    ]


def _period(tensor: str) -> Setting:
    """Return a setting with the distance between layers that have this tensor, and the number of the first one."""

    def find(m: Metadata) -> tuple[int, int]:
        count = m.number("block_count")
        having = [i for i in range(count) if m.has(tensor, i)] or [count]
        period = having[1] - having[0] if len(having) > 1 else count + 1
        if having != list(range(having[0], max(count, having[0] + 1), period)):
            raise LoadError(
                f"{m.file.path}: {tensor} in the layers {having} of {count} is not built: they have no period."
            )
        return period, having[0]

    return find


def periods(tensor: str, name: str) -> dict[str, Setting]:
    find = _period(tensor)
    return {f"{name}_layer_period": lambda m: find(m)[0], f"{name}_layer_offset": lambda m: find(m)[1]}


def _experts() -> dict[str, Setting]:
    settings: dict[str, Setting] = {
        "num_experts": number("expert_count"),
        "num_experts_per_tok": lambda m: m.number("expert_used_count"),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
        "n_shared_experts": number("expert_shared_count", 0),
        "routed_scaling_factor": lambda m: m.real("expert_weights_scale", 1.0) or 1.0,
        "n_group": number("expert_group_count", 1),
        "topk_group": number("expert_group_used_count", 1),
        "first_k_dense_replace": number("leading_dense_block_count", 0),
        # A layer without a router is dense.
        "mlp_only_layers": lambda m: [
            i for i in range(m.number("block_count")) if f"blk.{i}.ffn_gate_inp.weight" not in m.tensors
        ],
    }

    def of_experts(setting: Setting) -> Setting:
        return lambda m: setting(m) if m.number("expert_count", 0) else None

    return {name: of_experts(setting) for name, setting in settings.items()}


# Settings of all files with experts; None in files without experts.
EXPERTS = _experts()


def by_layer_type(m: Metadata, local_theta: float = 10000.0) -> dict[str, Any]:
    """Return rope_parameters by layer type. The file's own rotary settings are for layers without a window."""
    local = {"rope_type": "default", "rope_theta": m.real("rope.freq_base_swa", local_theta)}
    return {"full_attention": m.rope(), "sliding_attention": local}


def growing_rope(m: Metadata) -> dict[str, Any]:
    """Return rope_parameters with queries that grow with their positions beyond the original context."""
    rope, growth = m.rope(), _growth(m)
    sharper = m.real("rope.scaling.yarn_log_multiplier", 0.0) if growth else 0.0
    return rope | growth | ({"mscale": 1.0, "mscale_all_dim": sharper} if sharper else {})


def _growth(m: Metadata) -> dict[str, Any]:
    """Return how fast queries grow with their positions, and from which position on; {} if they do not grow. Raises
    `LoadError` if the growth does not start at the end of the original context."""
    rate = m.real("attention.temperature_scale", 0.0)
    if not rate:
        return {}
    original = m.number("rope.scaling.original_context_length", m.number("context_length"))
    start = m.number("attention.temperature_length", original)
    if start != original:
        raise LoadError(
            f"{m.file.path}: attention.temperature_length {start} and the original context length {original} differ, "
            "which is not built."
        )
    return {"llama_4_scaling_beta": rate, "original_max_position_embeddings": original}


def _latent_rope(m: Metadata) -> dict[str, Any]:
    """Return the rope_parameters of latent attention. llama.cpp has one number for yarn's mscale and mscale_all_dim,
    which are equal in all known models."""
    rope = m.rope() | _growth(m) | {"partial_rotary_factor": 1.0}
    sharper = m.real("rope.scaling.yarn_log_multiplier", 0.0)
    return rope | ({"mscale": 10 * sharper, "mscale_all_dim": 10 * sharper} if sharper else {})


def _plain_size(m: Metadata) -> int:
    """Return the size of a query's part without rotation. Newer files have the key size in attention.key_length_mla,
    older ones in attention.key_length."""
    return m.number("attention.key_length_mla", m.head_dim) - m.number("rope.dimension_count")


MLA: dict[str, Setting] = {
    "head_dim": lambda m: m.number("rope.dimension_count"),
    "q_lora_rank": number("attention.q_lora_rank", 0),  # 0: queries have no low-rank projection
    "kv_lora_rank": lambda m: m.number("attention.kv_lora_rank"),
    "qk_rope_head_dim": lambda m: m.number("rope.dimension_count"),
    "qk_nope_head_dim": _plain_size,
    "rope_parameters": _latent_rope,
}


_STATE_SPACE: dict[str, Setting] = {
    "mamba_d_state": number("ssm.state_size"), "mamba_d_conv": number("ssm.conv_kernel"),
    "mamba_conv_bias": biases("ssm_conv1d"),
}  # fmt: skip
MAMBA_1 = _STATE_SPACE | {
    "mamba_dt_rank": number("ssm.time_step_rank"),
    "mamba_expand": lambda m: m.number("ssm.inner_size") / m.divisor("embedding_length"),
    **{name: biases("ssm_in", "ssm_out") for name in ("use_bias", "mamba_proj_bias")},
}  # fmt: skip
MAMBA_2 = _STATE_SPACE | {
    "mamba_n_heads": number("ssm.time_step_rank"), "mamba_n_groups": number("ssm.group_count"),
    "mamba_d_head": lambda m: m.number("ssm.inner_size") // m.divisor("ssm.time_step_rank"),
    **{name: biases("ssm_in") for name in ("use_bias", "mamba_proj_bias")},
}  # fmt: skip


def gemma_scalar(num_layers_of_27b: int) -> Setting:
    """Return Gemma's query scale as a setting: the size of a head, but hidden size / heads in the 27B model, which is
    known by its number of layers."""

    def find(m: Metadata) -> float:
        if m.number("block_count") == num_layers_of_27b:
            return m.number("embedding_length") / m.divisor("attention.head_count")
        return m.head_dim

    return find


def keys_are_values(m: Metadata) -> bool:
    """Return True if layers without a window have no value matrix: their keys are also their values."""
    full = [i for i, slides in enumerate(each(m, "attention.sliding_window_pattern")) if not slides]
    return any(m.has("attn_k.weight", i) and not m.has("attn_v.weight", i) for i in full)


def share_cut_off(m: Metadata) -> list[float]:
    """Return for each layer the share of gates that activation sparsity cuts off. Files hold the cut as a number of
    standard deviations."""
    scales = each(m, "activation_sparsity_scale")
    return [NormalDist().cdf(scale) if scale is not None and math.isfinite(scale) else 0.0 for scale in scales]


def xielu(m: Metadata) -> list[tuple[float, ...]]:
    """Return the four parameters of the xIELU activation for each layer, which checkpoints store as tensors."""
    parts = [m.file.metadata.get(f"xielu.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")]
    count = m.number("block_count")
    if not all(isinstance(part, list) and len(part) >= count and not isinstance(part[0], str) for part in parts):
        raise LoadError(f"{m.file.path} is damaged: xielu.alpha_p, alpha_n, beta and eps are not {count} numbers each.")
    return [tuple(float(x) for x in numbers) for numbers in zip(*(part or () for part in parts), strict=True)]
