"""Tokenizers of folders without tokenizer.json, built from their vocabulary files: Mistral's tekken.json, tiktoken's
ranks, sentencepiece models, GPT-2's vocab.json with merges.txt, BERT's vocab.txt.

Such files lack settings that only the model's tokenizer class knows, so this module lists the known classes. Folders
with other classes are left to `transformers`. Called by `tokenizer_folder`.
"""

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from octavo.errors import LoadError
from octavo.loading import tokenizer_parts
from octavo.loading.pre_tokenizers import GPT2, GPT4O, KIMI_K2, LLAMA3, QWEN2, PreTokenizer
from octavo.loading.sentencepiece_model import is_sentencepiece, read_sentencepiece
from octavo.loading.weight_files import check_text_file, read_text

_MAX_TOKENS = 1 << 22  # the largest vocabularies have 262,144
_SENTENCEPIECE_CLASSES = ("", "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "MistralTokenizer")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# Llama 3's special tokens, in the order of their ids (github.com/meta-llama/llama3, llama/tokenizer.py).
_LLAMA3_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)),
]  # fmt: skip
# Llama 4's special tokens (github.com/meta-llama/llama-models, models/llama4/tokenizer.py).
_LLAMA4_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|header_start|>",
    "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>",
    *(f"<|text_post_train_reserved_special_token_{i}|>" for i in range(6)), "<|python_start|>", "<|python_end|>",
    "<|finetune_right_pad|>", *(f"<|text_post_train_reserved_special_token_{i}|>" for i in range(6, 67)),
    "<|image_start|>", "<|image_end|>", *(f"<|vision_reserved_special_token_{i}|>" for i in range(2)),
    "<|tile_x_separator|>", "<|tile_y_separator|>", *(f"<|vision_reserved_special_token_{i}|>" for i in range(2, 6)),
    "<|image|>", "<|vision_reserved_special_token_6|>", "<|patch|>",
    *(f"<|vision_reserved_special_token_{i}|>" for i in range(7, 1048)),
]  # fmt: skip
_MIN_LLAMA4_RANKS = 200_000  # Llama 4's tokenizer.model has as many tokens; Llama 3's has 128,000
# The special tokens of Qwen's first version (huggingface.co/Qwen/Qwen-7B, tokenization_qwen.py).
_QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]


class _Tiktoken(NamedTuple):
    """The settings of a tokenizer that its tiktoken file lacks."""

    pre: PreTokenizer
    special: Sequence[str] = ()  # their ids follow the last rank
    roles: Mapping[str, str] = {}


# `ignores_merges`: a word in the vocabulary becomes one token.
_LLAMA3_FILE = _Tiktoken(
    PreTokenizer((LLAMA3,), ignores_merges=True, adds_bos=True), _LLAMA3_SPECIAL,
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
)  # fmt: skip
_QWEN_FILE = _Tiktoken(
    PreTokenizer((QWEN2,), ignores_merges=True, normalizes=True), _QWEN_SPECIAL, {"eos_token": "<|endoftext|>"}
)
_LLAMA4_FILE = _Tiktoken(
    PreTokenizer((GPT4O,), ignores_merges=True, adds_bos=True), _LLAMA4_SPECIAL,
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
)  # fmt: skip
# By the class in tokenizer_config.json, else by the file's name. Other files (tokenizer.model) are Llama 3's or 4's.
_TIKTOKEN_FILES = {
    "QWenTokenizer": _QWEN_FILE,
    "qwen.tiktoken": _QWEN_FILE,
    "TikTokenTokenizer": _Tiktoken(PreTokenizer((KIMI_K2,), ignores_merges=True)),
    "cl100k_base.tiktoken": _Tiktoken(PreTokenizer((LLAMA3,), ignores_merges=True), ["<|endoftext|>"]),
    "o200k_base.tiktoken": _Tiktoken(PreTokenizer((GPT4O,), ignores_merges=True), ["<|endoftext|>"]),
}

# The special tokens of tekken.json files before version 11, which do not list them (mistral-common, Tekkenizer).
_TEKKEN_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip


class Vocabulary(NamedTuple):
    """A tokenizer, and its special tokens by role; tokenizer_config.json may name others."""

    backend: Tokenizer
    roles: dict[str, str]


