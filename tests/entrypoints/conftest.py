"""One fake engine behind one real HTTP server for all tests of the routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import within


@pytest.fixture(scope="session")
def shared_engine(tiny_tokenizer: Path) -> FakeEngine:
    return FakeEngine(tiny_tokenizer)


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    shared_engine.reset()
    return shared_engine


@pytest.fixture(scope="session")
def address(shared_engine: FakeEngine) -> Iterator[str]:
    with serving(shared_engine, disable_log_requests=True) as url:
        yield url


@pytest.fixture(scope="session")
def shared_http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=within(60)) as client:
        yield client


@pytest.fixture
def http(shared_http: httpx.Client, engine: FakeEngine) -> httpx.Client:
    return shared_http


@pytest.fixture
def client(address: str, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0, timeout=within(60)) as client:
        yield client
