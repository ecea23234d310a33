"""The encoders: attention is bidirectional, and hidden states are pooled. Each class of a family (the bare model, and
those with heads for sequences and for tokens) is an architecture.

Tensors have the checkpoints' names; in a checkpoint of a bare model names lack the first part.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.layers.pooler import PoolingDescription
from octavo.layers.positions import PositionsDescription
from octavo.layers.projection_head import ProjectionHeadDescription
from octavo.models.config_reader import Config, Family, Setting, activation_of, key, layer_norm, num_labels
from octavo.models.families.settings import MODERN_BERT, modern_bert_head, norms_of_sum, slides

_BOTH_WAYS = {"bidirectional": True}
_BIASES = {"qkv_bias": True, "output_bias": True}
_CLASSIFIER = "classifier"


def _pooled(kind: str, *heads: Setting) -> Setting:
    """Return a setting for pooling of this `kind` with these `heads`."""
    return lambda c, i: PoolingDescription(kind, tuple(head(c, i) for head in heads))


def _dense(name: str, activation: str | None = None) -> Setting:
    """Return a setting for a head of the model's hidden size."""
    return lambda c, _: ProjectionHeadDescription(name, c["hidden_size"], True, activation)


def _labels(name: str = _CLASSIFIER, bias: bool = True) -> Setting:
    return lambda c, _: ProjectionHeadDescription(name, num_labels(c), bias)


def _classes(
    base: str, family: Family, prefix: str, sequences: Setting, tokens: Setting | None = None
) -> dict[str, Family]:
    """Return the architectures of a family. `sequences` is the pooling of its sequence classifier, `tokens` of its
    token classifier."""
    unused = tuple(f"{at}{name}" for name in ("pooler.", "cls.", "lm_head.", "vocab_", "discriminator_", "generator_")
                   for at in ("", prefix))  # fmt: skip
    model = {**family.model, "unused": unused, "norm": family.model.get("norm"), "tie_word_embeddings": True}
    bare = replace(family, model=model, pooling=_pooled("CLS"))
    kinds = {
        "Model": bare,
        "ForMaskedLM": bare,
        "ForSequenceClassification": replace(bare, pooling=sequences),
        "ForTokenClassification": replace(bare, pooling=tokens or _pooled("ALL", _labels())),
    }
    return {base + name: one for name, one in kinds.items()}


def _bert(
    prefix: str, *, layers: str = "encoder.layer.", has_types: bool = True, counts_padding: bool = False,
    names: Mapping[str, str] = {}, **model: Any,
) -> Family:  # fmt: skip
    """Return the family of BERT (Devlin et al. 2019), or of a model that differs in `names`. With `counts_padding`
    positions begin after the padding token's (RoBERTa)."""

    def offset(config: Config) -> int:
        return config["pad_token_id"] + 1 if counts_padding else 0

    known = {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "output": "attention.output.dense", "norm": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "last norm": "output.LayerNorm",
    }  # fmt: skip
    known |= names
    types: dict[str, Any] = {}
    if has_types:
        name = f"{prefix}embeddings.token_type_embeddings.weight"
        types = {"num_token_types": key("type_vocab_size"), "token_types_name": name}
    positions = f"{prefix}embeddings.position_embeddings.weight"
    return Family(
        norm=layer_norm(), rope=None,
        attention=_BOTH_WAYS | _BIASES | {
            "qkv_names": (known["query"], known["key"], known["value"]), "output_name": known["output"],
        },
        feed_forward={"gated": False, "bias": True, "up_names": (known["up"],), "down_name": known["down"]},
        layer=norms_of_sum(known["norm"], known["last norm"]),
        model={
            "max_position_embeddings": lambda c, _: c["max_position_embeddings"] - offset(c),
            "positions": lambda c, _: PositionsDescription(positions, c["max_position_embeddings"], offset(c)),
            "embedding_name": f"{prefix}embeddings.word_embeddings", "embedding_norm": layer_norm(),
            "embedding_norm_name": f"{prefix}embeddings.LayerNorm", "layer_prefix": f"{prefix}{layers}",
        } | types | model,
        refuses=("is_decoder", "add_cross_attention"),
    )  # fmt: skip


_BERT = _bert("bert.")
_ROBERTA = _bert("roberta.", counts_padding=True)
_ROBERTA_HEAD = _pooled("CLS", _dense("classifier.dense", "tanh"), _labels("classifier.out_proj"))
_MPNET = _bert(
    "mpnet.", has_types=False, counts_padding=True,
    names={
        "query": "attention.attn.q", "key": "attention.attn.k", "value": "attention.attn.v",
        "output": "attention.attn.o", "norm": "attention.LayerNorm",
    },
)  # fmt: skip
_DISTILBERT = _bert(
    "distilbert.", layers="transformer.layer.", has_types=False,
    names={
        "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin", "output": "attention.out_lin",
        "norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "last norm": "output_layer_norm",
    },
)  # fmt: skip
_ELECTRA = _bert(
    "electra.", projects_after_norm=lambda c, _: _electra_size(c, 0) is not None,
    embedding_size=lambda c, i: _electra_size(c, i), embedding_projection_name="electra.embeddings_project",
)  # fmt: skip


def _electra_size(config: Config, _: int) -> int | None:
    size = config["embedding_size"]
    return None if size == config["hidden_size"] else int(size)


def _mpnet_biases(config: Config, _: int) -> tuple[str, int]:
    return "mpnet.encoder.relative_attention_bias.weight", config["relative_attention_num_buckets"]


