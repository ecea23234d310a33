"""Servers that stand for replicas, and a gateway in front of them, all in the event loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx

from octavo.engine.prompt_notes import PromptNotes
from octavo.gateway.catalogue import Catalogue, ModelEntry, read_catalogue
from octavo.gateway.models import FindLocal
from octavo.gateway.proxy_request import PROMPT_NAMES
from octavo.gateway.replica import NOTES_PATH
from octavo.gateway.serve_process import StartError
from octavo.gateway.server import GatewayArgs, GatewayServer, bind
from tests import waiting


async def until(condition: Callable[[], object]) -> None:
    """`waiting.until`, in steps of time that suit a test in which minutes pass."""
    await waiting.until(condition, every_s=0.1)


@dataclass
class Asked:
    """A request that a fake server got, and the way to answer it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def head(self, status: int = 200, **headers: str) -> None:
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode())

    def reply(self, body: bytes, status: int = 200, content_type: str = "application/json", **headers: str) -> None:
        self.head(status, content_type=content_type, content_length=str(len(body)), **headers)
        self.writer.write(body)

    def begin_stream(self) -> None:
        self.head(content_type="text/event-stream", transfer_encoding="chunked")

    def piece(self, data: bytes) -> None:
        """One chunk; an empty one ends the stream."""
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def die(self) -> None:
        self.writer.transport.abort()  # type: ignore[attr-defined]


Behave = Callable[[Asked], Awaitable[None]]


async def answer_plainly(asked: Asked) -> None:
    asked.reply(b'{"id": "chatcmpl-1", "choices": []}')


async def be_silent(asked: Asked) -> None:
    await asked.reader.read()


async def be_busy(asked: Asked) -> None:
    asked.reply(b"{}", 429, retry_after="7")


@dataclass
class FakeServer:
    """Health checks are answered with `health`; `behave` answers the others, which are kept in `asked`."""

    behave: Behave = answer_plainly
    health: int = 200
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    num_hung_up: int = 0
    num_checks: int = 0  # of its health
    api_key: str | None = None
    address: str = ""
    is_stopped: bool = False
    hangs: bool = False  # takes connections and answers none
    notes: PromptNotes | None = None  # of gateways
    num_notes_read: int = 0  # times
    adapters: dict[str, bool] = field(default_factory=dict)  # and whether each is on the device
    cache_tokens: int = 0  # that its cache holds
    health_after_s: float = 0.0

    async def start(self) -> FakeServer:
        """Listen at the address, or without one at any port."""
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        port = int(self.address.rpartition(":")[2] or 0)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._writers: list[asyncio.StreamWriter] = []
        return self

    async def stop(self) -> None:
        self.is_stopped = True
        self.die()

    def kill(self) -> None:
        self.die()

    def die(self) -> None:
        """As a process does that is killed."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()  # type: ignore[attr-defined]
        if not self.exited.done():
            self.exited.set_result(None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
                method, target, _ = first.split(" ")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(method, target, headers, body, writer, reader)
                if self.hangs:
                    await reader.read()
                    return
                if target == "/health":
                    self.num_checks += 1
                    await waiting.virtual_sleep(self.health_after_s)
                    asked.reply(b"", self.health)
                    continue
                if target.startswith(NOTES_PATH):
                    self.num_notes_read += 1
                    place = dict(parse_qsl(urlsplit(target).query, keep_blank_values=True))
                    if self.notes is None:
                        asked.reply(b"{}", 404, connection="close")  # tests expect that requests come first
                        break
                    told = self.notes.read(place["id"], int(place["after"]))
                    told |= {"adapters": self.adapters, "cache_tokens": self.cache_tokens}
                    asked.reply(json.dumps(told).encode())
                    continue
                if self.notes is not None and (names := headers.get(PROMPT_NAMES.decode())):
                    self.notes.add(names)
                self.asked.append(asked)
                await self.behave(asked)
        self.num_hung_up += 1
        writer.close()


class FakeLaunch:
    """Starts fake servers in the place of `octavo serve`. A start waits for `may_start`, and fails with
    `error` if there is one."""

    def __init__(self, behave: Behave = answer_plainly) -> None:
        self.behave = behave
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.error: str | None = None
        self.may_pass = True  # the error
        self.begun: list[str] = []
        self.servers: dict[str, list[FakeServer]] = {}

    async def __call__(self, name: str, entry: ModelEntry) -> FakeServer:
        self.begun.append(name)
        await self.may_start.wait()
        if self.error is not None:
            raise StartError(self.error, may_pass=self.may_pass)
        server = await FakeServer(self.behave).start()
        self.servers.setdefault(name, []).append(server)
        return server

    def running(self, name: str) -> int:
        return sum(not server.exited.done() for server in self.servers.get(name, []))

    def last(self, name: str) -> FakeServer:
        return self.servers[name][-1]


@dataclass
class Gateway:
    """A running gateway and a client of it."""

    server: GatewayServer
    http: httpx.AsyncClient
    launch: FakeLaunch
    admin_url: str = ""

    async def ask(self, model: str | None = "a", path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        body = fields if model is None else {"model": model, **fields}
        return await self.http.post(path, json=body)

    def deployment(self, name: str) -> Any:
        return self.server.models.find(name)

    async def metric(self, sample: str, http: httpx.AsyncClient | None = None) -> float:
        for line in (await (http or self.http).get("/metrics")).text.splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.asynccontextmanager
async def gateway(
    catalogue: dict[str, Any] | str, launch: FakeLaunch | None = None, find_local: FindLocal | None = None, **args: Any
) -> AsyncIterator[Gateway]:
    """A gateway of these models, of a file, or of what `find_local` finds."""
    import msgspec

    launch = launch or FakeLaunch()
    if isinstance(catalogue, str):
        args["catalogue"], found = catalogue, read_catalogue(catalogue)
    else:
        found = msgspec.convert({"models": catalogue}, Catalogue) if find_local is None else Catalogue(find_local())
    with bind("127.0.0.1", 0) as sock, bind("127.0.0.1", 0) as admin_sock:
        has_admin = "keys" in args
        server = GatewayServer(GatewayArgs(**args), found, launch, find_local, admin_sock if has_admin else None)
        serving = asyncio.ensure_future(server.serve([sock]))
        await until(lambda: server.started)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=None) as http:
                yield Gateway(server, http, launch, f"http://127.0.0.1:{admin_sock.getsockname()[1]}")
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def fake_servers(*behaves: Behave) -> AsyncIterator[list[FakeServer]]:
    servers = [await FakeServer(behave).start() for behave in behaves]
    try:
        yield servers
    finally:
        for server in servers:
            server.die()
