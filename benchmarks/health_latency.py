"""How fast /health answers while the server is fully loaded: `python benchmarks/health_latency.py [--streams 64]`.

The streams are read by a process of their own; this one asks /health (and, fewer times, /metrics) over new connections,
as probes do, and prints percentiles in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.server import MODEL, running_server


def load(url: str, num_streams: int, seconds: float) -> None:
    """Keep so many streams open, each followed by another."""

    async def stream(http: httpx.AsyncClient, i: int, end: float) -> None:
        body = {"model": MODEL, "prompt": f"Story number {i}:", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while time.monotonic() < end:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    pass

    async def run() -> None:
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
            await asyncio.gather(*(stream(http, i, end) for i in range(num_streams)))

    asyncio.run(run())


def ask(url: str) -> float:
    """Milliseconds to the answer, connection included."""
    begun = time.perf_counter()
    with urllib.request.urlopen(url, timeout=30) as response:
        response.read()
    return 1000 * (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), "--max-model-len", "1024") as server:
        clients = multiprocessing.Process(target=load, args=(server.url, args.streams, args.seconds + 3))
        clients.start()
        while server.metric("num_requests_running") < args.streams:
            time.sleep(0.05)
        before, begun = server.metric("generation_tokens_total"), time.monotonic()
        times: dict[str, list[float]] = {"/health": [], "/metrics": []}
        while time.monotonic() < begun + args.seconds:
            path = "/metrics" if len(times["/health"]) % 20 == 19 else "/health"
            times[path].append(ask(server.url + path))
            if path == "/metrics":
                times["/health"].append(ask(server.url + "/health"))
            time.sleep(0.01)
        rate = (server.metric("generation_tokens_total") - before) / (time.monotonic() - begun)
        clients.join()
    print(f"{args.streams} streams, {rate:.0f} tokens/s")
    for path, values in times.items():
        cuts = statistics.quantiles(values, n=100)
        shown = ", ".join(f"p{p} {cuts[p - 1]:.1f}" for p in (50, 90, 99))
        print(f"{path:<9} {len(values)} times: {shown}, most {max(values):.1f} ms")


if __name__ == "__main__":
    main()
