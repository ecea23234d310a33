"""Tokens to text as they come: UTF-8 boundaries, and stop strings wherever they cross tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Decoders look at a token's neighbours (spaces, byte pieces); this many tokens of context settle them.
_CONTEXT_TOKENS = 5
# UTF-8 writes a character in at most four bytes, and a token is at least one.
_MAX_CHARACTER_TOKENS = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of one sequence, grown token by token.

    A window of tokens that have been turned to text is decoded with and without the new ones; the difference is the
    new text, held back while it ends within a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._pending = prompt_token_ids[-_CONTEXT_TOKENS:]
        self._num_read = len(self._pending)
        self._read_text = self._decode(self._pending)
        self._added = _added_tokens(tokenizer)
        self._glues_added_tokens = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_token = prompt_token_ids[-1] if prompt_token_ids else -1

    def add(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        return "".join(self._add(token) for token in token_ids)

    def flush(self) -> str:
        """What was held back, if the sequence ends within a character."""
        text = self._decode(self._pending)[len(self._read_text) :]
        self._read_text += text
        return text

    def _add(self, token: int) -> str:
        added = self._added.get(token)
        if added is not None and added.special and self._skip_special_tokens:
            return ""  # it has no text and no effect on its neighbours' text: the window need not grow by it
        last_token, self._last_token = self._last_token, token
        self._pending.append(token)
        text = self._decode(self._pending)
        tail: list[int] = []
        if text.endswith(_INCOMPLETE):
            if len(self._pending) - self._num_read <= _MAX_CHARACTER_TOKENS:
                return ""
            # These bytes are no character: only the last three can be the beginning of one. The rest goes out as it is,
            # unless the cut lies within a character, whose last byte came in one token with the next one's first.
            tail = self._pending[1 - _MAX_CHARACTER_TOKENS :]
            settled = self._decode(self._pending[: 1 - _MAX_CHARACTER_TOKENS])
            if not text.startswith(settled):
                return ""
            text = settled
        elif len(text) <= len(self._read_text):
            return ""
        new = text[len(self._read_text) :]
        window = self._pending[self._num_read : len(self._pending) - len(tail)]
        self._num_read = len(window)
        self._read_text = self._decode(window)
        self._pending = window + tail
        if self._glues_added_tokens and added is not None and last_token in self._added and new == " " + added.content:
            return new[1:]
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


@lru_cache(maxsize=4)  # it is copied out of the tokenizer at each call
def _added_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return added


class StopStrings:
    """Watches a growing text for stop strings and says how much of it may be shown."""

    def __init__(self, stop: list[str], include_in_output: bool) -> None:
        self._stop = stop
        self._include_in_output = include_in_output

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """The stop string that ends first in `text`, whose last `num_new` characters are new, and where to cut."""
        old = len(text) - num_new
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s, max(0, old - len(s) + 1))) >= 0]
        if not found:
            return None
        end, at, stop = min(found)
        return stop, end if self._include_in_output else at

    def num_held_back(self, text: str) -> int:
        """Characters at the end of `text` that may turn out to begin a stop string, and so cannot be shown yet."""
        if self._include_in_output:
            return 0
        held = 0
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                held = max(held, len(text) - at)
        return held
