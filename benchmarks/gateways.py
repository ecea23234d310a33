"""What does a gateway add to a request? `octavo gateway` beside other proxies, before one server that answers.

    python benchmarks/gateways.py [--proxies octavo,sglang-router,vllm-router,litellm] [--peers FOLDER] [--streams 64]

The server is one process that computes nothing: a chat gets a chunk every `--step-ms`. A process holds `--streams`
chats at once, each on a connection of its own that it keeps, through each proxy and without one. Printed are, for each:
the time to the first chunk and what it adds at the median and the 99th percentile, the processor time of the proxy for
a chat and for a chunk, and the chunks in a second if the server does not wait between them, with the processor time of
the proxy, the server and the client for each of these: the slowest of the three would set the speed if each had a
processor of its own. `--pin` gives the server one processor, and the proxy and the client another. `--peers` is the
environment that has the other proxies (`pip install sglang-router vllm-router 'litellm[proxy]'`); each is started with
its defaults. All want a processor: with fewer than three the times are longer than they would be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
import uvloop

MODEL = "counted"
ENVIRONMENT = os.environ | {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"counted","choices":'
    b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
OTHER_CHUNK = CHUNK.replace(b" word", b" more")
LAST = CHUNK.replace(b'{"content":" word"}', b"{}").replace(b'"finish_reason":null', b'"finish_reason":"stop"')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OTHER = b'{"object":"list","data":[{"id":"counted","object":"model","created":1,"owned_by":"a"}],"status":"ok"}'


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of a connection."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if b"/chat/completions " not in head or b'"stream":true' not in body.replace(b" ", b""):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(OTHER), OTHER))
                continue
            num_chunks, step_ms = map(int, body.partition(b"count ")[2].split(b'"')[0].split(b" "))
            writer.write(HEAD)
            for number in range(num_chunks):
                await asyncio.sleep(step_ms / 1e3)
                # LiteLLM ends a stream that says the same a hundred times.
                writer.write(chunked(CHUNK if number % 2 else OTHER_CHUNK))
                if not step_ms:
                    await writer.drain()
            writer.write(chunked(LAST + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve(listening: socket.socket) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_serve, sock=listening)
        await server.serve_forever()

    uvloop.run(run())


async def _chat(port: int, num_chats: int, num_chunks: int, step_ms: int, first_s: list[float], delay_s: float) -> None:
    """Ask for `num_chats` chats, one after the other, and note the seconds to the first chunk of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    text = b"count %d %d" % (num_chunks, step_ms)
    body = b'{"model":"counted","messages":[{"role":"user","content":"%b"}],"stream":true}' % text
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    await asyncio.sleep(delay_s)
    for _ in range(num_chats):
        begin = time.monotonic()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise SystemExit(f"the proxy answered {head!r} {await reader.read(1000)!r}")
        data = b""
        while b"data:" not in data:
            data = await reader.readuntil(b"\n")
        first_s.append(time.monotonic() - begin)
        await reader.readuntil(b"[DONE]")
        await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


