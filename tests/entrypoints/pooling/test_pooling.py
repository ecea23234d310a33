"""Routes of models that pool, before one that generates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import numpy as np
import pytest

from octavo.entrypoints.http.streaming import STARTED_AT_ONCE, merge
from octavo.entrypoints.pooling.pooling_routes import _pool_all
from octavo.pooling.scores import similarity
from tests.entrypoints.fake_engine import FakeEngine


def test_a_model_that_generates_has_no_vectors(http: httpx.Client, engine: FakeEngine) -> None:
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/rerank", {"query": "x", "documents": ["y"]})):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "generates text and returns no vectors" in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_merged", [False, True])
def test_many_requests_of_a_body_are_sent_to_the_engine_in_several_turns_of_the_loop(is_merged: bool) -> None:
    """Of texts, and of prompts, whose generators are merged."""
    started: list[int] = []

    async def main() -> None:
        all_started = asyncio.Event()

        async def pool(number: Any) -> int:
            started.append(number)
            if len(started) == 100:
                all_started.set()
            await all_started.wait()
            return -number

        async def generate(number: int) -> AsyncGenerator[Any, None]:
            yield await pool(number)

        async def merged() -> list[int]:
            return sorted([output async for _, output in merge([generate(number) for number in range(100)])])[::-1]

        numbers: Any = range(100)
        task = asyncio.ensure_future(merged() if is_merged else _pool_all(pool, numbers))
        while not task.done():
            before = len(started)
            await asyncio.sleep(0)
            assert len(started) - before <= STARTED_AT_ONCE
        assert await task == [-number for number in numbers]

    asyncio.run(main())


def test_a_text_is_as_similar_to_itself_as_can_be_and_no_more() -> None:
    vectors = np.random.default_rng(0).standard_normal((200, 64), np.float32)
    found = [similarity(one, one) for one in vectors]
    assert max(found) == 1 and min(similarity(one, -one) for one in vectors) == -1 and min(found) > 0.999
