"""What the benchmark of streams that outlive their engine takes for a difference of two answers."""

from __future__ import annotations

from typing import Any

from benchmarks.survival import compared, merge, whole_of
from octavo.entrypoints.anthropic.answer_blocks import MessageBuilder
from octavo.entrypoints.anthropic.messages_protocol import MessagesRequest
from octavo.entrypoints.chat.answer_reader import TextDelta
from octavo.entrypoints.chat.chat_run import Progress


def message(num_prompt_tokens: int, num_cached_tokens: int) -> tuple[Any, Any]:
    """What is compared of an answer to `/v1/messages`: of its stream, and of the whole one."""
    body = MessagesRequest(model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=5)
    builder = MessageBuilder(body, "msg_1", "m")
    progress = Progress(
        deltas=[TextDelta("Hello")], token_ids=[1], logprobs=None, finish_reason="stop", stop_reason=None,
        num_prompt_tokens=num_prompt_tokens, num_cached_tokens=num_cached_tokens, num_tokens=1, num_reasoning_tokens=0,
    )  # fmt: skip
    return whole_of(builder.add(progress)), compared(builder.message)


def test_how_much_of_a_prompt_was_cached_is_no_difference() -> None:
    expected = message(num_prompt_tokens=43, num_cached_tokens=0)
    assert message(num_prompt_tokens=43, num_cached_tokens=32) == expected
    other = message(num_prompt_tokens=44, num_cached_tokens=0)
    assert all(one != same for one, same in zip(other, expected, strict=True))


def test_a_token_with_the_text_index_is_no_index() -> None:
    whole = merge({"top_logprobs": [{"a": -1.0}]}, {"top_logprobs": [{"index": -0.5}]})
    assert whole == {"top_logprobs": [{"a": -1.0}, {"index": -0.5}]}
