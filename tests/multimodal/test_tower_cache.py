"""Rows of media are kept within a number of tokens."""

from __future__ import annotations

import numpy as np

from octavo.multimodal.tower import BroughtRows, TowerCache
from octavo.request import EMBEDDINGS, MediaArray, MediaInput


def picture(name: bytes, num_tokens: int) -> MediaInput:
    values = np.zeros((num_tokens, 2), np.float32)
    return MediaInput(name, num_tokens, (MediaArray(EMBEDDINGS, "float32", values.shape, values.tobytes()),))


def test_what_is_in_use_is_asked_only_where_room_is_short() -> None:
    """To answer takes a look at all live requests."""
    cache, asked = TowerCache(BroughtRows(1.0), 10), list[int]()
    in_use = {b"a"}

    def ask() -> set[bytes]:
        asked.append(cache.num_tokens)
        return in_use

    for name in (b"a", b"b", b"c", b"a"):
        assert cache.prepare([picture(name, 3)], ask) is not None
    assert not asked
    assert cache.prepare([picture(b"d", 4)], ask) is not None and asked == [9]
    assert [*cache._entries] == [b"c", b"a", b"d"], "the least recently used one made room"
    in_use |= {b"c", b"d"}
    assert cache.prepare([picture(b"e", 1)], ask) is None
    in_use.clear()
    assert cache.prepare([picture(b"f", 20)], ask) is not None, "without rows in use there is room for any"
    assert [*cache._entries] == [b"f"]
