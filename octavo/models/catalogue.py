"""The table of architectures that `octavo models` prints and docs/models.md shows. Each line is computed from the
description of an example model of the architecture, so that the table is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from octavo.layers.attention import AttentionDescription
from octavo.layers.experts import ExpertsDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.mamba import MambaDescription
from octavo.layers.mla import MLADescription
from octavo.layers.recurrent import (
    GatedDeltaDescription,
    GatedRecurrenceDescription,
    LightningDescription,
    ShortConvDescription,
)
from octavo.loading import gguf_config
from octavo.models.description import LayerDescription, ModelDescription
from octavo.models.families import FAMILIES
from octavo.models.multimodal_models import DECODERS, MEDIA_FAMILIES, decoders_of, read_media
from octavo.models.readers import read
from octavo.models.whisper import WHISPER, read_whisper

# Sizes that fit every architecture: all numbers of key/value heads divide 160, all layer patterns divide 24 layers.
EXAMPLE_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 2560, "intermediate_size": 160, "num_hidden_layers": 24,
    "num_attention_heads": 160, "num_experts": 16, "num_experts_per_tok": 2, "has_standard_names": True,
}  # fmt: skip
# Further settings of architectures whose configurations must have them, such as lists of layer types.
_EXAMPLE_LAYERS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [9, 18]},
    "Gemma4ForCausalLM": {"attention_k_eq_v": True, "num_kv_shared_layers": 6, "enable_moe_block": True},
    "HF_ColBERT": {"dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 12},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 12},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 12},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*-" * 6},
}


# Suffixes of an encoder's classes that are listed in the line of its bare model.
_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


_Part = TypeVar("_Part")


class Entry(NamedTuple):
    architecture: str
    runs: str
    formats: str
    notes: str


HEADER = Entry("architecture", "runs", "formats", "what it has beyond Llama")


def entries() -> list[Entry]:
    found = []
    for name, family in sorted(FAMILIES.items()):
        if family.pooling is not None and name.endswith(_HEADS):
            continue
        description = read(name, family, EXAMPLE_SIZES | _EXAMPLE_LAYERS.get(name, {}))
        formats = "safetensors, bin" + (", GGUF" if name in gguf_config.architectures() else "")
        notes = [*_notes(description), *(f"refused: {setting}" for setting in family.refuses)]
        notes += [f"contexts up to {setting}" for setting in family.longest]
        if others := [head for head in _HEADS if name.removesuffix("Model") + head in FAMILIES]:
            notes.append(f"also {', '.join(others)}")
        found.append(Entry(name, "native", formats, "; ".join(notes)))
    heads_of_128 = {"hidden_size": 4096, "num_attention_heads": 32}  # default values of mrope_section need this size
    example = {"text_config": EXAMPLE_SIZES | heads_of_128, "image_token_index": 0, "audio_token_index": 0}
    for name, media in MEDIA_FAMILIES.items():
        decoders = decoders_of(name)
        description = read_media(name, example)
        takes = {"image": "sees pictures", "audio": "hears sounds"}[media.kind]
        notes = [*_notes(description), takes + (" and videos" if media.sees_videos else "")]
        if media.sections is not None:
            notes.append("tokens have three positions")
        if description.num_media_layers:
            notes.append("further rows of pictures after early layers")
        if description.sees_ahead:
            notes.append(f"tokens of a {description.sees_ahead} attend both ways")
        if description.num_cross_tokens:
            notes.append("layers of cross attention see pictures")
        if media.sees_ahead_in_windows:
            notes.append("in layers with a window those of a picture attend both ways, if the configuration says so")
        notes += [f"contexts up to {setting}" for setting in FAMILIES[DECODERS[media.decoder]].longest]
        if len(decoders) > 1:
            notes.append(f"its decoder is one of {', '.join(decoders)}")
        found.append(Entry(name, "native, tower by transformers", "safetensors, bin", "; ".join(notes)))
    hears = "writes down speech; attention to the encoder's output"
    found.append(
        Entry(
            WHISPER, "native, encoder by transformers", "safetensors, bin",
            "; ".join([*_notes(read_whisper({})), hears]),
        )
    )  # fmt: skip
    return sorted(found)


def _notes(model: ModelDescription) -> Iterator[str]:
    attention, norm = model.layers[-1].attention, model.layers[-1].norm
    if norm.kind == "layer" or norm.offset or not norm.has_weight:
        kind = {"layer": "LayerNorm", "rms": "RMS norm"}[norm.kind]
        yield kind + (" (1 + w)" if norm.offset else "") + ("" if norm.has_weight else " without weights")
    for has, note in _LAYER_NOTES.items():
        if found := [has(layer) for layer in model.layers if has(layer)]:
            yield note + ("" if len(found) == len(model.layers) else " in some layers")
    if isinstance(attention, AttentionDescription) and attention.qk_norm is not None:
        scope = {"head": "of each head", "heads": "of each head, with its own weights", "all": "over all heads"}
        after = ", after the rotation" if attention.norms_after_rotation else ""
        yield f"norm of query and key {scope[attention.qk_norm_scope]}{after}"
    if model.positions is not None:
        yield "learned positions" if model.positions.name else "sinusoidal positions"
    if model.token_types:
        yield "token types"
    if model.token_inputs is not None:
        yield "an embedding for each layer"
    if model.altup is not None:
        yield f"{model.altup.count} residual streams"
    if model.embedding_norm is not None:
        yield "norm of the embedding"
    if model.logits_softcap:
        yield "soft cap of logits"


def _has(kind: type[_Part], what: Callable[[_Part], Any] = lambda _: True) -> Callable[[LayerDescription], bool]:
    """Return a test of whether a layer has a part of this kind for which `what` is true."""
    return lambda layer: any(
        isinstance(part, kind) and bool(what(part))
        for part in (layer.attention, layer.parallel_mixer, layer.feed_forward)
    )


_LAYER_NOTES: dict[Callable[[LayerDescription], Any], str] = {
    _has(AttentionDescription, lambda a: a.bidirectional): "attention both ways",
    _has(AttentionDescription, lambda a: a.distance_biases): "biases by distance",
    _has(MambaDescription, lambda m: m.time_rank): "Mamba 1",
    _has(MambaDescription, lambda m: not m.time_rank): "Mamba 2",
    _has(MLADescription): "latent attention",
    _has(MLADescription, lambda a: a.index): "an index chooses its keys",
    lambda layer: layer.parallel_mixer: "beside attention",
    lambda layer: layer.reused: "a transformer that layers share",
    lambda layer: layer.reused and layer.reused.adapter_rank: "with adapters",
    _has(ShortConvDescription): "short convolution",
    _has(GatedDeltaDescription): "gated delta rule",
    _has(GatedDeltaDescription, lambda d: d.decays_by_element): "decays by element of the key",
    _has(LightningDescription): "lightning attention",
    _has(GatedRecurrenceDescription): "gated recurrence",
    lambda layer: layer.is_parallel: "parallel block",
    lambda layer: layer.attention_post_norm and layer.attention_norm: "norms before and after",
    lambda layer: layer.attention_post_norm and not layer.attention_norm and not layer.norms_stream: "norms after",
    lambda layer: layer.norms_stream: "norms of the sum",
    _has(FeedForwardDescription, lambda f: not f.gated): "ungated feed-forward",
    _has(FeedForwardDescription, lambda f: f.sparsity): "sparse gates",
    _has(ExpertsDescription, lambda e: e.routing.scoring == "softmax"): "experts by softmax",
    _has(ExpertsDescription, lambda e: e.routing.scoring == "sigmoid"): "experts by sigmoid",
    _has(ExpertsDescription, lambda e: e.routing.scoring == "sparsemixer"): "experts by sparsemixer",
    _has(ExpertsDescription, lambda e: e.correction_names): "with a correction bias",
    _has(ExpertsDescription, lambda e: e.scales_inputs): "whose inputs are weighted",
    _has(ExpertsDescription, lambda e: e.shared and not e.shared_gate_name): "shared expert",
    _has(ExpertsDescription, lambda e: e.shared_gate_name): "shared expert behind a sigmoid",
    _has(ExpertsDescription, lambda e: e.part_norms): "each with its norms",
    _has(ExpertsDescription, lambda e: e.clamp): "clamped SwiGLU",
    _has(ExpertsDescription, lambda e: e.num_identities): "experts that return what they see",
    lambda layer: layer.deferred_by: "experts beside the next attention",
    _has(AttentionDescription, lambda a: a.output_norm): "norms before the last matrices",
    _has(AttentionDescription, lambda a: a.gate): "gated attention",
    _has(AttentionDescription, lambda a: a.value_size != a.head_size): "values of another size than keys",
    _has(AttentionDescription, lambda a: a.window): "window",
    _has(AttentionDescription, lambda a: a.rope is None): "no rotation",
    _has(AttentionDescription, lambda a: a.rope and a.rope.interleaved): "interleaved rotation",
    _has(AttentionDescription, lambda a: a.rope and a.rope.rotary_dim < a.head_size): "partial rotation",
    _has(AttentionDescription, lambda a: a.reads_layer is not None): "keys and values of earlier layers",
    _has(AttentionDescription, lambda a: a.keys_are_values): "keys that are values too",
    _has(AttentionDescription, lambda a: a.alibi_max): "ALiBi",
    _has(AttentionDescription, lambda a: a.softcap): "soft cap of scores",
    _has(AttentionDescription, lambda a: a.sinks): "sinks",
    _has(AttentionDescription, lambda a: a.attention_temperature): "queries that grow with the position",
}


def as_text() -> str:
    """Return the table as text in aligned columns."""
    rows = [HEADER, *entries()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row.notes]).rstrip() for row in rows]
    return "\n".join(lines)


def as_markdown() -> str:
    rows = ["| " + " | ".join(row) + " |" for row in (HEADER, Entry("---", "---", "---", "---"), *entries())]
    return "\n".join(rows)
