"""What the front end costs: a real HTTP server in this process, whose engine core is a process that only counts.

    python benchmarks/front_end.py [--streams 64 1024] [--tokens 200]     # µs a token, ms a chat
    python benchmarks/front_end.py --streams 1024 --step-ms 4 --probe     # and how fast it answers meanwhile
    python benchmarks/front_end.py --streams 256 --front-ends 1 2 4       # several that share an engine

The core gives every chat a token a step. A process of its own sends the chats, all at once, and reads their streams.
Printed is processor time of this process: for a chat, from its connection to the core, and for a token, from the core's
message to `send` ("to send": bodies of streams are written nowhere), and with the sends. `--probe` asks for /health,
sends chats of one token and hangs up on others meanwhile, and prints percentiles of what each takes.

`--front-ends` starts servers of `--api-server-count`, has the core step as fast as it can, and prints tokens a second
and the processor time that a token takes in each kind of process. Front ends share theirs: where there are processors
enough, the slowest process decides.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo import http_protocol
from octavo.config import AsyncEngineArgs
from octavo.engine.async_engine import AsyncLLMEngine, EngineHooks
from octavo.engine.core_client import CoreClient, CoreProcess
from octavo.engine.engine_hub import EngineHub
from octavo.engine.wire import (
    Abort,
    CoreProcessArgs,
    FrontendMessage,
    Ready,
    StepOutputs,
    decode_frontend_message,
    encode_message,
    is_readable,
)
from octavo.entrypoints.chat.chat_template import compile_chat_template
from octavo.entrypoints.http.front_ends import FrontEnds, one_store, share_port
from octavo.entrypoints.http.server import _bind
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.uvicorn_server import HttpServer
from octavo.metrics.prometheus import EngineMetrics
from octavo.processes import allow_files, collect_rarely
from octavo.request import EngineRequest, SequenceOutput
from octavo.stats import EngineStats

QUIET_MS = 1000  # without a new request, after which the core begins its steps
EDGE_STEPS = 5  # at the beginning and the end, which are not counted
WORDS = range(1000, 3000)  # token ids of the answers


class CountingCore(CoreProcess):
    """Runs `count` in a process."""

    def __init__(self, step_s: float, aborts: Path) -> None:
        command = [sys.executable, __file__, "--core", str(step_s), str(aborts)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=dict(os.environ))


def count(step_s: float, aborts: Path) -> None:
    """Be the engine core. The time of each abort is a line of the file `aborts`."""
    gc.freeze()  # as the engine core does: a collection of the imported objects would stop all streams for 25 ms
    args = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoreProcessArgs)
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.connect(args.input_address)
    sender.setsockopt(zmq.SNDHWM, 0)
    sender.connect(args.output_address)
    sender.send(encode_message(Ready(args.config.model.max_model_len, 1 << 20, 0, 16, 0, 0, {})))
    left: dict[str, int] = {}  # tokens, by request
    num_steps = 0
    while True:
        while receiver.poll(QUIET_MS if left else None):  # until all chats are there
            _take(receiver, left, aborts)
        due = time.monotonic()
        while left:
            while is_readable(receiver):
                _take(receiver, left, aborts)
            outputs, now = [], time.monotonic()
            for i, name in enumerate(list(left)):
                left[name] -= 1
                reason = None if left[name] else "length"
                token = WORDS[(num_steps + 7 * i) % len(WORDS)]
                outputs.append(SequenceOutput(name, 0, [token], reason, first_scheduled_time=now))
                if reason:
                    del left[name]
            sender.send(encode_message(StepOutputs(outputs, EngineStats(num_running=len(left)))))
            num_steps += 1
            due = max(due + step_s, time.monotonic())
            while (rest_ms := 1000 * (due - time.monotonic())) > 0:
                if receiver.poll(rest_ms):
                    _take(receiver, left, aborts)


def _take(receiver: zmq.Socket[bytes], left: dict[str, int], aborts: Path) -> None:
    match decode_frontend_message(receiver.recv()):
        case EngineRequest() as request:
            left[request.request_id] = request.max_tokens
        case Abort(request_id) if left.pop(request_id, None) is not None:
            with aborts.open("a") as file:
                file.write(f"{time.monotonic()}\n")


def chat(num_tokens: int, number: int) -> bytes:
    body = json.dumps(
        {
            "model": "", "stream": True, "max_tokens": num_tokens, "ignore_eos": True,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": f"Tell me story number {number}, please."},
            ],
        }
    ).encode()  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_streams(port: int, num_streams: int, num_tokens: int) -> None:
    """Send the chats and read them to their ends."""
    allow_files()
    selector = selectors.DefaultSelector()
    for number in range(num_streams):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(chat(num_tokens, number))
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            assert data and not data.startswith(b"HTTP/1.1 4"), data
            if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def probe(port: int, stop: Any, aborts: Path, found: Any) -> None:
    """Put percentiles into `found`: the milliseconds of /health, of a chat's first token, and from hanging up to the
    core's abort."""
    times: dict[str, list[float]] = {"/health": [], "a new chat": [], "an abort": []}
    hung_up: list[float] = []
    while not stop.is_set():
        for what, request, end in (
            ("/health", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"\r\n\r\n"),
            ("a new chat", chat(1, 0), b'"content":""'),
            ("an abort", chat(400, 0), b'"content":""'),
        ):
            begin = time.monotonic()
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(request)
                data = b""
                while end not in data:
                    data += client.recv(1 << 16)
                if what == "an abort":
                    hung_up.append(time.monotonic())
                else:
                    times[what].append(1000 * (time.monotonic() - begin))
            time.sleep(0.02)
    lines = aborts.read_text().split()
    times["an abort"] = [1000 * (float(done) - begun) for done, begun in zip(lines, hung_up, strict=False)]
    for what, values in times.items():
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        found.put(f"{what}: {len(values)} times, p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f}, most {max(values):.1f} ms")


