"""Submits as much of a conversation as the model has room for: truncation "auto" of chats and Responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from octavo.entrypoints.chat.chat_run import ChatAnswers
from octavo.errors import RequestError

T = TypeVar("T")


async def submit_last_turns(
    messages: Sequence[T], roles: Sequence[str], submit: Callable[[Sequence[T], bool], Awaitable[ChatAnswers]]
) -> ChatAnswers:
    """Submit a conversation, leave out as few of its oldest turns as needed, and return the result of `submit`. The
    first system messages and the last turn stay. `submit` takes the messages, and whether they are only a trial, whose
    answers are not read. Raises the `RequestError` of the last turn if even that is too long."""
    num_fixed = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    turns = [i for i, role in enumerate(roles) if i > num_fixed and role == "user"]

    def kept(first: int) -> Sequence[T]:
        return [*messages[:num_fixed], *messages[first:]]

    try:
        return await submit(messages, False)
    except RequestError as error:
        if error.code != "context_length_exceeded" or not turns:
            raise
    low, high = 0, len(turns) - 1  # the fewest turns to leave out are found by bisection
    while low < high:
        middle = (low + high) // 2
        try:
            tried = await submit(kept(turns[middle]), True)
            await tried.outputs.aclose()
            high = middle
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
    return await submit(kept(turns[low]), False)
