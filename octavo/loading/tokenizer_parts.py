"""Builds tokenizers of the `tokenizers` library from vocabularies: the code that GGUF files and vocabulary files share.
`gguf_tokenizer` and `vocabulary_files` read the files, and `tokenizer` makes a `ModelTokenizer` of the parts.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import LoadError
from octavo.loading.pre_tokenizers import PreTokenizer, byte_level_split

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer and its settings, in `transformers`' words. Added tokens are in the order of their ids."""

    backend: Tokenizer
    special_tokens: Mapping[str, str | AddedToken]  # by role
    extra_special_tokens: Sequence[str | AddedToken] = ()
    added_tokens: Sequence[AddedToken] = ()
    chat_template: str | dict[str, str] | None = None
    cleans_up_spaces: bool = False
    response_template: Mapping[str, Any] | None = None  # how to parse answers


def byte_level_bpe(
    source: str, vocab: dict[str, int], merges: Iterable[tuple[str, str]], pre: PreTokenizer
) -> Tokenizer:
    """Return a BPE tokenizer over bytes, or over characters if `pre` says so. `source` names the file in errors."""
    if not pre.is_byte_level:
        backend = Tokenizer(_bpe(source, vocab, merges, fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return backend
    backend = Tokenizer(_bpe(source, vocab, merges, ignore_merges=pre.ignores_merges))
    if pre.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level_split(pre.patterns)
    backend.decoder = decoders.ByteLevel()
    return backend


def word_piece(
    vocab: dict[str, int], unk_token: str, *, lowercase: bool, strips_accents: bool | None, splits_chinese: bool = True
) -> Tokenizer:
    """Return a tokenizer like BERT's. With `strips_accents` None, accents are stripped if text is lowercased."""
    backend = Tokenizer(models.WordPiece(vocab, unk_token=unk_token))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strips_accents, handle_chinese_chars=splits_chinese
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """A sentencepiece model. The types of pieces have the numbers of its protocol buffer, which GGUF files share."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    is_unigram: bool
    unk_id: int = 0
    charsmap: bytes = b""  # the compiled normalization
    adds_prefix: bool = True  # adds a blank in front of the text
    prefixes_every_part: bool = False  # also adds a blank after each special token
    collapses_blanks: bool = False
    ids: dict[str, int] = field(default_factory=dict)  # ids of special tokens by role

    def is_blank_run(self, piece: str) -> bool:
        """Return True if a user-defined piece holds only blanks and is searched in the text after ▁ became a blank."""
        return not self.adds_prefix and piece.isspace() and " " in piece


_MAX_BLANKS = 1 << 20  # limit of the blanks that are stripped from the start of a decoded text
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def sentencepiece(source: str, model: SentencePieces) -> Tokenizer:
    """Return a BPE or unigram tokenizer that computes what sentencepiece does. `source` names the file in errors.

    Kudo and Richardson, "SentencePiece" (2018); Kudo, "Subword Regularization" (2018) for the unigram model.
    """
    # User-defined pieces are searched in the original text, which has blanks instead of ▁.
    pieces = [p.replace("▁", " ") if t == USER_DEFINED else p for p, t in zip(model.pieces, model.types, strict=True)]
    if model.is_unigram:
        scored = list(zip(pieces, model.scores, strict=True))
        backend = Tokenizer(models.Unigram(scored, unk_id=model.unk_id, byte_fallback=BYTE in model.types))
    else:
        vocab = {piece: i for i, piece in enumerate(pieces)}
        # Merges make only tokens of these types: the text "<0x0A>" must not become the byte token.
        made = {p for p, t in zip(pieces, model.types, strict=True) if t in (NORMAL, USER_DEFINED, UNUSED)}
        merges = merges_from_scores(dict(zip(pieces, model.scores, strict=True)), made)
        unk_token = pieces[model.unk_id] if 0 <= model.unk_id < len(pieces) else None
        options = {"fuse_unk": True, "byte_fallback": True}
        backend = Tokenizer(_bpe(source, vocab, merges, unk_token=unk_token, **options))
    steps = _charsmap_steps(model.charsmap) if model.charsmap else []
    if any(map(model.is_blank_run, pieces)):
        steps.append(normalizers.Replace("▁", " "))  # so that pieces of blanks also match runs of ▁
    if model.collapses_blanks:
        # At the end of a text, sentencepiece also strips ▁, whether it was a blank in the text or not.
        steps += [normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    # Metaspace recognizes the first part by its place in the text, and stripping blanks changes that place.
    if model.adds_prefix and (model.prefixes_every_part or model.collapses_blanks):
        steps += [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    else:
        scheme = "first" if model.adds_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    most = _MAX_BLANKS if model.collapses_blanks else 1
    strip = [decoders.Strip(content=" ", left=most)] if model.adds_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _charsmap_steps(charsmap: bytes) -> list[normalizers.Normalizer]:
    """Return the steps of a compiled normalization. The library takes a line break of two characters as one (tokenizers
    0.23), and sentencepiece normalizes each of them."""
    precompiled = normalizers.Precompiled(charsmap)
    whole, parts = precompiled.normalize_str("\r\n"), "".join(map(precompiled.normalize_str, "\r\n"))
    return [precompiled] if whole == parts else [normalizers.Replace("\r\n", parts), precompiled]


def merges_from_scores(scores: Mapping[str, float], made: Collection[str] | None = None) -> list[tuple[str, str]]:
    """Return every way to merge two tokens into a third, best score first. `made` limits all three tokens; None: all.

    Sentencepiece merges the neighbours that make the token with the best score, so ranking all pairs by the score of
    the merged token has the same result. Ties go to the longer left part, then to the longer right part, then to the
    order of the vocabulary.
    """
    parts = scores if made is None else made
    tokens = sorted((token for token in scores if token in parts), key=scores.__getitem__, reverse=True)  # stable
    lengths = sorted({len(part) for part in parts}, reverse=True)
    are_lengths = frozenset(lengths)

    def cuts(size: int) -> Iterable[int]:
        """Return where a token of this length may be cut: only where both parts have a length that some token has."""
        if size <= len(lengths):
            return range(size - 1, 0, -1)
        return [i for i in lengths if 0 < i < size and size - i in are_lengths]

    merges: list[tuple[str, str]] = []
    for _, group in groupby(tokens, key=scores.__getitem__):
        pairs = [
            (token[:i], token[i:])
            for token in group
            for i in cuts(len(token))
            if token[:i] in parts and token[i:] in parts
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
        merges += pairs
    return merges


def byte_letters() -> dict[int, str]:
    """Return the letter that GPT-2's byte-level BPE writes for each byte: a printable byte stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def frame(backend: Tokenizer, start: Sequence[str], end: Sequence[str], has_types: bool = False) -> None:
    """Set the special tokens that start and end each text. The second text of a pair has token type 1 with `has_types`,
    as in BERT; otherwise the end tokens stand before it and after it, as in RoBERTa."""
    second = ["$B:1", *(f"{token}:1" for token in end)] if has_types else [*end, "$B", *end]
    backend.post_processor = processors.TemplateProcessing(
        single=[*start, "$A", *end],
        pair=[*start, "$A", *end, *second],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*start, *end}],
    )


def _bpe(
    source: str, vocab: dict[str, int], merges: Iterable[tuple[str, str]], **options: bool | str | None
) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=list(merges), **options)
    except Exception as e:  # the Rust side raises a bare Exception for merges whose tokens are unknown
        raise LoadError(f"{source} is damaged: its merges do not fit its vocabulary ({e}).") from None
