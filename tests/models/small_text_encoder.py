"""Encoders that read text: folders with a small random model, a WordPiece tokenizer, and what sentence-transformers
writes beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.small_encoders import ENCODERS, SmallEncoder

WORDS = (
    "the", "a", "cat", "dog", "sat", "ran", "on", "mat", "hill", "fast", "slow", "what", "is", "who", "query", ":",
    "passage", "find",
)  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """WordPiece of some words and all letters, with [CLS] and [SEP] as BERT has them."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path, name: str, seed: int = 0, **settings: Any) -> Any:
    """Returns the reference."""
    model = ENCODERS[name]
    model = SmallEncoder(model.architecture, model.model_type, {**model.settings, **settings})
    reference = model.reference(seed)
    model.save(reference, folder)
    write_tokenizer(folder)
    return reference


def write_modules(folder: Path, *modules: tuple[str, dict[str, Any] | None], **settings: Any) -> None:
    """modules.json and the folders of `modules`: a class and its config.json."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, (kind, config) in enumerate(modules, 1):
        path = f"{i}_{kind}"
        (folder / path).mkdir()
        if config is not None:
            (folder / path / "config.json").write_text(json.dumps(config))
        listed.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