def find_vocabulary(names: Sequence[str]) -> str | None:
    """Return the file among a folder's `names` that holds the vocabulary, or None."""
    models = sorted(n for n in names if re.fullmatch(r"tokenizer\.model(\.v\w+)?|tiktoken\.model|.*\.tiktoken", n))
    known = ["tekken.json", "tokenizer.model", *reversed(models), "vocab.json", "vocab.txt"]
    return next((name for name in known if name in names), None)


def read_vocabulary(folder: str, name: str, config: Mapping[str, Any]) -> Vocabulary | None:
    """Return the tokenizer of the vocabulary file `name` in `folder`; None if only `transformers` knows its class.
    `config` is tokenizer_config.json.

    Raises `LoadError` or `ValueError` for a damaged file.
    """
    path = os.path.join(folder, name)
    class_name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if name == "tekken.json":
        return _tekken(path, config)
    if name == "vocab.json":
        return _gpt2(folder, class_name, config)
    if name == "vocab.txt":
        return _bert(path, config) if class_name in ("", "BertTokenizer") else None
    check_text_file(path)
    with open(path, "rb") as file:
        start = file.read(4096)
    if _TIKTOKEN_LINE.match(start):
        return _tiktoken(path, class_name, config)
    if class_name not in _SENTENCEPIECE_CLASSES:
        return None
    if not is_sentencepiece(start):
        raise LoadError(f"{path} is neither a sentencepiece model nor a tiktoken file; fetch it again.")
    return _sentencepiece(path, config)


def _sentencepiece(path: str, config: Mapping[str, Any]) -> Vocabulary:
    # `legacy` is sentencepiece's own behaviour: each part between special tokens counts as a text.
    model = read_sentencepiece(path, prefixes_every_part=config.get("legacy") is not False)
    backend = tokenizer_parts.sentencepiece(path, model)
    roles = {role: model.pieces[index] for role, index in model.ids.items()}
    special = [
        p
        for p, t in zip(model.pieces, model.types, strict=True)
        if t == tokenizer_parts.CONTROL or p == roles.get("unk_token")
    ]
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    shown = [
        p.replace("▁", " ") for p, t in zip(model.pieces, model.types, strict=True) if t == tokenizer_parts.USER_DEFINED
    ]
    added = [AddedToken(piece, normalized=model.is_blank_run(piece), special=False) for piece in shown]
    backend.add_tokens(added)
    return _make_vocabulary(backend, roles, config, adds_bos=True)


def _tiktoken(path: str, class_name: str, config: Mapping[str, Any]) -> Vocabulary:
    with open(path, "rb") as file:
        lines = [line.split() for line in file.read().splitlines() if line]
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as e:
        raise LoadError(f"{path} is damaged: not every line is a token and its rank ({e}); fetch it again.") from None
    llama = _LLAMA4_FILE if len(ranks) >= _MIN_LLAMA4_RANKS else _LLAMA3_FILE
    kind = _TIKTOKEN_FILES.get(class_name) or _TIKTOKEN_FILES.get(os.path.basename(path)) or llama
    backend = _ranked(path, ranks, 0, kind.pre)
    named = {int(index): token["content"] for index, token in (config.get("added_tokens_decoder") or {}).items()}
    special = [named[index] for index in sorted(named)] or list(kind.special)
    if named and min(named) == len(ranks):  # fill the ids that no token has
        num_ids = _check_count(max(named) + 1, "the largest id of added_tokens_decoder")
        special = [named.get(i, f"<|reserved_token_{i}|>") for i in range(len(ranks), num_ids)]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return _make_vocabulary(
        backend, {} if named else dict(kind.roles), config, adds_bos=kind.pre.adds_bos and not named
    )


def _tekken(path: str, config: Mapping[str, Any]) -> Vocabulary:
    content = json.loads(read_text(path))
    settings = content["config"]
    num_special = _check_count(settings["default_num_special_tokens"], "default_num_special_tokens")
    listed = content.get("special_tokens") or [{"rank": i, "token_str": t} for i, t in enumerate(_TEKKEN_SPECIAL)]
    by_rank = {token["rank"]: token for token in listed}
    special = [by_rank.get(i, {"token_str": f"<SPECIAL_{i}>"}) for i in range(num_special)]
    num_words = settings["default_vocab_size"] - num_special
    ranks = {base64.b64decode(word["token_bytes"]): word["rank"] for word in content["vocab"][:num_words]}
    backend = _ranked(path, ranks, num_special, PreTokenizer((settings["pattern"],), ignores_merges=True), special)
    for token in special:
        is_control = token.get("is_control", True)
        backend.add_tokens([AddedToken(token["token_str"], normalized=False, special=is_control)])
    texts = {token["token_str"] for token in special}
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return _make_vocabulary(backend, {r: t for r, t in roles.items() if t in texts}, config, adds_bos=True)