class MarkedClient(CoreClient):
    """Notes the processor time when a chat goes to the core. Before the first step the server waits for a second, in
    which it does other things."""

    last_sent = 0.0

    def send(self, message: FrontendMessage) -> None:
        super().send(message)
        if isinstance(message, EngineRequest):
            MarkedClient.last_sent = time.process_time()


class Marks(EngineMetrics):
    """Notes the processor time at each step."""

    steps: list[float]

    def record_step(self, stats: EngineStats) -> None:
        super().record_step(stats)
        self.steps.append(time.process_time())


class Unsent(http_protocol._ClosingTransport):
    """Sends the head of an answer and its end, and writes nothing between."""

    is_used = False
    begin = 0.0  # processor time at the first request of a round

    def __init__(self, transport: asyncio.Transport, *functions: Any) -> None:
        super().__init__(transport, *functions)
        Unsent.begin = Unsent.begin or time.process_time()
        if self.is_used:
            write = transport.write

            def write_ends(data: Any) -> None:
                if len(data) < 8 or data.startswith(b"HTTP/"):
                    write(data)

            self.write = write_ends  # type: ignore[method-assign]


http_protocol._ClosingTransport = Unsent  # type: ignore[misc]


class FrontEnd:
    """A server and its marks."""

    def __init__(self, engine: AsyncLLMEngine, metrics: Marks, port: int, aborts: Path) -> None:
        self.engine, self.metrics, self.port, self.aborts = engine, metrics, port, aborts

    async def round(self, num_streams: int, num_tokens: int, *, sends: bool) -> tuple[float, float]:
        """Return the processor's ms for a chat and µs for a token."""
        Unsent.is_used, Unsent.begin, self.metrics.steps = not sends, 0.0, []
        await in_process(read_streams, self.port, num_streams, num_tokens)
        steps, chats_end = self.metrics.steps, MarkedClient.last_sent
        counted = steps[EDGE_STEPS : num_tokens - EDGE_STEPS]
        token_us = 1e6 * (counted[-1] - counted[0]) / ((len(counted) - 1) * num_streams)
        return 1e3 * (chats_end - Unsent.begin) / num_streams, token_us


