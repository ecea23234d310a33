"""What a request leaves behind: nothing that only a full collection finds, as one stops all streams for long."""

from __future__ import annotations

from typing import Any

import httpx

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
