"""Clients of Azure's OpenAI service talk to a server as they are, but for the address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import openai
import pytest

from octavo.azure import read_as_openai
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.waiting import within

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url(tiny_tokenizer: Path) -> Iterator[str]:
    with serving(FakeEngine(tiny_tokenizer), api_key=["key"], root_path="/llm", disable_log_requests=True) as url:
        yield url + "/llm"


@pytest.mark.parametrize("fields", [{}, {"azure_deployment": "any name"}])
def test_the_azure_client_gets_answers(url: str, fields: dict[str, Any]) -> None:
    named: dict[str, Any] = {"azure_endpoint": url, "api_version": "2024-10-21", "max_retries": 0, **fields}
    with openai.AzureOpenAI(api_key="key", timeout=within(60), **named) as client:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in stream) == answer.choices[0].message.content
        assert client.completions.create(model=MODEL, prompt="Hello", max_tokens=4).usage is not None
        if not fields:
            assert client.responses.create(model=MODEL, input="Hello", max_output_tokens=16).id
            assert [one.id for one in client.models.list()] == [MODEL, "alias"]
        with pytest.raises(openai.NotFoundError, match="other"):
            client.chat.completions.create(model="other", messages=HELLO)
    with openai.AzureOpenAI(api_key="wrong", **named) as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=MODEL, messages=HELLO)


def test_azures_newer_address_is_that_of_openais_api(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/openai/v1/", api_key="key", timeout=within(60)) as client:
        assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4).usage is not None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/openai/deployments/a/b/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/a b/completions", "/v1/completions"),
        ("/openai/deployments/chat/embeddings", "/v1/embeddings"),
        ("/openai/deployments/a/audio/transcriptions", "/v1/audio/transcriptions"),
        ("/openai/deployments/a/../metrics", "/v1/deployments/a/../metrics"),
        ("/openai/v1/%C3%A9", "/v1/%C3%A9"),
        ("/openai/v1/models/org%2Fname", "/v1/models/org%2Fname"),
        ("/openai/deployments/org%2Fname/embeddings", "/v1/embeddings"),
        ("/openai", "/openai"),
        ("/v1/openai/v1/models", "/v1/openai/v1/models"),
    ],
)
def test_paths_of_azure(path: str, expected: str) -> None:
    sent = [(b"api-key", b"k"), (b"accept", b"*/*")]
    scope = {"path": unquote(path), "raw_path": path.encode(), "headers": sent}
    read_as_openai(scope)
    assert (scope["path"], scope["raw_path"]) == (unquote(expected), expected.encode())
    if path != expected:
        assert scope["headers"] == [(b"x-api-key", b"k"), (b"accept", b"*/*")]
    else:
        assert scope["headers"] == sent