def _ranked(
    path: str, ranks: Mapping[bytes, int], first: int, pre: PreTokenizer, special: Sequence[Mapping[str, Any]] = ()
) -> Tokenizer:
    """Return a byte-level BPE tokenizer that makes the token of the lowest rank first. The id of a token is `first`
    plus its rank; `special` tokens have the ids from 0 on."""
    letters = tokenizer_parts.byte_letters()
    vocab = {"".join(letters[byte] for byte in token): first + rank for token, rank in ranks.items()}
    merges = tokenizer_parts.merges_from_scores({token: -rank for token, rank in vocab.items()})
    vocab |= {token["token_str"]: i for i, token in enumerate(special)}
    return tokenizer_parts.byte_level_bpe(path, vocab, merges, pre)


def _gpt2(folder: str, class_name: str, config: Mapping[str, Any]) -> Vocabulary | None:
    merges_path = os.path.join(folder, "merges.txt")
    if class_name not in ("", "GPT2Tokenizer", "Qwen2Tokenizer") or not os.path.exists(merges_path):
        return None
    vocab_path = os.path.join(folder, "vocab.json")
    vocab = json.loads(read_text(vocab_path))
    lines = [line for line in read_text(merges_path).split("\n") if not line.startswith("#version")]
    merges: list[Any] = [tuple(line.split(" ")) for line in lines if line]
    is_qwen = class_name == "Qwen2Tokenizer"
    pre = PreTokenizer((QWEN2,), normalizes=True) if is_qwen else PreTokenizer((GPT2,))
    backend = tokenizer_parts.byte_level_bpe(vocab_path, vocab, merges, pre)
    roles = ("eos_token", "unk_token", "pad_token") if is_qwen else ("bos_token", "eos_token", "unk_token")
    return _make_vocabulary(backend, dict.fromkeys(roles, "<|endoftext|>"), config)


def _bert(path: str, config: Mapping[str, Any]) -> Vocabulary:
    vocab = {line: i for i, line in enumerate(read_text(path).removesuffix("\n").split("\n"))}
    roles = {role: f"[{role.removesuffix('_token').upper()}]" for role in tokenizer_parts.ROLES[2:]}
    backend = tokenizer_parts.word_piece(
        vocab, str(_text(config.get("unk_token", roles["unk_token"]))),
        lowercase=bool(config.get("do_lower_case", True)), strips_accents=config.get("strip_accents"),
        splits_chinese=bool(config.get("tokenize_chinese_chars", True)),
    )  # fmt: skip
    backend.add_special_tokens([token for token in roles.values() if token in vocab])
    tokenizer_parts.frame(backend, [roles["cls_token"]], [roles["sep_token"]])
    return Vocabulary(backend, roles)


def _make_vocabulary(
    backend: Tokenizer, roles: dict[str, str], config: Mapping[str, Any], adds_bos: bool = False
) -> Vocabulary:
    given = {role: _text(config[role]) for role in ("bos_token", "eos_token") if config.get(role)}
    bos, eos = given.get("bos_token", roles.get("bos_token")), given.get("eos_token", roles.get("eos_token"))
    start = [bos] if bos and config.get("add_bos_token", adds_bos) else []
    end = [eos] if eos and config.get("add_eos_token", False) else []
    missing = [token for token in (*start, *end) if backend.token_to_id(token) is None]
    if missing:
        raise ValueError(f"{missing[0]}, which starts or ends its texts, is not in the vocabulary")
    tokenizer_parts.frame(backend, start, end)
    return Vocabulary(backend, roles)


def _check_count(count: int, name: str) -> int:
    if count > _MAX_TOKENS:
        raise ValueError(f"{name} is {count}, more than the {_MAX_TOKENS} that a vocabulary may have")
    return count


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
