"""What a request leaves behind: nothing that only a full collection finds, as one stops all streams for long."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import httpx
import pytest

from octavo.entrypoints.http.router import validate_body
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError
from tests.entrypoints.fake_engine import Address, FakeEngine
from tests.garbage import counted_garbage
from tests.waiting import wait_until, within

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2, "logprobs": True, "tools": TOOLS}),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    ("/v1/completions", {"prompt": "a", "logprobs": 1}),
    ("/v1/responses", {"input": "Hi", "stream": True, "store": False}),
    ("/v1/messages", {**CHAT, "max_tokens": 5, "stream": True}),
]


def test_requests_and_their_connections_leave_no_cycles(address: Address, engine: FakeEngine) -> None:
    def ask() -> None:
        for path, body in ASKED:
            with httpx.Client(base_url=str(address), timeout=within(60)) as http:
                assert http.post(path, json=body).status_code == 200

    num_connections = address.num_connections
    ask()  # the first requests import modules and fill caches
    wait_until(lambda: address.num_connections <= num_connections)
    with counted_garbage("octavo.entrypoints", "uvicorn") as left:
        ask()
        wait_until(lambda: address.num_connections <= num_connections and not address.num_in_flight)
    assert not left


@pytest.mark.parametrize("wrong", [{"tool_choice": "required"}, {"temperature": "x"}])
def test_a_body_that_is_refused_is_freed(wrong: dict[str, Any]) -> None:
    class Body(dict[str, Any]):
        pass

    def refused() -> weakref.ref[Body]:
        body = Body({**CHAT, **wrong})
        with suppress(RequestError):
            validate_body(body, ChatCompletionRequest, "error")
            pytest.fail("the body was taken")
        return weakref.ref(body)

    left = refused()
    gc.collect()
    assert left() is None
