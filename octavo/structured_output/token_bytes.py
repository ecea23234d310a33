"""The vocabulary of a model for llguidance: the bytes of each token, and the tokens of a text.

If a grammar leaves no choice, llguidance forces the tokens of the only text. These must be plain text: `<|im_end|>` in
a constant is ten characters, not the token that ends an answer.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.loading.tokenizer_parts import byte_letters

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

_MARK = "\x02"  # before a text whose tokens would otherwise begin with a blank
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte in a vocabulary of texts


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Return a tokenizer for llguidance, for masks of `vocab_size` tokens, or of the tokenizer's tokens if it has
    more. `tokenizer` is changed, and used from now on."""
    from llguidance import LLTokenizer, TokenizerWrapper

    size = max(vocab_size, tokenizer.get_vocab_size())
    # Without end-of-sequence tokens of the model, llguidance knows the usual texts of such tokens.
    eos_token_ids = eos_token_ids or list(LLTokenizer(tokenizer.to_str(), n_vocab=size, slices=[]).eos_tokens)
    words = _Words(tokenizer, size, eos_token_ids)
    words.vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=eos_token_ids)
    return words.vocabulary


class _Words:
    """llguidance's interface of a custom tokenizer: bytes of tokens, and tokens of bytes."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: list[int]) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocabulary: LLTokenizer | None = None
        spelled = _spelling(tokenizer)
        words = {token: spelled(piece) for piece, token in tokenizer.get_vocab(with_added_tokens=False).items()}
        special = set(eos_token_ids)
        for token, added in tokenizer.get_added_tokens_decoder().items():
            # Letters of an added token stand for themselves, also in byte-level vocabularies.
            words[token] = added.content.encode()
            special |= {token} if added.special else set()
        # In llguidance a byte 0xFF, which no text has, begins a special token, as does an id without a token.
        special |= {token for token in range(size) if (words.get(token) or b"\xff").startswith(b"\xff")}
        self.tokens = [words.get(token, b"") or b"<[%d]>" % token for token in range(size)]
        self.special_token_ids = sorted(token for token in special if token < size)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None

    def __call__(self, data: bytes | str) -> list[int]:
        data = data.encode() if isinstance(data, str) else data
        text = data.decode(errors="replace")
        for mark in ("", _MARK):
            token_ids = self._tokenizer.encode(mark + text, add_special_tokens=False).ids
            found, wanted = [self.tokens[token] for token in token_ids], mark.encode()
            whole = b"".join(found)
            if whole == wanted + data or (mark and whole == b" " + wanted + data):
                skipped = len(whole) - len(data)
                while skipped > 0 and found:
                    skipped -= len(found.pop(0))
                if skipped == 0:
                    return token_ids[len(token_ids) - len(found) :]
        # These are tokens of this text, but not those that a model would choose.
        return [] if self.vocabulary is None else self.vocabulary.greedy_tokenize(text)


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Return the function from the letters of a token that was not added to its bytes. Raises `RequestError` for a
    vocabulary whose letters mean neither bytes nor, with `<0xAB>` for bytes, texts."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = {step.get("type"): step for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in steps:
        letters = byte_letters()
        encoding = codecs.charmap_build("".join(letters[byte] for byte in range(256)))

        def spelled_in_bytes(piece: str) -> bytes:
            try:
                return codecs.charmap_encode(piece, "strict", encoding)[0]
            except UnicodeEncodeError:  # its letters stand for themselves
                return piece.encode()

        return spelled_in_bytes
    if "ByteFallback" not in steps:
        raise RequestError(
            "structured_outputs cannot be followed: the letters of the model's tokens stand neither for bytes nor for "
            "texts."
        )
    blank = steps.get("Replace", {}).get("pattern", {}).get("String", " ")

    def spelled(piece: str) -> bytes:
        byte = _BYTE.fullmatch(piece)
        return piece.replace(blank, " ").encode() if byte is None else bytes([int(byte[1], 16)])

    return spelled
