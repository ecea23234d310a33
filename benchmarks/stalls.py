"""How long can one request stop the streams of others? A fuzzer sends bodies of up to 16 MB to every route, beside a
stream that is watched.

    python benchmarks/stalls.py [--minutes 5] [--seed 0] [--most-mb 16] [--show 10]

The server is real and its engine core is `front_end.py`'s, which only counts: it gives the watched chat a token every
5 ms. A process reads the chat and notes the times between its tokens; another sends bodies, one at a time: a good body
of a route in which one field has become long, wide, deep or odd in one of many ways. Printed are the longest stalls of
the chat beyond the usual, and the turns of the server's event loop in which it took most processor time, threads
included, both with the requests that were under way: on a busy machine a stall may be others' work. The same seed sends
the same bodies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.front_end import CountingCore, chat
from octavo.config import AsyncEngineArgs
from octavo.engine.async_engine import AsyncLLMEngine
from octavo.entrypoints.chat.chat_template import compile_chat_template
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.uvicorn_server import HttpServer
from octavo.metrics.prometheus import EngineMetrics
from octavo.processes import collect_rarely
from tests.e2e.hostile import FIELDS, GOOD, VALUES, request

STEP_S = 0.005
ANSWER_S = 2.0  # that an answer may take; then the fuzzer hangs up
ROUTES = [*GOOD, "/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/invocations", "/api/chat",
          "/api/generate", "/v1/load_lora_adapter"]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_DEEP = "as deep as "
_WORD = "Once upon a time, naïve 🦜 "


class Sent(NamedTuple):
    """A request of the fuzzer, with its times (`time.monotonic`)."""

    begin: float
    end: float
    what: str


class Stall(NamedTuple):
    begin: float
    seconds: float


def long_values(dice: random.Random, num_bytes: int) -> dict[str, Callable[[], Any]]:
    """Return values of some `num_bytes`, by name. They are made when they are called."""

    def times(value: Any, size: int) -> list[Any]:
        return [value] * max(1, num_bytes // size)

    def nested(opening: str, closing: str) -> str:
        """Return what `make` writes as values within each other, of which no encoder makes so many."""
        return f"{_DEEP}{opening}|{closing}|{num_bytes // len(opening + closing)}"

    text, number = _WORD * max(1, num_bytes // 30), dice.randrange(49_000)
    return {
        "text": lambda: text,
        "one character": lambda: dice.choice("a 0\n{%é\u202e") * num_bytes,
        "tokens": lambda: times(number, 7),
        "floats": lambda: times(dice.random(), 20),
        "lists": lambda: times([1], 5),
        "empty lists": lambda: times([], 4),
        "objects": lambda: times({"a": 1}, 10),
        "texts": lambda: times("stop", 8),
        "long texts": lambda: times(_WORD * 30, 900),
        "an object": lambda: {f"{i}": 1 for i in range(num_bytes // 12)},
        "deep lists": lambda: nested("[", "]"),
        "deep objects": lambda: nested('{"a":', "}"),
        "messages": lambda: times({"role": "user", "content": "Hi"}, 36),
        "parts": lambda: [{"role": "user", "content": times({"type": "text", "text": "Hi"}, 31)}],
        "a long message": lambda: [{"role": "user", "content": text}],
        "tools": lambda: times(TOOL, 110),
        "a wide schema": lambda: {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {
                "properties": {f"p{i}": {"type": "string"} for i in range(num_bytes // 28)}}},
        },
        "a deep schema": lambda: {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": nested('{"properties":{"a":', "}}")},
        },
        "a regex": lambda: {"regex": "(a|b)*c{1,9}" * (num_bytes // 12)},
        "choices": lambda: {"choice": [f"choice {i}" for i in range(num_bytes // 16)]},
        "a template": lambda: "{% for m in messages %}" * (num_bytes // 23),
        "tool calls": lambda: [{"role": "assistant", "tool_calls": times(
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}, 90)}],
        "something odd": lambda: dice.choice(VALUES),
    }  # fmt: skip


def make(dice: random.Random, most_bytes: int) -> tuple[str, str, bytes]:
    """Return a route, a description and a body."""
    route = dice.choice(ROUTES)
    body = dict(GOOD.get(route, {"input": "Hi", "prompt": "Hi", "messages": GOOD["/v1/messages"]["messages"]}))
    num_bytes = int(2 ** dice.uniform(6, most_bytes.bit_length() - 1))
    values = long_values(dice, num_bytes)
    told = []
    for _ in range(dice.choice((1, 1, 1, 2))):
        field, name = dice.choice((*body, *FIELDS)), dice.choice([*values])
        body[field] = values[name]()
        told.append(f"{field}: {name}")
    if dice.random() < 0.3:
        body["stream"] = True
    text = re.sub(rf'"{_DEEP}(.*?)\|(.*?)\|(\d+)"', _dig, json.dumps(body, ensure_ascii=dice.random() < 0.5))
    encoded = text.encode("utf-8", "surrogatepass")[:most_bytes]
    return route, f"{route} {', '.join(told)} ({len(encoded):,} bytes)", encoded


def _dig(found: re.Match[str]) -> str:
    opening, closing, depth = found[1].replace('\\"', '"'), found[2], int(found[3])
    return opening * depth + "1" + closing * depth


def fuzz(port: int, stop: Any, seed: int, most_bytes: int, sent: Any) -> None:
    """Send bodies until `stop` is set, and put each into `sent`."""
    dice = random.Random(seed)
    while not stop.is_set():
        route, what, body = make(dice, most_bytes)
        begin, status = time.monotonic(), "no answer"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as client:
                client.sendall(request(route, body))
                status = client.recv(1 << 16)[9:12].decode()
                while time.monotonic() - begin < ANSWER_S and client.recv(1 << 16):
                    pass
        except OSError:
            pass
        sent.put(Sent(begin, time.monotonic(), f"{what}: {status}"))


def watch(port: int, stop: Any, stalls: Any) -> None:
    """Read chats until `stop` is set, and put the times between their tokens into `stalls`."""
    while not stop.is_set():
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(chat(2000, 0))
            for _ in range(3):  # the head and the first token, for which the core may wait
                data = client.recv(1 << 16)
            last = time.monotonic()
            while not stop.is_set() and data and not data.endswith(b"0\r\n\r\n"):
                data = client.recv(1 << 16)
                now = time.monotonic()
                stalls.put(Stall(last, now - last))
                last = now


async def note_turns(turns: list[tuple[Stall, float]]) -> None:
    """Note turns of the event loop that take long, with the process's processor time."""
    while True:
        begin, begin_cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(0.001)
        if (seconds := time.monotonic() - begin) > 2 * STEP_S:
            turns.append((Stall(begin, seconds), time.process_time() - begin_cpu))


