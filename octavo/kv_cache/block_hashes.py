"""The keys of the prefix index: chained hashes of full blocks, over everything that a block's contents depend on."""

from __future__ import annotations

import hashlib
from array import array

from octavo.request import Prompt
from octavo.sequence import Sequence


def extend_block_hashes(seq: Sequence, block_size: int) -> None:
    """Chain the hashes of the full blocks of `seq`; see `extend_hashes`."""
    extend_hashes(seq.block_hashes, seq.request.prompt, seq.token_ids, block_size)


def extend_hashes(hashes: list[bytes], prompt: Prompt, token_ids: list[int], block_size: int) -> None:
    """Append the missing hashes of the full blocks of `token_ids`, which begin with the prompt's tokens.

    A hash covers its parent's hash, the block's tokens, and media placed in it. The first block's parent is a hash of
    cache salt and adapter. The hash is BLAKE2b with 16 bytes: prompts come from strangers, who must not be able to
    construct a collision.
    """
    while (len(hashes) + 1) * block_size <= len(token_ids):
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else _digest(repr((prompt.cache_salt or "", prompt.adapter or "")).encode())
        content = array("i", token_ids[start : start + block_size]).tobytes()
        if prompt.media:
            content += _media_key(prompt, start, start + block_size)
        hashes.append(_digest(content, parent))


def _media_key(prompt: Prompt, start: int, end: int) -> bytes:
    """Return what identifies the media in tokens start .. end: their contents, and which rows of them."""
    overlapping = [
        (item.position - start, item.num_tokens, item.first_row, item.content_hash)
        for item in prompt.media
        if item.position < end and item.position + item.num_tokens > start
    ]
    return repr(overlapping).encode() if overlapping else b""


def _digest(data: bytes, parent: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=parent).digest()
