"""Do hostile connections without a key disturb chats? Thousands of six kinds, beside streams that are watched.

    python benchmarks/connections.py [--minutes 10] [--connections 10000] [--streams 64]

The server is real and its engine core is `front_end.py`'s, which only counts: it gives each watched chat a token every
20 ms, or so rarely that `--minutes` of them fit the model's context. A process reads the chats and notes the times
between their tokens, and asks for a new chat each second. Another process holds the hostile connections, in equal
parts: without a head, with a head that comes byte by byte, with a body that does not come, with endless trailers, with
answers that nobody reads, and with fifty requests at once. What the server cuts or refuses is opened again. All three
processes want a processor: with fewer than three the attack takes its time from the server, and the chats take longer
than `--minutes`. Printed are the chats that failed, the longest waits between tokens, how new chats fared, and the
memory of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import multiprocessing
import re
import select
import selectors
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import front_end
from benchmarks.front_end import CountingCore, in_process
from octavo.config import AsyncEngineArgs
from octavo.engine.async_engine import AsyncLLMEngine
from octavo.entrypoints.chat.chat_template import compile_chat_template
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.uvicorn_server import HttpServer
from octavo.metrics.prometheus import EngineMetrics
from octavo.processes import allow_files, collect_rarely

STEP_S = 0.02
PROMPT_TOKENS = 256  # more than a chat's prompt has
KEY = "watched"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
# What each kind sends at once, what it sends each second afterwards, and whether it reads.
KINDS: dict[str, tuple[bytes, bytes, bool]] = {
    "no head": (b"", b"", True),
    "slow head": (b"GET /health HTTP/1.1\r\nX: ", b"a", True),
    "unread body": (POST + b"Content-Length: 1000000\r\n\r\n", b"", True),
    "trailers": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X: " + b"a" * 1000 + b"\r\n", True),
    "stopped reader": (GET * 5, b"", False),
    "pipelining": (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 50, b"", True),
}
HAS_TOKEN = re.compile(rb'"content":"[^"]')
OPENED_PER_S = 500  # hostile connections; to open them costs the server time too
NEW_CHAT_S = 10.0  # after which a new chat counts as refused


def chat(num_tokens: int, number: int) -> bytes:
    return front_end.chat(num_tokens, number).replace(
        b"Host: a\r\n", f"Host: a\r\nAuthorization: Bearer {KEY}\r\n".encode()
    )


class Attack:
    """The hostile connections, by file descriptor."""

    def __init__(self, port: int, num_of_each: int) -> None:
        self.port, self.num_of_each = port, num_of_each
        self.epoll = select.epoll()
        self.kinds = list(KINDS)  # the one that was opened last comes last
        self.held: dict[int, tuple[socket.socket, str]] = {}
        self.unsent: dict[int, bytes] = {}
        self.num_held, self.most_held, self.num_cut = (collections.Counter[str]() for _ in range(3))

    def open(self, most: int) -> None:
        """Open `most` of the connections that are missing."""
        for _ in range(most):
            # In turn: a kind that the server cuts at once would otherwise be the only one that is opened.
            kind = next((kind for kind in self.kinds if self.num_held[kind] < self.num_of_each), None)
            if kind is None:
                break
            self.kinds.remove(kind)
            self.kinds.append(kind)
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", self.port))
            self.held[sock.fileno()] = sock, kind
            self.unsent[sock.fileno()] = KINDS[kind][0]
            self.num_held[kind] += 1
            self.most_held[kind] = max(self.most_held[kind], self.num_held[kind])
            self.epoll.register(sock.fileno(), select.EPOLLOUT)

    def turn(self) -> None:
        for fd, events in self.epoll.poll(0.02):
            sock, kind = self.held[fd]
            try:
                if events & select.EPOLLOUT:
                    self.send(fd)
                elif not (events & select.EPOLLIN and sock.recv(1 << 16)):
                    raise ConnectionError
            except BlockingIOError:
                pass
            except OSError:
                self.epoll.unregister(fd)
                sock.close()
                del self.held[fd], self.unsent[fd]
                self.num_held[kind] -= 1
                self.num_cut[kind] += 1

    def send(self, fd: int) -> None:
        sock, kind = self.held[fd]
        if self.unsent[fd]:
            self.unsent[fd] = self.unsent[fd][sock.send(self.unsent[fd]) :]
        reads = select.EPOLLIN if KINDS[kind][2] else 0  # without, only the end of a connection is reported
        self.epoll.modify(fd, select.EPOLLOUT if self.unsent[fd] else reads)

    def drip(self) -> None:
        """Let each connection send what its kind sends each second."""
        for fd, (_, kind) in self.held.items():
            if KINDS[kind][1] and not self.unsent[fd]:
                self.unsent[fd] = KINDS[kind][1]
                self.epoll.modify(fd, select.EPOLLOUT)


def attack(port: int, num_connections: int, stop: Any, found: Any) -> None:
    """Hold the hostile connections until `stop`. Put a line about each kind into `found`."""
    allow_files()
    hostile, turn, second = Attack(port, num_connections // len(KINDS)), time.monotonic(), time.monotonic()
    while not stop.is_set():
        if (most := int(OPENED_PER_S * (time.monotonic() - turn))) > 0:
            hostile.open(min(most, OPENED_PER_S))
            turn = time.monotonic()
        hostile.turn()
        if time.monotonic() > second + 1:
            hostile.drip()
            second = time.monotonic()
    for kind in KINDS:
        found.put(f"{kind}: {hostile.most_held[kind]} at once, {hostile.num_cut[kind]} ended by the server")


def step(new: socket.socket, selector: selectors.BaseSelector) -> bytes:
    """Send a new chat once its socket is connected; return what has come of its answer."""
    try:
        if selector.get_key(new).events == selectors.EVENT_WRITE:
            new.sendall(chat(1, 0))
            selector.modify(new, selectors.EVENT_READ, None)
            return b""
        return new.recv(1 << 16) or b"HTTP/1.1 5"
    except OSError:
        return b"HTTP/1.1 5"


def watch(port: int, num_streams: int, num_tokens: int, started: Any, found: Any) -> None:
    """Read the chats to their ends, and ask for a new one each second. Put lines about both into `found`."""
    selector = selectors.DefaultSelector()
    for number in range(num_streams):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(chat(num_tokens, number))
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ, number)
    last, ends = [0.0] * num_streams, [b""] * num_streams
    waits: list[float] = []
    num_failed, num_new, num_refused, slowest_new = 0, 0, 0, 0.0
    new, answer, begin = None, b"", time.monotonic()
    while selector.get_map():
        for key, _ in selector.select(0.5):
            if key.data is None:
                if new is not None:
                    answer += step(new, selector)
                continue
            try:
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            except ConnectionError:
                data = b""
            now = time.monotonic()
            if last[key.data]:
                waits.append(now - last[key.data])
            if min(last) > 0 and not started.is_set():
                started.set()
            if last[key.data] or HAS_TOKEN.search(data):  # before that the core waits for all chats
                last[key.data] = now
            ends[key.data] = (ends[key.data] + data)[-8:]
            if not data or ends[key.data].endswith(b"\r\n0\r\n\r\n"):
                num_failed += not data or b'"error"' in data
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        if new is not None and (
            b'"content":' in answer or b"HTTP/1.1 5" in answer or time.monotonic() > begin + NEW_CHAT_S
        ):
            num_refused += b'"content":' not in answer
            slowest_new = max(slowest_new, time.monotonic() - begin)
            selector.unregister(new)
            new.close()
            new = None
        if started.is_set() and new is None and time.monotonic() > begin + 1:
            new, answer, begin = socket.socket(), b"", time.monotonic()
            num_new += 1
            new.setblocking(False)
            new.connect_ex(("127.0.0.1", port))
            selector.register(new, selectors.EVENT_WRITE, None)
    waits.sort()
    found.put(
        f"{num_streams} chats: {num_failed} failed; between tokens p99 {1000 * waits[len(waits) * 99 // 100]:.0f} ms, "
        f"most {1000 * waits[-1]:.0f} ms"
    )
    found.put(f"{num_new} new chats: {num_refused} refused; a first token after {1000 * slowest_new:.0f} ms at most")


async def run(args: argparse.Namespace, folder: Path) -> None:
    config = AsyncEngineArgs(max_num_seqs=2048).create_engine_config()
    metrics = EngineMetrics(config.model.served_model_names[0], config.model.max_model_len)
    (folder / "aborts").touch()
    step_s = max(STEP_S, 60 * args.minutes / (config.model.max_model_len - PROMPT_TOKENS))
    engine = AsyncLLMEngine(config, metrics=metrics, core=CountingCore(step_s, folder / "aborts"))
    compile_chat_template(engine.tokenizer)
    server = HttpServer(engine, ServerArgs(disable_log_requests=True, api_key=[KEY]))
    context = multiprocessing.get_context("spawn")
    stop, started, found = context.Event(), context.Event(), context.Queue()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as sock:
        serving = asyncio.ensure_future(server.serve([sock]))
        await engine.wait_ready()
        collect_rarely()
        port = sock.getsockname()[1]
        num_tokens = int(60 * args.minutes / step_s)
        watching = asyncio.ensure_future(in_process(watch, port, args.streams, num_tokens, started, found))
        while not started.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        before = most = psutil.Process().memory_info().rss
        attacking = asyncio.ensure_future(in_process(attack, port, args.connections, stop, found))
        while not watching.done():
            most = max(most, psutil.Process().memory_info().rss)
            await asyncio.sleep(0.1)
        stop.set()
        await asyncio.gather(watching, attacking)
        server.should_exit = True
        await serving
    while not found.empty():
        print(found.get())
    print(f"memory of the server: {before >> 20} MiB before, {most >> 20} MiB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=64)
    args = parser.parse_args()
    allow_files()
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(run(args, Path(folder)))


if __name__ == "__main__":
    main()
