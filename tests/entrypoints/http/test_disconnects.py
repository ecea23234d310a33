"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.entrypoints.http.streaming import run_until_disconnect


class Client:
    """A client that hangs up on demand. `is_watched`: whether the server has asked about it."""

    def __init__(self) -> None:
        self.is_watched = False
        self.has_gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        self.is_watched = True
        await self.has_gone.wait()
        return {"type": "http.disconnect"}


def test_a_client_is_watched_only_while_its_work_waits() -> None:
    async def check() -> None:
        client, answer = Client(), asyncio.get_running_loop().create_future()

        async def at_once() -> str:
            return "at once"

        async def later() -> str:
            await asyncio.sleep(0)
            assert client.is_watched
            answer.set_result("later")
            return str(await answer)

        assert await run_until_disconnect(at_once(), client.receive) == "at once"
        await asyncio.sleep(0)
        assert not client.is_watched
        assert await run_until_disconnect(later(), client.receive) == "later"

    asyncio.run(check())


def test_work_is_cancelled_when_its_client_hangs_up() -> None:
    async def check() -> None:
        client, is_cleaned = Client(), False

        async def work() -> None:
            nonlocal is_cleaned
            client.has_gone.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0)
                is_cleaned = True

        assert await run_until_disconnect(work(), client.receive) is None
        assert is_cleaned

    asyncio.run(check())


def test_errors_and_the_cancelling_of_others_reach_the_caller() -> None:
    async def check() -> None:
        async def refuse() -> None:
            await asyncio.sleep(0)
            raise ValueError("refused")

        with pytest.raises(ValueError, match="refused"):
            await run_until_disconnect(refuse(), Client().receive)
        task = asyncio.ensure_future(run_until_disconnect(asyncio.Event().wait(), Client().receive))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())
