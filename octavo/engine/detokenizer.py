"""Incremental detokenization: the text of tokens as they come, cut at UTF-8 boundaries."""

from __future__ import annotations

import codecs
from functools import lru_cache
from itertools import groupby, islice
from typing import TYPE_CHECKING, Protocol

from octavo.loading.token_texts import decode, is_byte_level

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Tokens of context: decoders look at a token's neighbours (spaces, byte pieces).
_CONTEXT_TOKENS = 5
# UTF-8 writes a character in at most four bytes, and a token is at least one.
_MAX_CHARACTER_TOKENS = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Makes the text of one sequence, from one or more tokens at a time."""

    def add(self, token_ids: list[int]) -> str:
        """Add tokens. Returns the text that they complete."""

    def flush(self) -> str:
        """Return the text held back, if the sequence ends within a character."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """Return the detokenizer of a sequence after its prompt."""
    table = _token_bytes(tokenizer, skip_special_tokens)
    if table is not None:
        return ByteDetokenizer(table, prompt_token_ids)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)


class ByteDetokenizer:
    """For byte-level vocabularies: a token's bytes do not depend on its neighbours."""

    __slots__ = ("_begun", "_table")

    def __init__(self, table: _TokenBytes, prompt_token_ids: list[int]) -> None:
        self._table = table
        self._begun = b""  # the first bytes of a character
        self.add(prompt_token_ids[-_MAX_CHARACTER_TOKENS:])  # a prompt may end within a character

    def add(self, token_ids: list[int]) -> str:
        table = self._table
        new = table[token_ids[0]] if len(token_ids) == 1 else b"".join([table[token] for token in token_ids])
        if not self._begun:
            try:
                return new.decode()
            except UnicodeDecodeError:  # it ends within a character, or has wrong bytes
                pass
        new = self._begun + new
        text, num_read = codecs.utf_8_decode(new, "replace", False)
        self._begun = new[num_read:]
        return text

    def flush(self) -> str:
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, computed when it is first seen. Hidden tokens have none."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._added = _added_tokens(tokenizer)[0]

    def __missing__(self, token: int) -> bytes:
        piece = None if token in self._hidden else self._tokenizer.id_to_token(token)
        letters = [GPT2_BYTES.get(letter) for letter in piece or ""]
        is_text = token in self._added or None in letters  # the token's letters stand for themselves
        found = (piece or "").encode() if is_text else bytes(map(int, letters))  # type: ignore[arg-type]
        self[token] = found
        return found


def _gpt2_bytes() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# Byte-level vocabularies write each byte as one printable character.
GPT2_BYTES = _gpt2_bytes()


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: Tokenizer, skip_special_tokens: bool) -> _TokenBytes | None:
    """Return the bytes of tokens, or None if the tokenizer is not byte-level."""
    if not is_byte_level(tokenizer):
        return None
    return _TokenBytes(tokenizer, _added_tokens(tokenizer)[1] if skip_special_tokens else frozenset())