def drained(queue: Any, into: list[Any]) -> None:
    while not queue.empty():
        into.append(queue.get())


async def run(args: argparse.Namespace, folder: Path) -> None:
    config = AsyncEngineArgs(max_num_seqs=2048, max_model_len=8192).create_engine_config()
    metrics = EngineMetrics(config.model.served_model_names[0], config.model.max_model_len)
    aborts = folder / "aborts"
    aborts.touch()
    engine = AsyncLLMEngine(config, metrics=metrics, core=CountingCore(STEP_S, aborts))
    compile_chat_template(engine.tokenizer)
    server = HttpServer(engine, ServerArgs(disable_log_requests=True))
    context = multiprocessing.get_context("spawn")
    stop, sent_queue, stall_queue = context.Event(), context.Queue(), context.Queue()
    sent: list[Sent] = []
    stalls: list[Stall] = []
    turns: list[tuple[Stall, float]] = []
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as sock:
        serving = asyncio.ensure_future(server.serve([sock]))
        await engine.wait_ready()
        collect_rarely()
        noting = asyncio.ensure_future(note_turns(turns))
        port = sock.getsockname()[1]
        processes = [
            context.Process(target=watch, args=(port, stop, stall_queue)),
            context.Process(target=fuzz, args=(port, stop, args.seed, int(args.most_mb * 2**20), sent_queue)),
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end and all(process.is_alive() for process in processes):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(drained, stall_queue, stalls)
            await asyncio.to_thread(drained, sent_queue, sent)
        stop.set()
        await asyncio.sleep(ANSWER_S)
        drained(stall_queue, stalls), drained(sent_queue, sent)
        for process in processes:
            process.kill()
        noting.cancel()
        server.should_exit = True
        await serving
    show(sent, stalls, turns, args.show)


def show(sent: list[Sent], stalls: list[Stall], turns: list[tuple[Stall, float]], num_shown: int) -> None:
    def under_way(one: Stall) -> str:
        end = one.begin + one.seconds
        return "; ".join(body.what for body in sent if body.begin < end and body.end > one.begin) or "nothing under way"

    usual = statistics.median(stall.seconds for stall in stalls)
    print(f"{len(sent)} requests, {len(stalls)} waits for a token, {1000 * usual:.1f} ms in the middle; the longest:")
    for stall in sorted(stalls, key=lambda stall: -stall.seconds)[:num_shown]:
        print(f"{1000 * (stall.seconds - usual):8.0f} ms  {under_way(stall)}")
    print("turns of the event loop, by the processor time that the server took meanwhile:")
    for turn, cpu_s in sorted(turns, key=lambda turn: -turn[1])[:num_shown]:
        print(f"{1000 * cpu_s:8.0f} ms of {1000 * turn.seconds:4.0f}  {under_way(turn)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-mb", type=float, default=16.0)
    parser.add_argument("--show", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(run(args, Path(folder)))


if __name__ == "__main__":
    main()
