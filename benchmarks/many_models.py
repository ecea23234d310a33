"""Many models behind one gateway: cold starts, more models than fit, new versions under load.

    python benchmarks/many_models.py cold [--times 10] [--model FILE.gguf [--evict]]  # first tokens of a stopped model
    python benchmarks/many_models.py zipf [--minutes 10]        # five models in the memory of two
    python benchmarks/many_models.py versions [--streams 64]    # ten changes of a model's flags, and a broken file

The gateway and its servers are real, and each model is the default model, or `--model`, under another name. With
`--evict` the file leaves the page cache before each start. `zipf` draws the model of each request by Zipf's law (the
n-th is asked for 1/n as often as the first) and the times by Poisson's; it looks at the servers that run every 50 ms.
`versions` changes the catalogue while streams run, each of which must end whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.server import MODEL, Server, running_gateway

FLAGS = {"max-model-len": 1024, "kv-cache-memory-bytes": "64M"}
NUM_MODELS, NUM_FIT = 5, 2
NUM_CHANGES = 10


class Load:
    """Requests and how they ended."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.http = httpx.AsyncClient(base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None))
        self.first_tokens: list[float] = []
        self.errors: list[str] = []

    async def ask(self, model: str, num_tokens: int) -> None:
        body = {
            "model": model, "stream": True, "max_tokens": num_tokens, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"Tell me about number {len(self.first_tokens)}."}],
        }  # fmt: skip
        begin, first, reason = time.monotonic(), 0.0, None
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(line)
                    for choice in event["choices"]:
                        first = first or (time.monotonic() if choice["delta"].get("content") else 0.0)
                        reason = choice["finish_reason"] or reason
            if reason != "length":
                raise ValueError(f"finish_reason {reason}, status {response.status_code}")
        except (httpx.HTTPError, ValueError) as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:300])
            return
        self.first_tokens.append(first - begin)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        found = re.findall(rf"^octavo_gateway_{name}(?:\{{.*)? (.*)$", self.server.get("/metrics")[1], re.MULTILINE)
        return sum(map(float, found))

    def report(self, what: str) -> None:
        times = sorted(self.first_tokens)
        shares = ", ".join(
            f"p{100 * share:.0f} {times[int(share * (len(times) - 1))]:.2f}" for share in (0.5, 0.9, 0.99)
        )
        print(f"{what}: {len(times)} answered, {len(self.errors)} failed; first token {shares}, most {times[-1]:.2f} s")
        for error in sorted(set(self.errors))[:5]:
            print(f"  {error}")


async def cold(load: Load, args: argparse.Namespace, file: Path) -> None:
    for _ in range(args.times):
        if args.evict:
            await asyncio.to_thread(evict, args.model)
        await load.ask("m0", 4)
        while servers_of(load.server):  # noqa: ASYNC110 - it stops at once
            await asyncio.sleep(0.05)
    load.report("cold requests")


def evict(file: str) -> None:
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def zipf(load: Load, args: argparse.Namespace, file: Path) -> None:
    rng, asked = random.Random(args.seed), list[asyncio.Future[None]]()
    most_servers, most_gib, end = 0, 0.0, time.monotonic() + 60 * args.minutes

    async def look() -> None:
        nonlocal most_servers, most_gib
        while True:
            most_servers = max(most_servers, len(await asyncio.to_thread(servers_of, load.server)))
            most_gib = max(most_gib, await asyncio.to_thread(load.metric, "memory_held_gib"))
            await asyncio.sleep(0.05)

    looking = asyncio.ensure_future(look())
    while time.monotonic() < end:
        [number] = rng.choices(range(NUM_MODELS), [1 / (n + 1) for n in range(NUM_MODELS)])
        asked.append(asyncio.ensure_future(load.ask(f"m{number}", 16)))
        await asyncio.sleep(rng.expovariate(args.rate))
    await asyncio.gather(*asked)
    looking.cancel()
    load.report(f"{NUM_MODELS} models in the memory of {NUM_FIT}, {args.rate:g} requests a second")
    print(f"cold starts: {load.metric('starts_total'):.0f}; failed starts: {load.metric('failed_starts_total'):.0f}")
    print(f"at most {most_servers} servers at once, and {most_gib:g} of {NUM_FIT} GiB held")


async def versions(load: Load, args: argparse.Namespace, file: Path) -> None:
    is_over = False

    async def stream() -> None:
        while not is_over:
            await load.ask("m0", 32)

    streams = [asyncio.ensure_future(stream()) for _ in range(args.streams)]
    while len(load.first_tokens) < args.streams:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    for number in range(NUM_CHANGES):
        if number == NUM_CHANGES // 2:
            await asyncio.to_thread(file.write_text, "models: {m0: {flgs: {}}}")
            await asyncio.sleep(3)
        before = {one.pid for one in servers_of(load.server)}
        models = {"m0": entry(model=args.model, replicas=2, flags=FLAGS | {"max-num-seqs": 64 + number})}
        await asyncio.to_thread(file.write_text, json.dumps({"models": models}))
        while len(after := {one.pid for one in servers_of(load.server)}) != 2 or after & before:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        num_answers = len(load.first_tokens)
        while len(load.first_tokens) < num_answers + args.streams:  # noqa: ASYNC110 - by the new version
            await asyncio.sleep(0.1)
    is_over = True
    await asyncio.gather(*streams)
    load.report(f"{NUM_CHANGES} changes under {args.streams} streams")


def entry(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "memory_gib": 1, "flags": FLAGS, "preload": True} | fields


def servers_of(server: Server) -> list[psutil.Process]:
    """The gateway's servers."""
    children = psutil.Process(server.process.pid).children()
    return [one for one in children if one.status() != psutil.STATUS_ZOMBIE and "serve" in one.cmdline()]


MODES: dict[str, tuple[Callable[[Load, argparse.Namespace, Path], Awaitable[None]], dict[str, Any]]] = {
    "cold": (cold, {"m0": entry(preload=False, keep_alive=0)}),
    "zipf": (zipf, {f"m{number}": entry(preload=False) for number in range(NUM_MODELS)}),
    "versions": (versions, {"m0": entry(replicas=2)}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--evict", action="store_true")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.evict and (args.mode != "cold" or not os.path.isfile(args.model)):
        parser.error("--evict is for cold, and needs --model FILE")
    work, models = MODES[args.mode]
    models = {name: fields | {"model": args.model} for name, fields in models.items()}
    with tempfile.TemporaryDirectory() as name:
        flags = ["--memory-gib", str(NUM_FIT)] if args.mode == "zipf" else []
        with running_gateway(Path(name), models, *flags) as server:
            asyncio.run(work(Load(server), args, Path(name, "models.yaml")))


if __name__ == "__main__":
    main()
