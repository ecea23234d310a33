"""Routes of models that pool, before one that generates."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from octavo.entrypoints.pooling.pooling_routes import _STARTED_AT_ONCE, _pooled
from tests.entrypoints.fake_engine import FakeEngine


def test_a_model_that_generates_has_no_vectors(http: httpx.Client, engine: FakeEngine) -> None:
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/rerank", {"query": "x", "documents": ["y"]})):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "generates text and has no vectors" in answer.json()["error"]["message"]


def test_many_texts_are_sent_to_the_engine_in_several_turns_of_the_loop() -> None:
    started: list[int] = []

    async def main() -> None:
        all_started = asyncio.Event()

        async def pool(number: Any) -> int:
            started.append(number)
            if len(started) == 100:
                all_started.set()
            await all_started.wait()
            return -number

        numbers: Any = range(100)
        task = asyncio.ensure_future(_pooled(pool, numbers))
        while not task.done():
            before = len(started)
            await asyncio.sleep(0)
            assert len(started) - before <= _STARTED_AT_ONCE
        assert await task == [-number for number in numbers]

    asyncio.run(main())
