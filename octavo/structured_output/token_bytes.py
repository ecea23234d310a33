"""The vocabulary of a model for llguidance: the bytes of each token, and the tokens of a text.

If a grammar leaves no choice, llguidance forces the tokens of the only text. These must be plain text: `<|im_end|>` in
a constant is ten characters, not the token that ends an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MARK = "\x02"  # before a text whose tokens would otherwise begin with a blank


def make_vocabulary(tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Return a tokenizer for llguidance, for masks of `vocab_size` tokens, or of the tokenizer's tokens if it has
    more."""
    from llguidance import LLTokenizer, TokenizerWrapper

    plain = Tokenizer.from_str(tokenizer_json)
    size = max(vocab_size, plain.get_vocab_size())
    known = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=eos_token_ids or None)
    words = _Words(plain, known, size, eos_token_ids)
    words.vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=words.eos_token_ids)
    return words.vocabulary


class _Words:
    """llguidance's interface of a custom tokenizer: bytes of tokens, and tokens of bytes."""

    def __init__(self, tokenizer: Tokenizer, known: LLTokenizer, size: int, eos_token_ids: list[int]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocabulary: LLTokenizer | None = None
        added = tokenizer.get_added_tokens_decoder()
        special = {token for token, about in added.items() if about.special}
        special |= {token for token in range(size) if token not in added and known.is_special_token(token)}
        self.eos_token_ids = eos_token_ids or list(known.eos_tokens)
        special |= set(self.eos_token_ids)
        # Letters of an added token stand for themselves, also in byte-level vocabularies.
        self.tokens = [
            added[token].content.encode() if token in added else known.decode_bytes([token]) for token in range(size)
        ]
        self.special_token_ids = sorted(token for token in special if token < size)
        self.eos_token_id = self.eos_token_ids[0]
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
