"""Work on requests' texts (templates, tokens, grammars) beside the event loop, which streams must not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Characters, bytes or tokens. Less takes about a millisecond, and a thread would cost more than it saves.
MAX_INLINE_LENGTH = 2048
_grammars = ThreadPoolExecutor(4, "octavo-grammar")  # they take seconds, and tokenization must not wait for them
_texts = ThreadPoolExecutor(4, "octavo-text")


async def run_off_loop(work: Callable[[], T], *, length: int, has_grammar: bool = False) -> T:
    """The result of `work` on something of `length`; in a thread if that is long, or if `work` makes a grammar.

    Cancelled, a `work` that runs already goes on, and its result is dropped.
    """
    if length <= MAX_INLINE_LENGTH and not has_grammar:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_grammars if has_grammar else _texts, work)
