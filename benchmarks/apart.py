"""Where do prefill and decode apart pay? Two servers behind a gateway, as two equal replicas and as one of each.

    python benchmarks/apart.py [--model MODEL] [--streams 4] [--prompt-tokens 4000] [--every 6] [--seconds 60]

Each server computes with one thread. Streams of 400 tokens run all the time, each followed by the next one, and every
`--every` seconds comes a long prompt that no server has seen. Printed are the gaps between the streams' chunks, their
tokens a second, and the long prompts' first tokens. The two arrangements take turns, `--rounds` times.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.server import MODEL, Server, running_gateway

FLAGS = {"cpu-threads": 1, "max-model-len": 8192, "kv-cache-disk-gib": 4, "disable-log-requests": True}


def catalogue(model: str, disk: str, is_apart: bool) -> dict[str, Any]:
    always = {"model": model, "preload": True, "keep_alive": None, "flags": FLAGS | {"kv-cache-disk": disk}}
    if not is_apart:
        return {"m": always | {"replicas": 2}}
    return {"m": always | {"prefill_model": "p", "prefill_min_tokens": 1000}, "p": always}


class Load:
    """Runs the load once."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.args, self.end = args, time.monotonic() + args.seconds
        self.http = httpx.AsyncClient(base_url=url, timeout=600)
        self.gaps: list[float] = []
        self.first_tokens: list[float] = []

    async def ask(self, prompt: str, num_tokens: int) -> list[float]:
        """Return when the request was sent and when each chunk with text came."""
        body = {
            "model": "m", "stream": True, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
            "prompt": prompt,
        }  # fmt: skip
        times = [time.monotonic()]
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    times.append(time.monotonic())
        return times

    async def stream(self, number: int) -> None:
        while time.monotonic() < self.end:
            number += 100
            times = await self.ask(f"Story {number}: ", 400)
            self.gaps += [after - before for before, after in itertools.pairwise(times[1:])]

    async def prompts(self) -> None:
        asked = []
        number = 0
        while time.monotonic() < self.end - self.args.every:
            number += 1
            words = [f"word{(number * 7919 + place * place) % 997}" for place in range(self.args.prompt_tokens // 3)]
            asked.append(asyncio.ensure_future(self.ask(" ".join(words), 8)))
            await asyncio.sleep(self.args.every)
        for times in await asyncio.gather(*asked):
            self.first_tokens.append(times[1] - times[0])

    async def run(self) -> None:
        await asyncio.gather(*(self.stream(number) for number in range(self.args.streams)), self.prompts())
        await self.http.aclose()


def measure(args: argparse.Namespace, is_apart: bool, folder: Path) -> Load:
    with running_gateway(folder, catalogue(args.model, str(folder / "disk"), is_apart)) as server:
        warm_up(server)
        load = Load(args, server.url)
        asyncio.run(load.run())
    return load


def warm_up(server: Server) -> None:
    """Return when all servers of the gateway have answered."""
    for name in ("m", "m", "p"):
        body = {"model": name, "prompt": "One", "max_tokens": 1}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--every", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print("| | gap p50, ms | p99 | most | stream tok/s | long prompt: first token p50, s | most |")
    print("|---|---|---|---|---|---|---|")
    for _ in range(args.rounds):
        for is_apart in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                load = measure(args, is_apart, Path(folder))
            gaps, first = sorted(load.gaps), sorted(load.first_tokens)
            ms = [1000 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.99, 1)]
            print(
                f"| {'apart' if is_apart else 'two replicas'} | " + " | ".join(f"{one:.0f}" for one in ms)
                + f" | {len(gaps) / args.seconds:.0f} | {statistics.median(first):.2f} | {first[-1]:.2f} |", flush=True
            )  # fmt: skip


if __name__ == "__main__":
    main()
