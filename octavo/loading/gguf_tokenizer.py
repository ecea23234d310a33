"""The tokenizer that a GGUF file carries in its metadata, rebuilt as a `tokenizers.Tokenizer`.

Two kinds exist for the architectures that are built: byte-level BPE with merges ("gpt2" in ggml's words) and
sentencepiece BPE with scores ("llama"). How text is split before BPE is not in the file, only its name is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFFile

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class GGUFTokenizer(NamedTuple):
    """A tokenizer and what stands beside it, in `transformers`' words."""

    backend: Tokenizer
    options: dict[str, Any]  # the special tokens by role, and the chat template


def build_gguf_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Raises `LoadError` where the file has no tokenizer, or one of a kind that is not built."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise LoadError(f"{file.path} carries no tokenizer; pass --tokenizer with a folder or a Hugging Face id.")
    tokens = _strings(file, "tokens")
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2":
        backend = _byte_level_bpe(file, tokens, pre)
    elif kind == "llama":
        backend = _sentencepiece_bpe(file, tokens)
    else:
        raise LoadError(f"{file.path} has a tokenizer of kind {kind!r}, which is not built yet; gpt2 and llama are.")

    token_types = file.metadata.get("tokenizer.ggml.token_type") or []
    unk_token = _token(file, tokens, "unknown")
    # Control tokens never come from text that is merely shown; user-defined ones, such as <think>, are shown.
    special = [t for t, token_type in zip(tokens, token_types, strict=False) if token_type == _CONTROL]
    if unk_token is not None and unk_token not in special:
        special.append(unk_token)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    plain = [t for t, token_type in zip(tokens, token_types, strict=False) if token_type == _USER_DEFINED]
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    chat_template = file.metadata.get("tokenizer.chat_template")
    options = {
        "bos_token": _token(file, tokens, "bos"),
        "eos_token": _token(file, tokens, "eos"),
        "unk_token": unk_token,
        "pad_token": _token(file, tokens, "padding"),
        # Files from before these keys leave them out; the defaults are llama.cpp's.
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe")),
        "add_eos_token": bool(file.metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": chat_template if isinstance(chat_template, str) else None,
    }
    return GGUFTokenizer(backend, options)


def _byte_level_bpe(file: GGUFFile, tokens: list[str], pre: Any) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in _strings(file, "merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is in the vocabulary as it is, even where merges would not lead to it.
    backend = Tokenizer(_bpe(file, vocab, merges, ignore_merges=pre == "llama-bpe"))
    gpt2_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("smollm", "starcoder", "refact"):
        # The digits come first: "  12" is "  ", "1", "2", where GPT-2's own pattern alone would make it " ", " 12".
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2_split])
    elif pre in ("gpt-2", "default"):
        backend.pre_tokenizer = gpt2_split
    elif pre in ("llama-bpe", "qwen2"):
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT if pre == "llama-bpe" else _QWEN2_SPLIT), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
    else:
        raise LoadError(
            f"{file.path}: the pre-tokenizer {pre!r} is not built yet (smollm, starcoder, refact, gpt-2, llama-bpe and "
            "qwen2 are); pass --tokenizer with the folder or Hugging Face id of the original model."
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        found = f"{len(scores)} for {len(tokens)} tokens" if isinstance(scores, list) else "none"
        raise LoadError(f"{file.path} is damaged: its tokenizer needs a score for each token and has {found}.")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, dict(zip(tokens, scores, strict=True)))
    backend = Tokenizer(_bpe(file, vocab, merges, fuse_unk=True, byte_fallback=True))
    prefix_space = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if prefix_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix_space else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first.

    Sentencepiece merges whichever neighbours make the best-scored token, so a ranking of all pairs by what they make is
    the same. Ties go to the longer left part, then the longer right one, then the order of the vocabulary.
    """
    ranked = []
    for token, score in scores.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(score, len(left), len(right), left, right) for left, right in pairs]
    ranked.sort(key=lambda merge: merge[:3], reverse=True)  # stable, also in reverse
    return [(left, right) for *_, left, right in ranked]


def _bpe(file: GGUFFile, vocab: dict[str, int], merges: Any, **options: bool) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as e:  # the Rust side raises a bare Exception for merges whose tokens are unknown
        raise LoadError(f"{file.path} is damaged: its merges do not fit its vocabulary ({e}).") from None


def _strings(file: GGUFFile, name: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise LoadError(f"{file.path} is damaged: tokenizer.ggml.{name} is no list of texts.")
    return value


def _token(file: GGUFFile, tokens: list[str], role: str) -> str | None:
    index = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
