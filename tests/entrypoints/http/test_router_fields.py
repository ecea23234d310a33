"""Bodies as sglang-router 0.3 and vllm-router 0.1 write them: with fields of SGLang that ask for nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.http.test_errors import error_of

ADDED = {
    "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False, "skip_special_tokens": True,
    "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False, "rid": None,
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": False, "logprobs": False}


def test_a_router_may_add_what_asks_for_nothing(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json={**CHAT, **ADDED}).status_code == 200
    chats_only = ("continue_final_message", "separate_reasoning", "stream_reasoning")
    added = {name: value for name, value in ADDED.items() if name not in chats_only}
    body = {"prompt": "Hi", "max_tokens": 3, "stream": False, "echo": False, **added}
    assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"no_stop_trim": True}, "no_stop_trim is not built yet; leave it out."),
        ({"return_hidden_states": True}, "return_hidden_states is not built yet; leave it out."),
        ({"separate_reasoning": False}, "separate_reasoning is not built yet; leave it out."),
        ({"rid": "a"}, "rid is not a field here: X-Request-Id names a request."),
        ({"regex": "a+"}, "regex is not a field here: use structured_outputs.regex."),
    ],
)
def test_what_asks_for_something_is_refused(http: httpx.Client, field: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, **field})
    assert (answer.status_code, error_of(answer)["message"]) == (400, message)
