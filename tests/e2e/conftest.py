"""What the tests of servers share: a client of the module's own `server`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