async def in_process(work: Any, *args: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == 0


async def run(args: argparse.Namespace, num_streams: int, folder: Path) -> list[str]:
    step_s = args.step_ms / 1000 or max(0.005, 40e-6 * num_streams)
    config = AsyncEngineArgs(max_num_seqs=2048).create_engine_config()
    metrics = Marks(config.model.served_model_names[0], config.model.max_model_len)
    aborts = folder / "aborts"
    aborts.touch()
    metrics.steps = []
    core = CountingCore(step_s, aborts)
    engine = AsyncLLMEngine(config, metrics=metrics, core=core, hooks=EngineHooks(make_core=MarkedClient))
    compile_chat_template(engine.tokenizer)
    server = HttpServer(engine, ServerArgs(disable_log_requests=True))
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as sock:
        serving = asyncio.ensure_future(server.serve([sock]))
        await engine.wait_ready()
        front = FrontEnd(engine, metrics, sock.getsockname()[1], aborts)
        await front.round(8, 4 * EDGE_STEPS, sends=True)  # the first chats import modules
        collect_rarely()
        if args.probe:
            lines = await probed(front, num_streams, args.tokens)
        else:
            chat_ms, to_send_us = await front.round(num_streams, args.tokens, sends=False)
            _, token_us = await front.round(num_streams, args.tokens, sends=True)
            lines.append(f"| {num_streams} | {step_s * 1000:g} | {to_send_us:.2f} | {token_us:.2f} | {chat_ms:.2f} |")
        server.should_exit = True
        await serving
    return lines


async def shared(args: argparse.Namespace, num_front_ends: int, num_streams: int, folder: Path) -> str:
    """Return a line about a server with several front ends."""
    config = AsyncEngineArgs(max_num_seqs=2048).create_engine_config()
    server_args = ServerArgs(api_server_count=num_front_ends, disable_log_requests=True, host="127.0.0.1", port=0)
    metrics = EngineMetrics(config.model.served_model_names[0], config.model.max_model_len)
    aborts = folder / "aborts"
    aborts.touch()
    core = CountingCore(args.step_ms / 1000, aborts)
    hub = EngineHub(config, metrics=metrics, core=core, max_restarts=0, step_timeout_s=None, ready_timeout_s=None)
    line = ""
    with (
        _bind(server_args, listens=False) as first,
        share_port(first, num_front_ends, is_path=False) as sockets,
        one_store(server_args) as (own_args, store_folder),
    ):
        front_ends = FrontEnds(hub, config, own_args, sockets, ["octavo"], store_folder)
        port = sockets[0].getsockname()[1]

        async def measure() -> None:
            nonlocal line
            await hub.wait_ready()
            while len(hub.fronts) < num_front_ends:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await hub.tell_all("snapshot")
            await in_process(read_streams, port, 8 * num_front_ends, 20)
            processes = {"core": [core.process.pid], "hub": [os.getpid()]}
            processes["front ends"] = [one.pid for one in front_ends.processes.values()]
            before, steps, begin = _processor_s(processes), metrics.num_steps, 0.0
            reading = asyncio.ensure_future(in_process(read_streams, port, num_streams, args.tokens))
            while metrics.num_steps == steps:  # the chats themselves are not counted
                before, begin = _processor_s(processes), time.monotonic()
                await asyncio.sleep(0.01)
            await reading
            seconds, num_tokens = time.monotonic() - begin, num_streams * args.tokens
            us = [1e6 * (after - before[name]) / num_tokens for name, after in _processor_s(processes).items()]
            line = f"| {num_front_ends} | {num_streams} | {num_tokens / seconds:,.0f} | " + " | ".join(
                f"{one:.2f}" for one in us
            )
            front_ends.stop()
            await hub.wait_failed()

        await front_ends.run(measure)
    return f"{line} |"


def _processor_s(processes: dict[str, list[int]]) -> dict[str, float]:
    """Return the processor time of processes, by kind."""
    times = {name: [psutil.Process(pid).cpu_times() for pid in pids] for name, pids in processes.items()}
    return {name: sum(one.user + one.system for one in of_kind) for name, of_kind in times.items()}


async def probed(front: FrontEnd, num_streams: int, num_tokens: int) -> list[str]:
    context = multiprocessing.get_context("spawn")
    stop, found = context.Event(), context.Queue()
    streams = asyncio.ensure_future(front.round(num_streams, num_tokens, sends=True))
    while len(front.metrics.steps) < 0.1 * num_tokens:  # noqa: ASYNC110 - streams that all begin at once are another load
        await asyncio.sleep(0.1)
    front.aborts.write_text("")
    probing = asyncio.ensure_future(in_process(probe, front.port, stop, front.aborts, found))
    while len(front.metrics.steps) < 0.9 * num_tokens:  # noqa: ASYNC110 - a chat alone would wait for others
        await asyncio.sleep(0.1)
    stop.set()
    await asyncio.gather(streams, probing)
    return [f"{num_streams} streams", *(found.get() for _ in "123")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--tokens", type=int, default=200, help="Of each stream (default: %(default)s).")
    parser.add_argument("--step-ms", type=float, default=0, help="Default: 40 µs a stream, 5 at least.")
    parser.add_argument("--probe", action="store_true", help="Ask other things meanwhile.")
    parser.add_argument("--front-ends", type=int, nargs="+", help="Measure servers with so many.")
    parser.add_argument("--core", nargs=2, metavar=("STEP_S", "ABORTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.core:
        count(float(args.core[0]), Path(args.core[1]))
    allow_files()
    if args.front_ends:
        kinds = "core | hub | front ends"
        print(f"| front ends | streams | tokens a second | µs a token: {kinds} |\n|---|---|---|---|---|---|")
        for num_front_ends, num_streams in itertools.product(args.front_ends, args.streams):
            with tempfile.TemporaryDirectory() as folder:
                print(uvloop.run(shared(args, num_front_ends, num_streams, Path(folder))), flush=True)
        return
    if not args.probe:
        print("| streams | ms a step | µs a token, to send | µs a token, sent | ms a chat |\n|---|---|---|---|---|")
    for num_streams in args.streams:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(uvloop.run(run(args, num_streams, Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
