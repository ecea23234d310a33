"""Tokenizes prompts piece by piece, and keeps the tokens of pieces. A piece is a text between two marks of the chat
template, such as a message: a system prompt is tokenized once, and a turn of a conversation only where it is new."""

from __future__ import annotations

import re
import sys
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

    from octavo.loading.tokenizer import ModelTokenizer

_MAX_KEPT_BYTES = 8 << 20  # of each of the two dictionaries
_MAX_PIECE_BYTES = 1 << 20  # a longer piece is not kept
_ENTRY_BYTES = 256  # of an entry beside its text and its tokens
_MAX_MARKS = 32


class PieceEncoder:
    """Returns the tokens that the tokenizer gives a text, without special tokens around it. Any thread may call it."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._backend = tokenizer.backend_tokenizer
        marks = _marks(tokenizer) if _is_local(self._backend) else []
        self._marks = re.compile(f"({'|'.join(map(re.escape, marks))})") if marks else None
        # Tokens of pieces by text. When the recent ones are too many they become the older ones, whose place they take.
        self._recent: dict[str, array[int]] = {}
        self._older: dict[str, array[int]] = {}
        self._num_recent_bytes = 0

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`. Raises what the tokenizer raises for lone surrogates."""
        if self._marks is None:
            return self._encode(text)
        token_ids = list[int]()
        for piece in self._marks.split(text):
            if piece:
                found = self._recent.get(piece)
                token_ids += self._kept(piece) if found is None else found
        return token_ids

    def _kept(self, piece: str) -> array[int]:
        """Return the tokens of a piece that is not among the recent ones, and put it there."""
        found = self._older.get(piece)
        token_ids = array("I", self._encode(piece)) if found is None else found
        num_bytes = sys.getsizeof(piece) + token_ids.itemsize * len(token_ids) + _ENTRY_BYTES
        if num_bytes <= _MAX_PIECE_BYTES:
            if self._num_recent_bytes + num_bytes > _MAX_KEPT_BYTES:
                self._older, self._recent, self._num_recent_bytes = self._recent, {}, 0
            self._recent[piece] = token_ids
            self._num_recent_bytes += num_bytes
        return token_ids

    def _encode(self, text: str) -> list[int]:
        # `encode` also finds the offsets of tokens, in a quarter more time, and holds the GIL (tokenizers 0.23).
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def _is_local(backend: Tokenizer) -> bool:
    """Return whether the tokens of a piece between two marks depend on the piece alone."""
    if backend.encode_special_tokens or backend.truncation or backend.padding:
        return False
    if getattr(backend.model, "dropout", None):  # random
        return False
    try:
        states = [part.__getstate__() for part in (backend.normalizer, backend.pre_tokenizer) if part is not None]
    except Exception:  # the library cannot tell what Python's own parts do
        return False
    # Such a part puts a blank before the first piece only.
    return not any(b'"prepend_scheme":"first"' in state for state in states)


def _marks(tokenizer: ModelTokenizer) -> list[str]:
    """Return the special tokens of the chat templates at which the tokenizer cuts a text wherever they stand."""
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    texts += tokenizer.special_tokens_map.values()
    # The tokenizer looks for all of these at once, before it changes the text in any way.
    added = [one for one in tokenizer.backend_tokenizer.get_added_tokens_decoder().values() if not one.normalized]
    if any(one.single_word for one in added):  # only some of their places count
        return []
    found = [one.content for one in added if _cuts(one) and any(one.content in text for text in texts)]
    return [mark for mark in found if not any(_hides(one.content, mark) for one in added)][:_MAX_MARKS]


def _cuts(token: AddedToken) -> bool:
    """Return whether a special token takes no blanks beside it, and neither begins nor ends with a blank."""
    return token.special and not token.lstrip and not token.rstrip and token.content.split() == [token.content]


def _hides(other: str, mark: str) -> bool:
    """Return whether a text may have another token in the place of a mark: one that contains it, or overlaps its
    beginning."""
    if other == mark or not (mark in other or mark[0] in other[1:]):  # quick, because some have 6,000 added tokens
        return False
    return mark in other or any(other.endswith(mark[:length]) for length in range(1, len(mark)))
