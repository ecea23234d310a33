"""Large answers are written off the event loop, some values at a time."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import httpx
import pytest
from pydantic_core import to_json

from octavo.entrypoints.http import piecewise_json
from octavo.entrypoints.http.piecewise_json import MAX_PIECE_VALUES, encode_in_pieces, is_large
from octavo.entrypoints.openai.logprobs_format import LogprobsFormatter
from octavo.entrypoints.openai.response_bodies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    PromptLogprob,
    Usage,
)
from tests.entrypoints.fake_engine import FakeEngine


def response(num_tokens: int, num_top: int) -> ChatCompletionResponse:
    top = [ChatTopLogprob(token="ü", logprob=-0.5, bytes=[195, 188]) for _ in range(num_top)]
    tokens = [ChatTokenLogprob(token="a", logprob=-1e-7, bytes=[97], top_logprobs=top) for _ in range(num_tokens)]
    choice = ChatChoice(
        index=0, message=AssistantMessage(role="assistant", content="a"), logprobs=ChatLogprobs(content=tokens),
        finish_reason="stop",
    )  # fmt: skip
    positions = [None, *({i: PromptLogprob(logprob=-1.0, rank=1, decoded_token='"')} for i in range(num_tokens))]
    return ChatCompletionResponse(
        id="x", created=1, model="m", system_fingerprint="f", choices=[choice], usage=Usage(),
        prompt_logprobs=positions, prompt_token_ids=list(range(num_tokens)),
    )  # fmt: skip


VALUES = [
    response(3, 2),
    response(1500, 3),
    response(2, 1500),
    {"data": [{"embedding": [0.1] * 4096, "nan": float("nan")} for _ in range(3)], "rows": [[1.5] * 700] * 9},
    [[]] * 5000,
    {str(i): i for i in range(5000)},
    "x" * 10_000,
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_pieces_are_the_whole_and_no_call_writes_much(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = to_json(value, inf_nan_mode="null")

    def write(one: Any, **options: Any) -> bytes:
        assert not is_large(one)
        return to_json(one, **options)

    monkeypatch.setattr(piecewise_json, "to_json", write)
    assert json.loads(encode_in_pieces(value)) == json.loads(whole)


def test_large_is_what_has_many_values_however_they_lie() -> None:
    rng = random.Random(2)
    for num_values in (MAX_PIECE_VALUES - 1, MAX_PIECE_VALUES, MAX_PIECE_VALUES + 1, 3 * MAX_PIECE_VALUES):
        value: Any = 0
        left = num_values - 1
        while left:
            many = min(rng.randint(1, 9), left)
            others = [0] * (many - 1)
            value = [value, *others] if rng.random() < 0.5 else {"v": value, **{str(i): 0 for i in range(many - 1)}}
            left -= many
        assert is_large(value) == (num_values > MAX_PIECE_VALUES), num_values


CHAT = {"messages": [{"role": "user", "content": "x" * 300}]}
PROMPT = {"prompt": "x" * 300}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 20}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20}),
        ("/v1/completions", {**PROMPT, "prompt_logprobs": 20, "max_tokens": 2}),
        ("/v1/completions", {**PROMPT, "echo": True, "logprobs": 20, "max_tokens": 2}),
        ("/v1/completions", {**PROMPT, "echo": True, "logprobs": 20, "max_tokens": 2, "stream": True}),
        ("/v1/completions", {**PROMPT, "logprobs": 20, "max_tokens": 200}),
    ],
)
def test_the_event_loop_makes_and_writes_few_log_probabilities(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    engine.answer = "x" * 180
    num_here = 0

    def count(name: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal num_here
            num_here += not threading.current_thread().name.startswith("octavo-text")
            return function(*args, **options)

        return counted

    for name in ("_plain_text", "_text"):
        monkeypatch.setattr(LogprobsFormatter, name, count(name, getattr(LogprobsFormatter, name)))
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    assert num_here <= 300, "those of the last tokens of a stream, not those of the prompt"
    assert answer.text.count("-0.5") >= 180
