"""The tokenizer that a GGUF file carries in its metadata, rebuilt as a `tokenizers.Tokenizer`.

Kinds, in ggml's words: byte-level BPE with merges ("gpt2", "gemma4"), sentencepiece BPE with scores ("llama"),
sentencepiece unigram ("t5") and WordPiece ("bert"). The file names the way to split text before BPE, but does not
describe it: see `pre_tokenizers`.
"""

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

from octavo.errors import LoadError
from octavo.loading import tokenizer_parts
from octavo.loading.gguf_file import GGUFFile
from octavo.loading.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

# Kinds that add BOS or EOS to a text if the file does not say, as in llama.cpp.
_ADDS_BOS, _ADDS_EOS = ("llama", "bert"), ("t5",)
# The roles of tokens: GGUF's name -> the name in `transformers`.
_ROLES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
_PHI3_KEEPS = {"<unk>", "<s>", "<|endoftext|>"}


def build_gguf_tokenizer(file: GGUFFile) -> tokenizer_parts.TokenizerParts:
    """Return the file's tokenizer. Raises `LoadError` if the file has no tokenizer, or a kind that is not built."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise LoadError(f"{file.path} carries no tokenizer; pass --tokenizer with a folder or a Hugging Face id.")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_strings(file, "tokens"))]
    types = file.metadata.get("tokenizer.ggml.token_type") or [tokenizer_parts.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(f"{file.path} is damaged: {len(types)} token types for {len(tokens)} tokens.")
    special = {
        role: tokens[index]
        for name, role in _ROLES.items()
        if isinstance(index := file.metadata.get(f"tokenizer.ggml.{name}_token_id"), int) and 0 <= index < len(tokens)
    }
    pre = PreTokenizer(())
    if kind in ("gpt2", "gemma4"):
        pre = _pre_tokenizer(file, kind)
        backend = _byte_level_bpe(file, tokens, pre)
    elif kind in ("llama", "t5"):
        backend = _sentencepiece(file, kind, tokens, types)
    elif kind == "bert":
        tokens, special = _as_word_pieces(tokens, types, special)
        backend = _word_piece(file, tokens, special.get("unk_token", "[UNK]"))
    else:
        raise LoadError(
            f"{file.path} has a tokenizer of kind {kind!r}, which is not built; gpt2, gemma4, llama, t5 and bert are."
        )

    # Control tokens are special, so decoding can leave them out. User-defined tokens, such as <think>, are not special
    # and stay in the text.
    control = [t for t, token_type in zip(tokens, types, strict=True) if token_type == tokenizer_parts.CONTROL]
    control += [t for role, t in special.items() if role == "unk_token" and t not in control]
    # In Phi 3's own tokenizer.json most control tokens take the blanks that follow; GGUF files cannot say so.
    strips = (
        set(control) - _PHI3_KEEPS if kind == "llama" and file.metadata.get("general.architecture") == "phi3" else set()
    )
    backend.add_special_tokens([AddedToken(t, normalized=False, rstrip=t in strips) for t in control])
    plain = [t for t, token_type in zip(tokens, types, strict=True) if token_type == tokenizer_parts.USER_DEFINED]
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    _frame(file, backend, special, adds_bos=kind in _ADDS_BOS or pre.adds_bos, adds_eos=kind in _ADDS_EOS)
    return tokenizer_parts.TokenizerParts(backend, special, chat_template=_chat_template(file))


def _frame(file: GGUFFile, backend: Tokenizer, special: dict[str, str], adds_bos: bool, adds_eos: bool) -> None:
    """Set the tokens that start and end a text. `adds_bos` and `adds_eos` are for older files, which lack the keys."""
    adds = {
        name: bool(file.metadata.get(f"tokenizer.ggml.add_{name}_token", default))
        for name, default in (("bos", adds_bos), ("eos", adds_eos))
    }
    is_bert = file.metadata["tokenizer.ggml.model"] == "bert"
    if is_bert:
        start, end = special.get("cls_token", special.get("bos_token")), special.get("sep_token")
        adds["eos"] = bool(file.metadata.get("tokenizer.ggml.add_sep_token", True))
    else:
        start, end = special.get("bos_token"), special.get("eos_token")
    tokenizer_parts.frame(
        backend, [start] if start and adds["bos"] else [], [end] if end and adds["eos"] else [], has_types=is_bert
    )


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the chat template, templates by name if the file has named ones beside the default, or None."""
    default = file.metadata.get("tokenizer.chat_template")
    names = file.metadata.get("tokenizer.chat_templates") or []
    named = {name: file.metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    templates = {name: text for name, text in {"default": default, **named}.items() if isinstance(text, str)}
    return templates.get("default") if templates.keys() <= {"default"} else templates


def _pre_tokenizer(file: GGUFFile, kind: str) -> PreTokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "gemma4" if kind == "gemma4" else "default")
    if name not in PRE_TOKENIZERS:
        raise LoadError(
            f"{file.path}: the pre-tokenizer {name!r} is not built ({', '.join(sorted(PRE_TOKENIZERS))} are); pass "
            "--tokenizer with the folder or Hugging Face id of the original model."
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(file: GGUFFile, tokens: list[str], pre: PreTokenizer) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: Iterable[Any]
    if file.metadata.get("tokenizer.ggml.pre") == "kimi-k2" and "tokenizer.ggml.merges" not in file.metadata:
        merges = tokenizer_parts.merges_from_scores(
            {token: -i for token, i in vocab.items()}
        )  # made from a tiktoken file
    else:
        merges = [tuple(merge.split(" ")) for merge in _strings(file, "merges")]
    return tokenizer_parts.byte_level_bpe(file.path, vocab, merges, pre)


def _sentencepiece(file: GGUFFile, kind: str, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        found = f"{len(scores)} for {len(tokens)} tokens" if isinstance(scores, list) else "none"
        raise LoadError(f"{file.path} is damaged: its tokenizer needs a score for each token and has {found}.")
    charsmap = file.metadata.get("tokenizer.ggml.precompiled_charsmap") or []
    return tokenizer_parts.sentencepiece(
        file.path,
        tokenizer_parts.SentencePieces(
            tokens, scores, types,
            is_unigram=kind == "t5",
            unk_id=file.metadata.get("tokenizer.ggml.unknown_token_id", 2 if kind == "t5" else 0),
            charsmap=bytes(value & 0xFF for value in charsmap),
            adds_prefix=bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True)),
            prefixes_every_part=True,  # also after each special token, as in llama.cpp (llama-vocab.cpp)
            collapses_blanks=bool(file.metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        ),
    )  # fmt: skip


def _as_word_pieces(tokens: list[str], types: list[int], special: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return tokens and special tokens as BERT writes them. Files mark the start of a word with ▁; BERT marks the parts
    after the start with ##."""
    words = {
        token: token if token_type != tokenizer_parts.NORMAL else token[1:] if token.startswith("▁") else f"##{token}"
        for token, token_type in zip(tokens, types, strict=True)
    }
    # A special token may have the type of normal tokens.
    words |= {word: word for token in special.values() if (word := token.removeprefix("▁")) in words}
    return [words[token] for token in tokens], {role: words[token] for role, token in special.items()}


def _word_piece(file: GGUFFile, tokens: list[str], unk_token: str) -> Tokenizer:
    lowercase = bool(file.metadata.get("tokenizer.ggml.normalizer.lowercase", True))
    strips_accents = bool(file.metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase))
    vocab = {token: i for i, token in enumerate(tokens)}
    return tokenizer_parts.word_piece(vocab, unk_token, lowercase=lowercase, strips_accents=strips_accents)


def _strings(file: GGUFFile, name: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise LoadError(f"{file.path} is damaged: tokenizer.ggml.{name} is no list of texts.")
    return value
