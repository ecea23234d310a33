"""Work on what requests bring (templates, tokens, grammars, pictures) beside the event loop, which streams must not
wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Characters, bytes or tokens. Less takes about a millisecond, and a thread would cost more than it saves.
MAX_INLINE_LENGTH = 2048
_grammars = ThreadPoolExecutor(4, "octavo-grammar")  # they take seconds, and tokenization must not wait for them
_texts = ThreadPoolExecutor(4, "octavo-text")
_media = ThreadPoolExecutor(2, "octavo-media")  # which bounds the pictures that are being decoded at once
_videos = ThreadPoolExecutor(2, "octavo-video")  # which may take a minute each, and pictures must not wait for them


async def run_off_loop(
    work: Callable[[], T], *, length: int, has_grammar: bool = False, media: Collection[str] = ()
) -> T:
    """The result of `work` on something of `length`; in a thread if that is long, or if `work` makes a grammar or has
    `media` of these kinds to decode.

    Cancelled, a `work` that runs already goes on, and its result is dropped.
    """
    if length <= MAX_INLINE_LENGTH and not has_grammar and not media:
        return work()
    pool = _videos if "video" in media else _media if media else _grammars if has_grammar else _texts
    return await asyncio.get_running_loop().run_in_executor(pool, work)
