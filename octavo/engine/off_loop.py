"""Runs long work on requests (templates, tokenization, grammars, media) in threads, so that streams do not wait for
it."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Characters, bytes or tokens. Shorter work takes about a millisecond, and a thread would cost more than it saves.
MAX_INLINE_LENGTH = 2048
# A grammar takes seconds, in which its thread waits for another process: tokenization and other grammars must not wait
# for it.
_grammars = ThreadPoolExecutor(32, "octavo-grammar")
NUM_TEXT_THREADS = 4
_texts = ThreadPoolExecutor(NUM_TEXT_THREADS, "octavo-text")
_bodies = ThreadPoolExecutor(1, "octavo-json")  # this thread waits for the process that parses large bodies
_media = ThreadPoolExecutor(2, "octavo-media")  # the number of threads bounds how many media are decoded at once
_videos = ThreadPoolExecutor(2, "octavo-video")  # a video takes up to a minute: images must not wait for it


async def run_off_loop(
    work: Callable[[], T], *, length: int, has_grammar: bool = False, media: Collection[str] = (), is_json: bool = False
) -> T:
    """Return the result of `work` on an input of `length`. It runs in a thread if the input is long, if it makes a
    grammar, or if it decodes `media` of the given kinds. `is_json` work waits for a large JSON body.

    If the caller is cancelled, work that has begun goes on and its result is dropped.
    """
    if length <= MAX_INLINE_LENGTH and not has_grammar and not media:
        return work()
    pool = _grammars if has_grammar else _bodies if is_json else _texts
    if media:
        pool = _videos if "video" in media else _media
    return await asyncio.get_running_loop().run_in_executor(pool, work)
