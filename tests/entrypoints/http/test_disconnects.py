"""Work that ends when its client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from octavo.entrypoints.http.app import build_app
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.streaming import EventSink, run_until_disconnect
from tests.entrypoints.fake_engine import FakeEngine


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

        with pytest.raises(ClientDisconnect):
            await run_until_disconnect(work(), client.receive)
        assert is_cleaned

    asyncio.run(check())


def test_a_connection_that_tells_of_its_client_is_not_asked() -> None:
    told: list[Callable[[], object] | None] = []

    class Told:
        """A connection whose client hangs up when its work waits."""

        def attach(self, sink: EventSink) -> None:
            raise AssertionError("it has no stream")

        def watch(self, on_disconnect: Callable[[], object] | None) -> None:
            told.append(on_disconnect)
            if on_disconnect is not None:
                asyncio.get_running_loop().call_soon(on_disconnect)

    async def check() -> None:
        client = Client()
        with pytest.raises(ClientDisconnect):
            await run_until_disconnect(asyncio.Event().wait(), client.receive, Told())
        assert not client.is_watched and told[-1] is None

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


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", "application/json"), ("/v1/files", "multipart/form-data; boundary=x"),
        ("/v1/audio/transcriptions", "multipart/form-data; boundary=x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("body", [b"", b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nba'])
def test_a_client_that_leaves_amid_its_body_is_no_fault_of_the_server(
    tiny_tokenizer: Path, path: str, kind: str, body: bytes
) -> None:
    app: Any = build_app(FakeEngine(tiny_tokenizer), ServerArgs(disable_log_requests=True))  # type: ignore[arg-type]
    messages = [{"type": "http.request", "body": body, "more_body": True}, {"type": "http.disconnect"}]
    headers = [(b"content-type", kind.encode()), (b"content-length", b"1000")]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "root_path": "",
        "raw_path": path.encode(), "query_string": b"", "headers": headers, "client": None, "server": None,
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    asyncio.run(app(scope, receive, send))
    assert list(app.counts._counts) == [(path, "POST", "4xx")]
