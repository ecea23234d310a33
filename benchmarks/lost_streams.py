"""How many streams does a server lose when its engine is killed? Any server with OpenAI's completions.

    python benchmarks/lost_streams.py --port 8001 --kill octavo.engine.core_process -- octavo serve --port 8001
    python benchmarks/lost_streams.py --port 8001 --kill EngineCore -- vllm serve MODEL --port 8001
    python benchmarks/lost_streams.py --port 8001 -- python -m llama_cpp.server --model FILE --port 8001

The command's server gets `--streams` greedy completions at once, undisturbed. It gets them again, and when half of the
events have come, its process whose command line contains `--kill` is killed with -9: the server itself without the
option. Printed are the streams that ended without a finish reason or with an error, those that ended with another text,
and whether the server answers again within `--patience` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.survival import SUBJECTS


class Streams:
    """Completions asked at once."""

    def __init__(self, url: str, model: str, count: int, num_tokens: int) -> None:
        self.url, self.model, self.count, self.num_tokens = url, model, count, num_tokens
        self.num_events = 0
        self.texts: list[str | None] = []  # None: lost

    async def ask_all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits) as http:
            self.texts = await asyncio.gather(*(self._ask(http, number) for number in range(self.count)))

    async def _ask(self, http: httpx.AsyncClient, number: int) -> str | None:
        body = {
            "model": self.model, "stream": True, "max_tokens": self.num_tokens, "temperature": 0,
            "prompt": f"Number {number}. Here is what everybody should know about {SUBJECTS[number % len(SUBJECTS)]}: ",
        }  # fmt: skip
        text, reason = "", None
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    self.num_events += 1
                    for choice in event["choices"]:
                        text += choice["text"]
                        reason = choice["finish_reason"] or reason
        except (httpx.HTTPError, KeyError):
            return None
        return text if reason in ("length", "stop") else None


async def ready(url: str, patience_s: float) -> str | None:
    """Return the name of the server's model once it answers a completion, None if it does not in time."""
    end = time.monotonic() + patience_s
    async with httpx.AsyncClient(base_url=url, timeout=patience_s) as http:
        while time.monotonic() < end:
            try:
                name = str((await http.get("/v1/models")).json()["data"][0]["id"])
                answer = await http.post("/v1/completions", json={"model": name, "prompt": "One", "max_tokens": 1})
                if answer.status_code == 200:
                    return name
            except (httpx.HTTPError, ValueError, LookupError):
                pass
            await asyncio.sleep(0.2)
    return None


async def run(args: argparse.Namespace, server: psutil.Process) -> None:
    url = f"http://127.0.0.1:{args.port}"
    model = await ready(url, 600)
    assert model is not None, "the server does not answer"
    expected = Streams(url, model, args.streams, args.tokens)
    await expected.ask_all()
    found = Streams(url, model, args.streams, args.tokens)
    asking = asyncio.ensure_future(found.ask_all())
    while found.num_events < expected.num_events / 2:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    processes = [one for one in server.children(recursive=True) if args.kill in " ".join(one.cmdline())]
    victim = processes[0] if args.kill else server
    print(f"killed: {' '.join(victim.cmdline())[:80]}")
    victim.kill()
    await asking
    lost = sum(text is None for text in found.texts)
    other = sum(a is not None and a != b for a, b in zip(found.texts, expected.texts, strict=True))
    again = await ready(url, args.patience)
    print(
        f"{lost} of {args.streams} lost, {other} with another text; answers again: {'no' if again is None else 'yes'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kill", default="")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    process = subprocess.Popen(args.command, start_new_session=True)
    try:
        asyncio.run(run(args, psutil.Process(process.pid)))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
