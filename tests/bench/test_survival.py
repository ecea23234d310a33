"""What the benchmark of streams that outlive their engine takes for a difference of two answers, and for a pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import survival
from benchmarks.survival import Run, compared, merge, whole_of
from octavo.entrypoints.anthropic.answer_blocks import MessageBuilder
from octavo.entrypoints.anthropic.messages_protocol import MessagesRequest
from octavo.entrypoints.chat.answer_reader import TextDelta
from octavo.entrypoints.chat.chat_run import AnswerPart


def message(num_prompt_tokens: int, num_cached_tokens: int) -> tuple[Any, Any]:
    """What is compared of an answer to `/v1/messages`: of its stream, and of the whole one."""
    body = MessagesRequest(model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=5)
    builder = MessageBuilder(body, "msg_1", "m")
    progress = AnswerPart(
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


def test_an_event_that_is_on_its_way_at_a_death_does_not_end_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now, run = 0.0, Run()
    monkeypatch.setattr(survival, "time", SimpleNamespace(monotonic=lambda: now))
    for stream in (1, 2, 3):
        run.note_event(stream)
    now = 10.0
    run.note_death()
    now = 10.5
    for stream in (1, 2):
        run.note_event(stream)
    del run.last_event[2]  # it has all of its answer
    now = 12.0
    run.note_return()
    now = 13.0
    run.note_event(1)
    run.note_event(4)  # its first event
    now = 14.0
    run.note_event(1)
    now = 15.0
    run.note_death()  # before stream 3 has gone on
    now = 17.0
    for stream in (1, 3, 4):
        run.note_event(stream)
    assert run.pauses_s == [{1: 2.5, 3: 5.0}, {1: 2.0, 3: 2.0, 4: 2.0}]
