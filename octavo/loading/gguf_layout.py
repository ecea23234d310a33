"""How a GGUF file's tensors differ from a checkpoint's: the description of an architecture that `gguf_tensors` needs,
and the names that most architectures share. `gguf_architectures` has the table of architectures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.loading.gguf_values import Metadata

RANK = 4  # llama.cpp's pooling_type of rerankers
# Takes config.json and the number of rows in the file; returns the file's rows in the order of `transformers`.
RowOrder = Callable[[Mapping[str, Any], int], list[int]]
Setting = Callable[[Metadata], Any]
Names = Mapping[str, str | tuple[str, ...]]


def shared(name: str) -> dict[str, str]:
    """Return the names in checkpoints, by those in files, of the shared expert (which sees every token) that
    checkpoints call `name`."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


# Names of a layer's modules, and below of the model's other modules, in most checkpoints, by their names in files.
_NAMES: Names = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b": "mlp.gate.e_score_correction", **shared("mlp.shared_experts"),
}  # fmt: skip
_TOP_NAMES: Names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A GGUF architecture: its class in `transformers`, its settings, and the names and order of its tensors.

    `names` has only the modules with other names than `_NAMES`: a file has them after "blk.N.", a checkpoint after the
    layer's prefix and number. A tuple of names stands for a stack of matrices with the same number of rows. A tuple of
    one name with "{}" stands for a stack with one tensor for each entry of the first dimension.
    """

    class_name: str
    variants: Mapping[str, Callable[[Metadata], bool]] = field(default_factory=dict)  # class -> test of a file
    settings: Mapping[str, Any] = field(default_factory=dict)  # values or `Setting`s; None is omitted
    names: Names | Callable[[Metadata], Names] = field(default_factory=dict)
    tensor_names: Mapping[str, str] = field(default_factory=dict)  # full names of tensors whose endings differ
    top_names: Names | Callable[[Metadata], Names] = field(default_factory=dict)
    layer_prefix: str = "model.layers."
    rows: Mapping[str, RowOrder] = field(default_factory=dict)  # by the module's name in the file
    norm_offset: float = 0.0  # files have this added to the weights of norms
    # True if the weights of a token's experts are normalized in files that do not say; None: there are no experts.
    experts: bool | None = None
    is_without_heads: bool = False  # no layer has attention
    transposed_modules: tuple[str, ...] = ()  # modules whose matrices `transformers` stores transposed

    def all_names(self, metadata: Metadata) -> Names:
        return {**_NAMES, **(self.names(metadata) if callable(self.names) else self.names)}

    def all_top_names(self, metadata: Metadata) -> Names:
        return {**_TOP_NAMES, **(self.top_names(metadata) if callable(self.top_names) else self.top_names)}


def _pairs(heads: str) -> RowOrder:
    """Return the order that turns alternating rows of a head's two halves, as ggml's rotary kernel takes them, into one
    half after the other. `heads` is the setting with the number of heads."""

    def order(config: Mapping[str, Any], n: int) -> list[int]:
        size = n // config[heads]
        return [row for head in range(0, n, size) for half in (0, 1) for row in range(head + half, head + size, 2)]

    return order


def _neighbours(heads: str) -> RowOrder:
    """Return the order that turns the two halves of a head's rotated part into alternating rows.

    It is for files with three positions a token: their rotary kernel takes halves, and converters reorder the rows for
    it. `heads` is the setting with the number of heads.
    """

    def order(config: Mapping[str, Any], n: int) -> list[int]:
        if not config["has_rotary_halves"]:
            return list(range(n))
        size = n // config[heads]
        half = int(size * config["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2
        turned = [row for i in range(half) for row in (i, half + i)] + list(range(2 * half, size))
        return [head + row for head in range(0, n, size) for row in turned]

    return order


def per_head(config: Mapping[str, Any], n: int) -> list[int]:
    """Return the order that turns all queries, all keys, all values into the queries, keys and values of one head after
    the other."""
    size = n // (3 * config["num_attention_heads"])
    return [part + row for head in range(0, n // 3, size) for part in range(0, n, n // 3) for row in _run(head, size)]


def per_group(config: Mapping[str, Any], n: int) -> list[int]:
    """Return the order that turns all queries, all keys, all values into the queries, keys and values of one key/value
    head after the other."""
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


PERMUTED = {"attn_q": _pairs("num_attention_heads"), "attn_k": _pairs("num_key_value_heads")}
NEIGHBOURS = {"attn_q": _neighbours("num_attention_heads"), "attn_k": _neighbours("num_key_value_heads")}