def ask(port: int, num_streams: int, num_chats: int, num_chunks: int, step_ms: int, found: Any) -> None:
    async def run() -> None:
        first_s: list[float] = []
        begin, begin_processor = time.monotonic(), time.process_time()
        chat_s = num_chunks * step_ms / 1e3  # within which all streams begin, evenly
        await asyncio.gather(
            *(
                _chat(port, num_chats, num_chunks, step_ms, first_s, i * chat_s / num_streams)
                for i in range(num_streams)
            )
        )
        found.put((first_s, time.monotonic() - begin, time.process_time() - begin_processor))

    uvloop.run(run())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def command(proxy: str, port: int, server: int, peers: Path, folder: Path) -> list[str]:
    address = f"http://127.0.0.1:{server}"
    if proxy == "octavo":
        catalogue = folder / "catalogue.yaml"
        catalogue.write_text(f"models:\n  {MODEL}:\n    addresses: [{address}]\n    health: /health\n")
        return [sys.executable, "-m", "octavo.entrypoints.cli.main", "gateway", "--catalogue", str(catalogue),
                "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    if proxy == "litellm":
        config = folder / "litellm.yaml"
        config.write_text(
            f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
            f"      api_base: {address}/v1\n      api_key: none\n"
        )
        return [str(peers / "bin/litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    launch = ["launch"] if proxy == "sglang-router" else []
    return [
        str(peers / "bin" / proxy),
        *launch,
        "--prometheus-port",
        str(free_port()),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--worker-urls",
        address,
    ]


@contextlib.contextmanager
def started(proxy: str, server: int, peers: Path, folder: Path) -> Iterator[tuple[int, psutil.Process | None]]:
    """Start a proxy, and yield its port and its process when it answers chats."""
    if proxy == "none":
        yield server, None
        return
    port = free_port()
    args = command(proxy, port, server, peers, folder)
    with (folder / f"{proxy}.log").open("wb") as log:
        process = subprocess.Popen(args, stdout=log, stderr=log, start_new_session=True, env=ENVIRONMENT)
    try:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                found: multiprocessing.Queue[Any] = multiprocessing.Queue()
                child = multiprocessing.Process(target=ask, args=(port, 1, 1, 1, 1, found))
                child.start()
                child.join()
                if child.exitcode == 0:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{proxy} does not answer:\n{(folder / f'{proxy}.log').read_text()[-2000:]}")
            time.sleep(1)
        yield port, psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def processor_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def measure(
    port: int, num_streams: int, num_chats: int, num_chunks: int, step_ms: int
) -> tuple[list[float], float, float]:
    """Return the seconds to each chat's first chunk, those of all chats, and the client's seconds of a processor."""
    found: multiprocessing.Queue[Any] = multiprocessing.Queue()
    child = multiprocessing.Process(target=ask, args=(port, num_streams, num_chats, num_chunks, step_ms, found))
    child.start()
    while child.is_alive() and found.empty():
        time.sleep(0.05)
    if found.empty():
        raise SystemExit("a chat failed")
    result: tuple[list[float], float, float] = found.get()
    child.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxies", default="octavo,sglang-router,vllm-router,litellm")
    parser.add_argument("--peers", type=Path, default=Path(sys.prefix))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chats", type=int, default=20, help="chats of each stream, one after the other")
    parser.add_argument("--chunks", type=int, default=50, help="chunks of a chat")
    parser.add_argument("--step-ms", type=int, default=20)
    parser.add_argument("--pin", action="store_true", help="the server on one processor, the others on another")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server_port = int(listening.getsockname()[1])
    server = multiprocessing.Process(target=serve, args=(listening,), daemon=True)
    server.start()
    if args.pin:
        first, second, *_ = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(server.pid or 0, {first})
        os.sched_setaffinity(0, {second})  # and of the processes that are started from now on
    print(
        "| | first chunk, ms (p50, p99) | added, ms | processor: ms a chat | µs a chunk | chunks/s, no waits | "
        "processor: µs a chunk of proxy, server, client |\n|---|---|---|---|---|---|---|"
    )
    plain: list[float] = []
    for proxy in ("none", *args.proxies.split(",")):
        with started(proxy, server_port, args.peers, folder) as (port, process):
            measure(port, args.streams, 2, 4, 1)  # connections, caches
            begin = processor_s(process)
            first_s, *_ = measure(port, args.streams, args.chats, args.chunks, args.step_ms)
            long_s = processor_s(process) - begin
            begin = processor_s(process)
            measure(port, args.streams, args.chats, 1, args.step_ms)
            short_s = processor_s(process) - begin
            begin, server_begin = processor_s(process), processor_s(psutil.Process(server.pid))
            _, whole_s, client_s = measure(port, args.streams, 2, 1000, 0)
            costs_s = processor_s(process) - begin, processor_s(psutil.Process(server.pid)) - server_begin, client_s
        num_chats = args.streams * args.chats
        points = [median(first_s) * 1e3, quantiles(first_s, n=100)[98] * 1e3]
        plain = plain or points
        added = ", ".join(f"{point - other:.2f}" for point, other in zip(points, plain, strict=True))
        per_chunk_us = (long_s - short_s) / (num_chats * (args.chunks - 1)) * 1e6
        print(
            f"| {proxy} | {points[0]:.2f}, {points[1]:.2f} | {added} | {short_s / num_chats * 1e3:.2f} | "
            f"{per_chunk_us:.1f} | {args.streams * 2000 / whole_s:,.0f} | "
            + ", ".join(f"{cost_s / (args.streams * 2000) * 1e6:.1f}" for cost_s in costs_s)
            + " |",
            flush=True,
        )
    server.terminate()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
