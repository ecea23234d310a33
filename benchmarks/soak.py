"""A server at twice its capacity for as long as one likes: `python benchmarks/soak.py [--minutes 10] [--seed 1]`.

Clients ask for streams and whole answers, hang up, set deadlines and send nonsense, at random by the seed; half way
the engine's process is killed. Every request must end in an answer or in an error that docs/server.md knows, a fixed
question must always get the same answer, memory must be flat, and in the end nothing may run, wait or hold a block.
Exit code 1 and a list say what was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.server import MODEL, Server, running_server
from tests.waiting import within

SLOTS, QUEUE = 16, 8
NUM_CLIENTS = 2 * (SLOTS + QUEUE)
PATIENCE_S = within(120.0)  # an answer that takes longer is lost
SETTLE_S = 15.0  # a process younger than this is still growing, by caches that fill
QUESTION = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
WORDS = ["the", "sea", "ship", "printer", "leaf", "octavo", "folds", "of", "under", "lamp", "seven", "harbour", "paper"]
OUTAGE = {"engine_restarting"}

NONSENSE: list[tuple[bytes, set[int]]] = [
    (b'{"prompt": ', {400}),
    (b"\xff\xfe\x00", {400}),
    (b"[" * 50000, {400}),
    (b'{"prompt": "a", "temperature": NaN}', {400}),
    (b'{"prompt": "a", "max_tokens": -5}', {400}),
    (b'{"prompt": "a", "max_tokens": 1e400}', {400}),
    (b'{"prompt": "a", "n": 99999999999999999999}', {400}),
    (b'{"prompt": {"a": 1}}', {400}),
    (b'{"prompt": [[1, -2]]}', {400}),
    (b'{"prompt": "a", "timeout": 0}', {400}),
    (b'{"prompt": "a", "colour": "red"}', {400}),
    (b'{"prompt": "a", "model": "gpt-7"}', {404}),
    (b'{"prompt": "' + b"word " * 3000 + b'"}', {400}),
    (b'{"prompt": "' + b"x" * 70000 + b'"}', {413}),
]


class Soak:
    """The clients of one server, and what became of their requests."""

    def __init__(self, server: Server, seed: int, seconds: float, until: set[str]) -> None:
        """`until` are ends of requests that are waited for beyond `seconds`, at most ten times as long."""
        self.server, self._until = server, until
        self.seed = seed
        self.seconds = seconds
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_tokens = 0
        self.memory_mib: dict[str, list[tuple[float, float]]] = {"server": [], "core": []}  # (age of the process, MiB)
        self.recovery_s: float | None = None
        self.outages: list[tuple[float, float]] = []
        self._is_out = False

    async def run(self) -> None:
        """Load the server until the time is up."""
        self.begun = time.monotonic()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=PATIENCE_S, limits=limits) as http:
            self.expected = (await http.post("/v1/completions", json=QUESTION)).json()["choices"][0]["text"]
            others = [asyncio.create_task(self._measure()), asyncio.create_task(self._kill(http))]
            await asyncio.gather(*(self._client(http, i) for i in range(NUM_CLIENTS)))
            await others[1]
            others[0].cancel()

    @property
    def _has_time(self) -> bool:
        seconds = time.monotonic() - self.begun
        seen = {end.partition(": ")[2] for end in self.ends}
        return seconds < self.seconds or (seconds < 10 * self.seconds and not self._until <= seen)

    async def _client(self, http: httpx.AsyncClient, i: int) -> None:
        rng = random.Random(f"{self.seed}/{i}")
        kinds = [self._stream, self._whole, self._leave, self._deadline, self._nonsense, self._ask_again]
        while self._has_time:
            kind = rng.choices(kinds, weights=(30, 20, 20, 15, 10, 5))[0]
            name = kind.__name__.strip("_")
            begun_out = self._is_out
            try:
                end = await kind(http, rng)
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                end = f"lost: {type(error).__name__} {error}"
            self.ends[f"{name}: {end}"] += 1
            if end.startswith(("lost", "wrong")) or (
                end in OUTAGE and not (begun_out or self.recovery_s or self._is_out)
            ):
                self.wrong.append(f"{name} after {time.monotonic() - self.begun:.1f} s: {end}")
            if end in OUTAGE or end == "queue_full":
                await asyncio.sleep(rng.uniform(0.2, 1.0))  # Retry-After would leave the server idle

    def _body(self, rng: random.Random) -> dict[str, Any]:
        prefix = "You are a careful printer of small books. " * rng.randrange(4)
        text = prefix + " ".join(rng.choices(WORDS, k=rng.randrange(1, 120)))
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": rng.randrange(1, 150),
            "temperature": rng.choice([0, 0.8]),
        }
        body |= rng.choice(
            [{}, {"n": 2}, {"seed": 3, "top_p": 0.9}, {"stop": ["."]}, {"logprobs": 2}, {"ignore_eos": True}]
        )
        return body | {"prompt": text}

    async def _stream(self, http: httpx.AsyncClient, rng: random.Random, fields: dict[str, Any] | None = None) -> str:
        body = {**self._body(rng), **(fields or {}), "stream": True}
        reasons: dict[int, str] = {}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._error(response)
            done = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):  # others are comments that keep a stream open while it pauses
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return str(event["error"]["code"])
                    for choice in event["choices"]:
                        self.num_tokens += 1
                        if choice["finish_reason"]:
                            reasons[choice["index"]] = choice["finish_reason"]
        if not done or len(reasons) != body.get("n", 1):
            return "lost: the stream ended in the middle"
        return "/".join(sorted(set(reasons.values())))

    async def _whole(self, http: httpx.AsyncClient, rng: random.Random, fields: dict[str, Any] | None = None) -> str:
        response = await http.post("/v1/completions", json={**self._body(rng), **(fields or {})})
        if response.status_code != 200:
            return self._error(response)
        answer = response.json()
        self.num_tokens += answer["usage"]["completion_tokens"]
        return "/".join(sorted({choice["finish_reason"] for choice in answer["choices"]}))

    async def _deadline(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        fields = {"timeout": rng.choice([0.001, 0.05, 0.3, 1.0])}
        begun = time.monotonic()
        end = await rng.choice([self._stream, self._whole])(http, rng, fields)
        late_s = time.monotonic() - begun - fields["timeout"]
        return end if late_s < within(10) else f"wrong: {late_s:.1f} s after its deadline"

    async def _leave(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """Hang up: after some chunks, or after a time in which no answer may have come."""
        if rng.random() < 0.5:
            with contextlib.suppress(httpx.TimeoutException):
                await http.post("/v1/completions", json=self._body(rng), timeout=rng.uniform(0.01, 0.5))
            return "left"
        body = {**self._body(rng), "stream": True, "max_tokens": 300}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._error(response)
            num_lines = rng.randrange(1, 40)
            async for _ in response.aiter_lines():
                num_lines -= 1
                if not num_lines:
                    break
        return "left"

    async def _nonsense(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        content, statuses = rng.choice(NONSENSE)
        response = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        if response.status_code in statuses:
            assert response.json()["error"]["message"]
            return "refused"
        if response.status_code in (429, 503):
            return self._error(response)
        return f"wrong: {response.status_code} for {content[:60]!r}"

    async def _ask_again(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        response = await http.post("/v1/completions", json=QUESTION)
        if response.status_code != 200:
            return self._error(response)
        text = response.json()["choices"][0]["text"]
        return "right" if text == self.expected else f"wrong: {text!r}"

    @staticmethod
    def _error(response: httpx.Response) -> str:
        code = response.json()["error"]["code"]
        known = {429: {"queue_full"}, 503: OUTAGE}.get(response.status_code, set())
        if code in known and "retry-after" in response.headers:
            return str(code)
        return f"wrong: {response.status_code} {response.text[:200]}"

    async def _kill(self, http: httpx.AsyncClient) -> None:
        await asyncio.sleep(self.seconds / 2)
        core = self.server.core_process()
        killed = time.monotonic()
        self._is_out = True
        core.kill()
        # It may be there again before anybody has asked for its health.
        while (await http.get("/health")).status_code == 200 and not await asyncio.to_thread(self._num_restarts):
            await asyncio.sleep(0.01)
            if time.monotonic() > killed + within(30):
                self.wrong.append("the engine's death was not noticed")
                return
        noticed = time.monotonic()
        while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self.noticed_s, self.recovery_s = noticed - killed, time.monotonic() - killed
        self._is_out = False

    def _num_restarts(self) -> float:
        return self.server.count("octavo:engine_restarts_total")

    async def _measure(self) -> None:
        while True:
            with contextlib.suppress(psutil.Error, ValueError):
                for name, process in (
                    ("server", psutil.Process(self.server.process.pid)), ("core", self.server.core_process()),
                ):  # fmt: skip
                    self.memory_mib[name].append(
                        (time.time() - process.create_time(), process.memory_info().rss / (1 << 20))
                    )
            await asyncio.sleep(min(1.0, self.seconds / 60))

    def growth_mib(self, name: str) -> float | None:
        """From the first third to the last third of what was measured after the process had settled; None if that is
        too little."""
        values = self.memory_mib[name]
        if name == "core":  # the last one
            youngest = min(range(len(values)), key=lambda i: values[i][0])
            values = values[youngest:]
        settled = [mib for age, mib in values if age > SETTLE_S]
        third = len(settled) // 3
        if third < 5:
            return None
        return statistics.median(settled[-third:]) - statistics.median(settled[:third])


def soak(seconds: float, seed: int, log: Path, until: set[str]) -> tuple[dict[str, Any], list[str]]:
    """-> (what was measured, what was wrong)."""
    with tempfile.TemporaryDirectory() as folder, running_server(
        Path(folder), "--max-model-len", "512", "--max-num-seqs", str(SLOTS), "--num-gpu-blocks-override", "100",
        "--max-queue-len", str(QUEUE), "--max-body-bytes", "65536", "--check-invariants", "--disable-log-requests",
    ) as server:  # fmt: skip
        run = Soak(server, seed, seconds, until)
        asyncio.run(run.run())
        wrong = run.wrong
        try:
            server.wait_until_idle()
        except AssertionError as error:
            wrong.append(f"blocks or requests are left: {error}")
        counts = {
            name: server.metric(name)
            for name in (
                "prompt_tokens_total",
                "generation_tokens_total",
                "num_preemptions_total",
                "prefix_cache_hits_total",
            )
        }
        error = {f"{share:.0%}": server.bound("octavo:step_time_error", share) for share in (0.5, 0.95)}
        counts["engine_restarts"] = server.count("octavo:engine_restarts_total")
        status = server.stop()
        text = server.log.read_text()
        log.write_text(text)
    if status != 0:
        wrong.append(f"the server's exit status is {status}")
    if "Traceback" in text:
        wrong.append(f"a traceback is in the log, {log}")
    if counts["engine_restarts"] != 1:
        wrong.append(f"the engine was started again {counts['engine_restarts']:.0f} times")
    growth = {name: run.growth_mib(name) for name in run.memory_mib}
    for name, mib in growth.items():
        if mib is not None and mib > 32:
            wrong.append(f"the {name} process grew by {mib:.0f} MiB")
    measured = {
        "seconds": seconds,
        "seed": seed,
        "requests": sum(run.ends.values()),
        "ends": dict(sorted(run.ends.items())),
        "tokens_per_s": counts["generation_tokens_total"] / seconds,
        "noticed_s": run.noticed_s if run.recovery_s else None,
        "recovery_s": run.recovery_s,
        "growth_mib": growth,
        "last_mib": {name: values[-1][1] for name, values in run.memory_mib.items()},
        "counts": counts,
        "step_time_error_up_to": error,  # share of the steps: bound
        "memory_mib": {  # a hundred values of (age of the process in seconds, MiB)
            name: [(round(age), round(mib, 1)) for age, mib in values[:: max(1, len(values) // 100)]]
            for name, values in run.memory_mib.items()
        },
    }
    return measured, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="Write what was measured there.")
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="Where the server's log is kept.")
    parser.add_argument("--until", nargs="*", default=[], metavar="END", help="Go on until requests have ended so.")
    args = parser.parse_args()
    measured, wrong = soak(60 * args.minutes, args.seed, args.log, set(args.until))
    if args.json is not None:
        args.json.write_text(json.dumps({**measured, "wrong": wrong}, indent=1) + "\n")
    del measured["memory_mib"]
    print(json.dumps({**measured, "wrong": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
