"""The table of architectures that `octavo models` prints and docs/models.md shows, made from the tables of families."""

from typing import NamedTuple

from octavo.loading import gguf_config
from octavo.models.families import FAMILIES
from octavo.models.multimodal_models import DECODERS, MEDIA_FAMILIES, decoders_of
from octavo.models.whisper import WHISPER

# Suffixes of an encoder's classes that are listed in the line of its bare model.
_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


_COMMON = "a common decoder"  # stands in docs/models.md for the list that most models with a tower have


class Entry(NamedTuple):
    architecture: str
    runs: str
    formats: str
    notes: str


HEADER = Entry("architecture", "runs", "formats", "notes")


def entries() -> list[Entry]:
    found = [Entry(WHISPER, "native, encoder by transformers", "safetensors, bin", "writes down speech")]
    for name, family in FAMILIES.items():
        if family.pooling is not None and name.endswith(_HEADS):
            continue
        formats = "safetensors, bin" + (", GGUF" if name in gguf_config.architectures() else "")
        notes = [f"refused: {', '.join(family.refuses)}"] if family.refuses else []
        notes += [f"contexts up to {setting}" for setting in family.longest]
        if others := [head for head in _HEADS if name.removesuffix("Model") + head in FAMILIES]:
            notes.append(f"also {', '.join(others)}")
        found.append(Entry(name, "native", formats, "; ".join(notes)))
    for name, media in MEDIA_FAMILIES.items():
        takes = {"image": "sees pictures", "audio": "hears sounds"}[media.kind]
        notes = [takes + (" and videos" if media.sees_videos else "")]
        notes += [f"contexts up to {setting}" for setting in FAMILIES[DECODERS[media.decoder]].longest]
        if len(decoders := decoders_of(name)) > 1:
            notes.append(f"its decoder is one of {', '.join(decoders)}")
        found.append(Entry(name, "native, tower by transformers", "safetensors, bin", "; ".join(notes)))
    return sorted(found)


def as_text() -> str:
    """Return the table as text in aligned columns."""
    rows = [HEADER, *entries()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row.notes]).rstrip() for row in rows]
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the table without what all architectures have: they run natively, from safetensors and .bin files."""
    decoders = f"its decoder is one of {', '.join(decoders_of('LlavaForConditionalGeneration'))}"
    rows = [("architecture", "GGUF", "notes"), ("---", "---", "---")]
    rows += [
        (e.architecture, "yes" if "GGUF" in e.formats else "", e.notes.replace(decoders, _COMMON)) for e in entries()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", f"{_COMMON.capitalize()}: {decoders.removeprefix('its decoder is ')}."])
