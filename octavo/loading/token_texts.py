"""The text of tokens. Decoders of the `tokenizers` library read the letters of added tokens as those of the vocabulary,
in which a letter stands for a byte or a blank. Here the text of an added token is the token itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_INLINE_IDS = 1024  # it takes about 100 µs to decode them


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether each letter of the vocabulary stands for a byte."""
    from tokenizers import decoders

    return isinstance(tokenizer.decoder, decoders.ByteLevel)


@lru_cache(maxsize=8)  # the library copies all added tokens with each call
def _misread(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """Return the added tokens that the decoder misreads, by id: the text, and whether the token is special."""
    found = {}
    for token, its in tokenizer.get_added_tokens_decoder().items():
        shown = "" if its.content.isascii() else tokenizer.decode([token], skip_special_tokens=False)
        if shown and its.content.strip() not in shown:  # a decoder may strip blanks at the ends of a text
            found[token] = its.content, its.special
    return found


def decode(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    misread = _misread(tokenizer)
    if misread and not misread.keys().isdisjoint(token_ids):
        return "".join(_parts(tokenizer, token_ids, misread, skip_special_tokens))
    if len(token_ids) <= _MAX_INLINE_IDS:
        return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
    # `decode_batch` lets other threads run, and `decode` does not (tokenizers 0.23).
    return str(tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])


def _parts(
    tokenizer: Tokenizer, token_ids: Sequence[int], misread: dict[int, tuple[str, bool]], skips_special: bool
) -> Iterator[str]:
    """Yield the texts of misread tokens, and of the tokens between them. A character may go on behind a hidden one."""
    if skips_special:
        token_ids = [token for token in token_ids if token not in misread or not misread[token][1]]
    before = list[int]()
    for is_misread, group in groupby(token_ids, misread.__contains__):
        tokens = list(group)
        if is_misread:
            yield from (misread[token][0] for token in tokens)
        else:  # blanks at the beginning depend on what is before; bytes do not
            context = [] if is_byte_level(tokenizer) else before
            shown = tokenizer.decode([*context, *tokens], skip_special_tokens=skips_special)
            yield shown[len(tokenizer.decode(context, skip_special_tokens=skips_special)) :]
        before += tokens
