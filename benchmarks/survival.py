"""Streams that outlive their engine: `python benchmarks/survival.py [--requests 64] [--deaths core hang] [--seed 1]
[--runs 10] [--beside VICTIM COMMAND]`.

A server gets mixed requests at once: chats, completions, responses and messages, streamed and whole, greedy and drawn,
with grammars, tools, adapters, log-probabilities, beams and n = 3. The first time nothing disturbs it. The second time
its engine's process is killed with -9 (`core`) or stopped (`hang`), or one of its workers is killed (`worker`, with
`-- -tp 3`), each at a moment that the seed chooses. Every answer must be that of the first time, bit for bit. Printed
are how many requests were lost, how many answers differ, and how long streams paused at a death. Each of `--runs` has a
server and a seed of its own. Exit code 1: one was lost or differs.

`--beside VICTIM COMMAND`, which may be given again, sends plain chats, greedy and drawn, first to Octavo and then to
the server that COMMAND starts at the port {port}. The process killed there is the one whose command line has the word
VICTIM: the server's own, or one of its children. When the server has ended, COMMAND is run again at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.server import MODEL, Server, running_server
from tests.lora.random_adapters import write_random_adapter
from tests.ports import held_port
from tests.waiting import wait_until

PATIENCE_S = 1800.0  # a request is lost when its connection ends: a busy machine may start an engine for minutes
STEP_TIMEOUT_S = 30
NUM_TOKENS = 100  # of most answers
SUBJECTS = ("the sea", "a printer of small books", "seven lamps", "the harbour at night", "a ship of paper", "leaves")
WEATHER = {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {
        "city": {"type": "string", "maxLength": 20}, "days": {"type": "array", "items": {"enum": [1, 3, 7]}},
    },
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
# Values that are new in each answer, or depend on what the cache holds.
NOT_COMPARED = {
    "id", "call_id", "item_id", "created", "created_at", "completed_at", "cached_tokens", "prompt_tokens_details",
    "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens", "kv_transfer_params",
}  # fmt: skip


def kinds(about: str, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return a request of each kind: the path and the body."""
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": seed}
    prompt, long = f"Here is what everybody should know about {about}: ", {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    messages = [{"role": "user", "content": f"Tell me a long story about {about}."}]
    asks = [{"role": "user", "content": f"What is the weather in the city of {about}? Answer as JSON."}]
    completions, chat = "/v1/completions", "/v1/chat/completions"
    return [
        (chat, {"messages": messages, "temperature": 0, "stream": True, **long}),
        (chat, {"messages": messages, "stream": True, "logprobs": True, "top_logprobs": 3, **drawn, **long}),
        (chat, {"messages": messages, "n": 3, **drawn, **long}),
        (chat, {"messages": asks, "tools": [TOOL], "tool_choice": "required", "stream": True, **drawn,
                "max_tokens": 150}),
        (chat, {"messages": asks, "stream": True, "max_tokens": 150, **drawn,
                "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}}),
        (completions, {"prompt": prompt, "temperature": 0, "stream": True, **long, "logprobs": 2}),
        (completions, {"prompt": prompt, "n": 3, "stream": True, **drawn, **long, "presence_penalty": 0.5}),
        (completions, {"prompt": prompt, **drawn, **long, "logprobs": 1, "prompt_logprobs": 2}),
        (completions, {"prompt": prompt, "stream": True, "model": "adapter", **drawn, **long}),
        (completions, {"prompt": prompt, "stream": True, "max_tokens": 200, **drawn, "stop": ["zzz", "\n\n\n"],
                       "structured_outputs": {"regex": "([a-z]{2,7} ){25}[a-z]{2,7}\\."}}),
        (completions, {"prompt": prompt, "n": 2, "use_beam_search": True, "temperature": 0, "max_tokens": 60}),
        ("/v1/responses", {"input": messages[0]["content"], "temperature": 0, "stream": True, "store": False,
                           "max_output_tokens": NUM_TOKENS}),
        ("/v1/messages", {"messages": messages, "max_tokens": NUM_TOKENS, "stream": True, "temperature": 0}),
    ]  # fmt: skip


def plain_kinds(about: str, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return a greedy and a drawn chat, which all servers stream."""
    messages = [{"role": "user", "content": f"Tell me a long story about {about}."}]
    shared = {"messages": messages, "stream": True, "max_tokens": NUM_TOKENS}
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": seed}
    return [("/v1/chat/completions", shared | {"temperature": 0}), ("/v1/chat/completions", shared | drawn)]


def requests(count: int, is_plain: bool = False) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    while len(found) < count:
        number = len(found)
        make = plain_kinds if is_plain else kinds
        found += make(f"{SUBJECTS[number % len(SUBJECTS)]}, number {number}", number)
    for path, body in found[:count]:
        body.setdefault("model", MODEL)
        if body.get("stream") and path.endswith("completions") and not is_plain:
            body["stream_options"] = {"include_usage": True}
    return found[:count]


def compared(value: Any) -> Any:
    """Return what two answers to one request must agree in."""
    if isinstance(value, dict):
        found = {key: compared(one) for key, one in value.items() if key not in NOT_COMPARED}
        if "cache_read_input_tokens" in value:  # Anthropic's usage: its input tokens are those that were not cached
            found["input_tokens"] += value["cache_read_input_tokens"]
        return found
    return [compared(one) for one in value] if isinstance(value, list) else value


def merge(whole: Any, part: Any, key: str = "") -> Any:
    """Add a delta to a whole. How a text is cut into deltas depends on how fast its client reads."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return whole | {name: merge(whole.get(name), one, name) for name, one in part.items()}
    if isinstance(part, list) and part and isinstance(part[0], dict) and isinstance(part[0].get("index"), int):
        by_index = {one["index"]: one for one in whole or []}
        for one in part:
            by_index[one["index"]] = merge(by_index.get(one["index"]), one)
        return [by_index[index] for index in sorted(by_index)]
    if isinstance(whole, list) and isinstance(part, list):
        return whole + part
    if (
        isinstance(whole, str)
        and isinstance(part, str)
        and key in ("text", "content", "reasoning_content", "arguments")
    ):
        return whole + part
    return whole if part is None else part


def first_difference(expected: Any, got: Any, place: str = "") -> str:
    """Return where two answers differ first, and what they have there."""
    if isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        pairs = [(expected[key], got[key], f"{place}.{key}") for key in expected]
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple) and len(expected) == len(got):
        pairs = [(one, other, f"{place}[{i}]") for i, (one, other) in enumerate(zip(expected, got, strict=True))]
    else:
        return f"{place}: {expected!r:.300} and {got!r:.300}"
    return next((first_difference(*pair) for pair in pairs if pair[0] != pair[1]), f"{place}: nothing")


def whole_of(events: list[dict[str, Any]]) -> Any:
    """Return the answer of a stream's events."""
    if "type" not in events[0]:
        whole: Any = {}
        for event in events:
            whole = merge(whole, compared(event))
        return whole
    texts: dict[str, str] = {}
    others = []
    for event in events:
        text = event.get("delta")
        text = text.get("text", text.get("partial_json")) if isinstance(text, dict) else text
        if isinstance(text, str):
            place = f"{event['type']} {event.get('output_index')} {event.get('content_index')} {event.get('index')}"
            texts[place] = texts.get(place, "") + text
        elif event["type"] != "ping":
            event.pop("sequence_number", None)
            others.append(compared(event))
    return texts, others


class Run:
    """All requests at once: their answers, and when their events came."""

    def __init__(self) -> None:
        self.answers: dict[int, Any] = {}
        self.lost: dict[int, str] = {}
        self.num_events = 0
        self.has_news = asyncio.Event()
        self.last_event: dict[int, float] = {}  # of each open stream
        self.deaths: list[float] = []
        self.pauses_s: list[dict[int, float]] = []  # by death, of each stream that was open then and when it was over

    async def ask(self, http: httpx.AsyncClient, number: int, path: str, body: dict[str, Any]) -> None:
        try:
            if body.get("stream"):
                whole = whole_of([event async for event in self._events(http, number, path, body)])
                if path.endswith("completions") and not all(one.get("finish_reason") for one in whole["choices"]):
                    raise ValueError("it ended without a finish_reason")
                self.answers[number] = whole
            else:
                response = await http.post(path, json=body)
                self.answers[number] = compared(response.raise_for_status().json())
        except (httpx.HTTPError, ValueError, LookupError) as error:
            self.lost[number] = f"{type(error).__name__}: {error}"
        self.last_event.pop(number, None)
        self.has_news.set()

    async def _events(
        self, http: httpx.AsyncClient, number: int, path: str, body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if event.get("error"):
                    raise ValueError(json.dumps(event["error"]))
                self.note_event(number)
                yield event

    def note_event(self, number: int) -> None:
        now = time.monotonic()
        self._note_gap(number, now)
        self.last_event[number] = now
        self.num_events += 1
        self.has_news.set()

    def note_death(self) -> None:
        now = time.monotonic()
        for number in self.last_event:  # a stream that has not gone on since the death before
            self._note_gap(number, now)
        self.deaths.append(now)
        self.pauses_s.append(dict.fromkeys(self.last_event, 0.0))

    def note_return(self) -> None:
        """Forget the streams whose last events were on their way at the death: they did not pause."""
        self.pauses_s[-1] = {number: pause for number, pause in self.pauses_s[-1].items() if number in self.last_event}

    def _note_gap(self, number: int, now: float) -> None:
        """Keep the longest gap since the last death. The first may be short: events are on their way at a death."""
        if self.deaths and number in self.pauses_s[-1]:
            gap_s = now - max(self.last_event[number], self.deaths[-1])
            self.pauses_s[-1][number] = max(self.pauses_s[-1][number], gap_s)

    async def until(self, num_events: int, count: int) -> None:
        """Return when so many events have come, or all `count` requests have ended."""
        while self.num_events < num_events and len(self.answers) + len(self.lost) < count:
            self.has_news.clear()
            await self.has_news.wait()


async def run(
    url: str, todo: list[tuple[str, dict[str, Any]]], deaths: list[str], moments: list[int], kill: Callable[[str], None]
) -> Run:
    """Ask all at once. The engine dies in the ways of `deaths`, each after so many events of all streams. `kill`
    returns when requests are taken again."""
    found = Run()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        asked = [asyncio.create_task(found.ask(http, i, path, body)) for i, (path, body) in enumerate(todo)]
        for how, moment in zip(deaths, moments, strict=True):
            await found.until(moment, len(todo))
            found.note_death()
            await asyncio.to_thread(kill, how)
            found.note_return()
        await asyncio.gather(*asked)
    return found


def kill_engine(server: Server, rng: random.Random, how: str) -> None:
    """Have an engine of Octavo die, and return when there is another."""
    cores = cores_of(server)
    victim = core = rng.choice(cores)
    if how == "worker":
        victim = next(one for one in core.children() if "octavo.execution.follower" in one.cmdline())
    victim.send_signal(signal.SIGSTOP if how == "hang" else signal.SIGKILL)
    wait_for_another_core(server, core.pid, len(cores))


def cores_of(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "octavo.engine.core_process" in child.cmdline()]


def wait_for_another_core(server: Server, pid: int, count: int) -> None:
    """Return when there are `count` cores without the core `pid` and requests are taken, or the server has ended."""

    def is_there() -> bool:
        try:
            pids = [core.pid for core in cores_of(server)]
        except psutil.Error:  # one ends at this moment, or the server
            return server.process.poll() is not None
        return pid not in pids and len(pids) == count and server.get("/health")[0] == 200

    wait_until(is_there, timeout_s=PATIENCE_S)


def choose_moments(rng: random.Random, num_events: int, num_deaths: int) -> list[int]:
    """Return after how many of all streams' events the engine dies."""
    share = 0.9 * num_events / max(1, num_deaths)
    return [int(share * (number + rng.random())) for number in range(num_deaths)]


def survive(
    count: int, deaths: list[str], seed: int, log: Path | None, flags: list[str], is_plain: bool = False
) -> dict[str, Any]:
    rng = random.Random(seed)
    todo = requests(count, is_plain)
    with tempfile.TemporaryDirectory() as folder:
        adapter = write_random_adapter(Path(folder, "adapter"), 1)
        with running_server(
            Path(folder), "--max-model-len", "2048", "--max-num-seqs", "128", "--enable-lora",
            "--lora-modules", f"adapter={adapter}", "--max-engine-restarts", str(len(deaths) + 3),
            "--engine-step-timeout", str(STEP_TIMEOUT_S), *flags,
        ) as server:  # fmt: skip
            kill = partial(kill_engine, server, rng)
            expected = asyncio.run(run(server.url, todo, [], [], kill))
            assert not expected.lost, expected.lost
            moments = choose_moments(rng, expected.num_events, len(deaths))
            found = asyncio.run(run(server.url, todo, deaths, moments, kill))
            server.wait_until_idle()
            counts = re.findall(r"^octavo:requests_continued_total\{.* (.*)$", server.get("/metrics")[1], re.MULTILINE)
            server.stop()
            if log is not None:
                log.write_text(server.log.read_text())
    counted = sum(map(int, map(float, counts)))
    died = {"deaths": deaths, "seed": seed, "after_events": moments}
    return {**died, **compare(todo, expected, found), "continued": counted}


def compare(todo: list[tuple[str, dict[str, Any]]], expected: Run, found: Run) -> dict[str, Any]:
    differing = [i for i, answer in sorted(found.answers.items()) if answer != expected.answers[i]]
    pauses_s = sorted(pause for of_death in found.pauses_s for pause in of_death.values())
    return {
        "requests": len(todo),
        "events": expected.num_events,
        "lost": len(found.lost),
        "not_equal": len(differing),
        "pauses": len(pauses_s),
        "pause_p50_s": round(statistics.median(pauses_s), 2) if pauses_s else None,
        "pause_p99_s": round(pauses_s[int(0.99 * (len(pauses_s) - 1))], 2) if pauses_s else None,
        "pause_p50_s_by_death": [round(statistics.median(one.values()), 2) if one else None for one in found.pauses_s],
        "why_lost": sorted(set(found.lost.values())),
        "differing": [
            {"request": todo[i], "expected": expected.answers[i], "got": found.answers[i]} for i in differing
        ],
    }


class Other:
    """A server that is not Octavo's. It is started again at once when it has ended, as a supervisor does."""

    def __init__(self, victim: str, command: str, log: Path) -> None:
        port = held_port()
        self.url = f"http://127.0.0.1:{port}"
        self._victim, self._command, self._log = victim, shlex.split(command.replace("{port}", str(port))), log
        self._process = self._start()
        self._wait_until_ready()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as out:
            return subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def _wait_until_ready(self) -> None:
        def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/v1/models").status_code == 200
            assert self._process.poll() is None, f"{self._command} has ended:\n{self._log.read_text()[-3000:]}"
            return False

        wait_until(is_ready, timeout_s=PATIENCE_S)

    def kill(self, _how: str) -> None:
        """Kill the victim with -9. A server that outlives it has a minute to end, or to take requests again."""
        own = psutil.Process(self._process.pid)
        processes = [own, *own.children(recursive=True)]
        next(one for one in processes if self._victim in " ".join(one.cmdline())).kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
            self.close()  # what is left of its children
            self._process = self._start()
        self._wait_until_ready()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def survive_beside(count: int, num_deaths: int, seed: int, victim: str, command: str) -> dict[str, Any]:
    """Return what another server loses of the plain chats."""
    rng, todo = random.Random(seed), requests(count, is_plain=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Other(victim, command, Path(folder, "log"))
        try:
            expected = asyncio.run(run(server.url, todo, [], [], server.kill))
            assert not expected.lost, expected.lost
            moments = choose_moments(rng, expected.num_events, num_deaths)
            found = asyncio.run(run(server.url, todo, ["core"] * num_deaths, moments, server.kill))
        finally:
            server.close()
    died = {"command": command, "killed": [victim] * num_deaths, "seed": seed, "after_events": moments}
    return died | compare(todo, expected, found)


def show(measured: dict[str, Any]) -> None:
    print(json.dumps({key: value for key, value in measured.items() if key != "differing"}, indent=1), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--deaths", nargs="*", choices=["core", "worker", "hang"], default=["core"] * 5)
    parser.add_argument("--seed", type=int, default=1, help="Of the first run; the next one has the next seed.")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--log", type=Path, help="Keep the server's log there.")
    parser.add_argument("--json", type=Path, help="Write what was measured there, with the answers that differ.")
    parser.add_argument(
        "--beside", nargs=2, action="append", default=[], metavar=("VICTIM", "COMMAND"), help="Another server."
    )
    parser.add_argument("flags", nargs="*", help="Flags of the server, behind --.")
    args = parser.parse_args()
    if args.beside and set(args.deaths) - {"core"}:
        parser.error("--beside kills only cores")
    runs, others = [], []
    for seed in range(args.seed, args.seed + args.runs):
        runs.append(measured := survive(args.requests, args.deaths, seed, args.log, args.flags, bool(args.beside)))
        total = {what: sum(one[what] for one in runs) for what in ("lost", "not_equal")}
        show(measured)
        for one in measured["differing"]:
            print(f"{one['request']} differs at {first_difference(one['expected'], one['got'])}", flush=True)
        for victim, command in args.beside:
            others.append(survive_beside(args.requests, len(args.deaths), seed, victim, command))
            show(others[-1])
        if args.json is not None:
            args.json.write_text(json.dumps({**total, "runs": runs, "others": others}, indent=1) + "\n")
    for victim, command in args.beside:
        lost = sum(one["lost"] for one in others if one["command"] == command)
        print(f"{command}: {lost} of {args.runs * args.requests} lost, {victim} killed {len(args.deaths)} times a run")
    print(f"{args.runs} runs, {len(args.deaths)} deaths each: {total['lost']} lost, {total['not_equal']} not equal")
    return int(any(total.values()))


if __name__ == "__main__":
    sys.exit(main())