class WindowDetokenizer:
    """For any vocabulary.

    A window of tokens that have been turned to text is decoded with and without the new ones; the difference is the
    new text, held back while it ends within a character. Runs of byte tokens are not decoded in the window: the
    library turns such a run to text whole or not at all. An incremental UTF-8 decoder reads them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._byte_values = _byte_values(tokenizer)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within_bytes = False
        self._pending: list[int] = []
        self._num_read = 0
        self._read_text = ""
        self._added, self._special = _added_tokens(tokenizer)
        self._glues_added_tokens = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_token = prompt_token_ids[-1] if prompt_token_ids else -1
        shown = filter(self._has_text, reversed(prompt_token_ids))  # a prompt may end with many special tokens
        context = [*islice(shown, _CONTEXT_TOKENS)][::-1]
        num_bytes = next(
            (n for n, token in enumerate(reversed(context)) if token not in self._byte_values), len(context)
        )
        if num_bytes:
            self._add_bytes(context[-num_bytes:])
        else:
            self._set_window(context)

    def add(self, token_ids: list[int]) -> str:
        # A token without text does not change its neighbours': the window need not grow.
        token_ids = [token for token in token_ids if self._has_text(token)]
        if self._glues_added_tokens:
            return "".join([self._add_glued(token) for token in token_ids])
        return self._add(token_ids)

    def flush(self) -> str:
        text = self._decode(self._pending)[len(self._read_text) :]
        self._read_text += text
        return text + self._bytes.decode(b"", True)

    def _has_text(self, token: int) -> bool:
        if self._skip_special_tokens and token in self._special:
            return False
        return self._tokenizer.id_to_token(token) is not None  # a model may have more rows than tokens

    def _add(self, token_ids: list[int]) -> str:
        if self._byte_values.keys().isdisjoint(token_ids):
            return self._add_pieces(token_ids) if token_ids else ""
        parts = []
        for are_bytes, group in groupby(token_ids, self._byte_values.__contains__):
            parts.append((self._add_bytes if are_bytes else self._add_pieces)(list(group)))
        return "".join(parts)

    def _add_bytes(self, token_ids: list[int]) -> str:
        rest = "" if self._is_within_bytes else self.flush()
        self._is_within_bytes = True
        self._set_window(token_ids[-1:])  # so that the pieces that follow do not count as the beginning of a text
        return rest + self._bytes.decode(bytes([self._byte_values[token] for token in token_ids]))

    def _add_pieces(self, token_ids: list[int]) -> str:
        before = self._bytes.decode(b"", True) if self._is_within_bytes else ""
        self._is_within_bytes = False
        self._pending += token_ids
        text = self._decode(self._pending)
        tail: list[int] = []
        if text.endswith(_INCOMPLETE):
            if len(self._pending) - self._num_read <= _MAX_CHARACTER_TOKENS:
                return before
            # These bytes are no character. Only the last three can begin one, and the text before them is returned now,
            # unless the cut lies within a character: one token may have the last byte of a character and the first of
            # the next.
            tail = self._pending[1 - _MAX_CHARACTER_TOKENS :]
            settled = self._decode(self._pending[: 1 - _MAX_CHARACTER_TOKENS])
            if not text.startswith(settled):
                return before
            text = settled
        elif len(text) <= len(self._read_text):
            del self._pending[self._num_read + _CONTEXT_TOKENS :]  # enough to decide about the next blank
            return before
        new = text[len(self._read_text) :]
        self._set_window(self._pending[self._num_read : len(self._pending) - len(tail)][-_CONTEXT_TOKENS:])
        self._pending += tail
        return before + new

    def _set_window(self, token_ids: list[int]) -> None:
        """Make `token_ids`, whose text is known, the context of the next tokens."""
        self._pending, self._num_read, self._read_text = token_ids, len(token_ids), self._decode(token_ids)

    def _add_glued(self, token: int) -> str:
        last_token, self._last_token = self._last_token, token
        new = self._add([token])
        added = self._added.get(token)
        if added is not None and last_token in self._added and new == " " + added.content:
            return new[1:]
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=self._skip_special_tokens)


@lru_cache(maxsize=4)
def _byte_values(tokenizer: Tokenizer) -> dict[int, int]:
    """Return {token id: byte} for the byte tokens (`<0xE6>`) of a vocabulary with byte fallback."""
    pieces = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    tokens = {token: byte for byte, token in pieces.items() if token is not None}
    half = next((token for token, byte in tokens.items() if byte >= 0x80), None)
    is_fallback = half is not None and tokenizer.decode([half], skip_special_tokens=False) == _INCOMPLETE
    return tokens if is_fallback else {}


@lru_cache(maxsize=4)  # each call copies the tokens out of the tokenizer
def _added_tokens(tokenizer: Tokenizer) -> tuple[dict[int, AddedToken], frozenset[int]]:
    """Return all added tokens, and the special ones."""
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return added, frozenset(token for token, its in added.items() if its.special)