_MODERN_HEAD = modern_bert_head("head")


def _modern_sequences(config: Config, i: int) -> PoolingDescription:
    heads = _MODERN_HEAD(config, i), _labels()(config, i)
    return PoolingDescription(str(config["classifier_pooling"]).upper(), heads)


_MODERNBERT = replace(
    MODERN_BERT,
    attention=_BOTH_WAYS | {
        "qkv_names": ("attn.Wqkv",), "output_name": "attn.Wo",
        "window": lambda c, i: c["local_attention"] // 2 + 1 if slides(c, i) else 0,
    },
    model={**MODERN_BERT.model, "norm": MODERN_BERT.norm},
)  # fmt: skip


_GATED = {"swiglu": "silu", "geglu": "gelu"}  # names of activations in Nomic's files
# Rotary positions, a gate, and BERT's norms (Nussbaum et al. 2024). Names are those of Nomic's own checkpoints.
_NOMIC = Family(
    norm=layer_norm(), attention=_BOTH_WAYS | {"qkv_names": ("attn.Wqkv",), "output_name": "attn.out_proj"},
    feed_forward={
        "activation": lambda c, _: _GATED.get(c["hidden_act"], activation_of(c["hidden_act"])),
        "up_names": ("mlp.fc12", "mlp.fc11"), "down_name": "mlp.fc2",
    },
    layer=norms_of_sum("norm1", "norm2"),
    model={
        "num_token_types": key("type_vocab_size"),
        "token_types_name": "nomic_bert.embeddings.token_type_embeddings.weight",
        "embedding_name": "nomic_bert.embeddings.word_embeddings", "embedding_norm": layer_norm(),
        "embedding_norm_name": "nomic_bert.emb_ln", "layer_prefix": "nomic_bert.encoder.layers.",
    },
    refuses=(
        "qkv_proj_bias", "prenorm", "moe_every_n_layers", "use_rms_norm", "rotary_scaling_factor",
        "rotary_emb_interleaved", "parallel_block",
    ),
)  # fmt: skip


def _gte(prefix: str) -> Family:
    """Return the family of GTE: rotary positions, a gate, BERT's norms, and biases (Zhang et al. 2024)."""
    return Family(
        norm=layer_norm(), rope_kinds=("ntk",),
        attention=_BOTH_WAYS | _BIASES | {"qkv_names": ("attention.qkv_proj",), "output_name": "attention.o_proj"},
        feed_forward={
            "up_names": ("mlp.up_gate_proj",), "down_name": "mlp.down_proj", "up_first": True, "down_bias": True,
        },
        layer=norms_of_sum("attn_ln", "mlp_ln"),
        model={
            "num_token_types": key("type_vocab_size"),
            "token_types_name": f"{prefix}embeddings.token_type_embeddings.weight",
            "embedding_name": f"{prefix}embeddings.word_embeddings", "embedding_norm": layer_norm(),
            "embedding_norm_name": f"{prefix}embeddings.LayerNorm", "layer_prefix": f"{prefix}encoder.layer.",
        },
        refuses=("logn_attention_scale", "logn_attention_clip1", "pack_qkv_off"),
    )  # fmt: skip


_BERT_HEAD = _pooled("CLS", _dense("bert.pooler.dense", "tanh"), _labels())
_NOMIC_HEAD = _pooled("CLS", _dense("nomic_bert.pooler.dense", "tanh"), _labels())


def _colbert(config: Config, _: int) -> PoolingDescription:
    return PoolingDescription("ALL", (ProjectionHeadDescription("linear", int(config["dim"])),))


FAMILIES: dict[str, Family] = {
    **_classes("Bert", _BERT, "bert.", _BERT_HEAD),
    **_classes("Roberta", _ROBERTA, "roberta.", _ROBERTA_HEAD),
    **_classes("XLMRoberta", _ROBERTA, "roberta.", _ROBERTA_HEAD),
    **_classes("Camembert", _ROBERTA, "roberta.", _ROBERTA_HEAD),
    **_classes("MPNet", replace(_MPNET, attention={**_MPNET.attention, "distance_biases": _mpnet_biases}),
               "mpnet.", _ROBERTA_HEAD),
    **_classes("DistilBert", _DISTILBERT, "distilbert.",
               _pooled("CLS", _dense("pre_classifier", "relu"), _labels())),
    **_classes("Electra", _ELECTRA, "electra.",
               _pooled("CLS", _dense("classifier.dense", "gelu"), _labels("classifier.out_proj"))),
    **_classes("ModernBert", _MODERNBERT, "model.", _modern_sequences, _pooled("ALL", _MODERN_HEAD, _labels())),
    **_classes("NomicBert", _NOMIC, "nomic_bert.", _NOMIC_HEAD),
    **_classes("Gte", _gte("gte."), "gte.", _pooled("CLS", _dense("gte.pooler.dense", "tanh"), _labels())),
    **_classes("New", _gte("new."), "new.", _pooled("CLS", _dense("new.pooler.dense", "tanh"), _labels())),
}  # fmt: skip
# Llama with bidirectional attention (Boizard et al. 2025).
FAMILIES["EuroBertModel"] = FAMILIES["EuroBertForMaskedLM"] = Family(
    attention=_BOTH_WAYS, pooling=_pooled("MEAN"),
    model={"unused": ("lm_head.",), "tie_word_embeddings": True},
)  # fmt: skip
FAMILIES["HF_ColBERT"] = replace(FAMILIES["BertModel"], pooling=_colbert)
